"""A checkpoint is data: whatever stands in its files, nothing of it is executed."""

import gzip
import json
import os
import pickle
from contextlib import suppress

import numpy as np
import pytest
from toy import ColourTask, quiet_config

from trl_gtr.correctors import ExpertCorrector
from trl_gtr.runs import checkpoints
from trl_gtr.storage.plain_data import encode
from trl_gtr.trainer import GTRTrainer


@pytest.fixture
def make_trainer(toy_checkpoint, tmp_path):
    def make(task=None, **overrides):
        settings = {"save_strategy": "steps", "save_steps": 1, "total_env_steps": 16, **overrides}
        config = quiet_config(tmp_path / "run", **settings)
        return GTRTrainer(toy_checkpoint, config, task or ColourTask(length=3), ExpertCorrector())

    return make


class Trap:
    """Makes a folder wherever it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def list_contents(checkpoint):
    """Write sizes and checksums of a checkpoint's files anew, as whoever tampers with one would."""
    contents = json.loads((checkpoint / "gtr_contents.json").read_text())
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != "gtr_contents.json"]
    contents["files"] = {
        path.relative_to(checkpoint).as_posix(): [path.stat().st_size, checkpoints._checksum(path)] for path in files
    }
    (checkpoint / "gtr_contents.json").write_text(json.dumps(contents))


def test_nothing_that_is_planted_in_a_checkpoint_is_executed(make_trainer, tmp_path):
    make_trainer().train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    names = sorted(path.name for path in checkpoint.iterdir() if path.name != "gtr_contents.json")
    for name in names:
        file, trap = checkpoint / name, tmp_path / f"trap-{name}"
        whole = file.read_bytes()
        if name.endswith(".npz"):
            with np.load(file) as arrays:
                np.savez(file, **dict.fromkeys(arrays, np.array([Trap(trap)], dtype=object)))
        else:
            file.write_bytes(pickle.dumps(Trap(trap)))
        list_contents(checkpoint)
        with suppress(Exception):  # each file has its own reader, and its own way to refuse
            make_trainer(total_env_steps=32).train(resume_from_checkpoint=str(checkpoint))
        assert not trap.exists(), name
        file.write_bytes(whole)
    list_contents(checkpoint)
    assert make_trainer(total_env_steps=32).train(resume_from_checkpoint=str(checkpoint)).global_step == 2


def test_a_pickle_of_environments_is_read_only_where_the_run_asks_for_it(make_trainer, tmp_path):
    make_trainer(pickle_environments=True).train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    file, trap = checkpoint / "environments_0.json.gz", tmp_path / "trap"
    whole = file.read_bytes()
    file.write_bytes(gzip.compress(json.dumps(encode({"pickled": pickle.dumps(Trap(trap))})).encode()))
    list_contents(checkpoint)
    with pytest.raises(
        ValueError, match=r"as a pickle, which can execute anything.*`pickle_environments=True` only if"
    ):
        make_trainer().train(resume_from_checkpoint=str(checkpoint))
    assert not trap.exists()
    file.write_bytes(whole)
    list_contents(checkpoint)
    resumed = make_trainer(pickle_environments=True, total_env_steps=32)
    assert resumed.train(resume_from_checkpoint=str(checkpoint)).global_step == 2


def test_environments_that_cant_be_read_are_told(make_trainer, tmp_path):
    make_trainer().train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    file = checkpoint / "environments_0.json.gz"
    for damaged in (b"", b"no gzip", gzip.compress(b"[" * 100_000), gzip.compress(b'{"!Popen": []}')):
        file.write_bytes(damaged)
        list_contents(checkpoint)
        with pytest.raises(ValueError, match=r"checkpoint-1 is damaged: environments_0.json.gz can't be read"):
            make_trainer().train(resume_from_checkpoint=str(checkpoint))


def test_a_checkpoint_of_an_older_version_is_refused(make_trainer, tmp_path):
    make_trainer().train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    contents = json.loads((checkpoint / "gtr_contents.json").read_text())
    assert contents.pop("format") == 2
    assert all(len(checksum) == 64 for _, checksum in contents["files"].values())
    (checkpoint / "gtr_contents.json").write_text(json.dumps(contents))
    with pytest.raises(
        ValueError, match="is a checkpoint of format 1, and this version of trl-gtr reads format 2 only"
    ):
        make_trainer().train(resume_from_checkpoint=str(checkpoint))
