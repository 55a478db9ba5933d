"""Fixtures that several test modules share."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers
import vlms

# Spinning threads of several test processes make each other ten times slower
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tiny_vlm(tmp_path_factory):
    """`tiny_vlm("llava")` → a fresh (model, processor), loaded from a checkpoint that is written once a session."""
    directories = {}

    def load(family="llava"):
        if family not in directories:
            directories[family] = tmp_path_factory.mktemp(family)
            vlms.save_family(family, directories[family])
        return vlms.load_family(directories[family])

    return load


@pytest.fixture(params=vlms.FAMILIES)
def family(request):
    """The name of each supported model family in turn."""
    return request.param
