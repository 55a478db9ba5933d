"""Fixtures that several test modules share. Torch is imported by those tests only that need it."""

import os
import signal

import pytest

# A job in the background inherits an ignored Ctrl-C, which some tests press.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
# Spinning threads of several test processes make each other ten times slower
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_vlm(tmp_path_factory):
    """`tiny_vlm("llava")` → a fresh (model, processor), loaded from a checkpoint that is written once a session.

    The names are those in `vlms.FAMILIES`.
    """
    import vlms

    directories = {}

    def load(family="llava"):
        if family not in directories:
            directories[family] = tmp_path_factory.mktemp(family)
            vlms.save_family(family, directories[family])
        return vlms.load_family(directories[family])

    return load


@pytest.fixture(scope="session")
def toy_checkpoint(tmp_path_factory):
    """Folder of a toy model (`toy.py`) that answers in the right form and at random."""
    import toy

    folder = tmp_path_factory.mktemp("toy")
    model, processor = toy.build_toy_model()
    toy.teach_format(model, processor)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)
