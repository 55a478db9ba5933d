"""A checkpoint is data: whatever stands in its files, nothing of it is executed."""

import gzip
import json
import os
import pickle
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from toy import ColourTask, quiet_config

from trl_gtr.correctors import ExpertCorrector
from trl_gtr.runs.manifest import Manifest, saved_task
from trl_gtr.storage.plain_data import encode
from trl_gtr.trainer import GTRTrainer


@pytest.fixture
def make_trainer(toy_checkpoint, tmp_path):
    def make(task=None, corrector=None, **overrides):
        settings = {"save_strategy": "steps", "save_steps": 1, "total_env_steps": 16, **overrides}
        config = quiet_config(settings.pop("output_dir", tmp_path / "run"), **settings)
        return GTRTrainer(toy_checkpoint, config, task or ColourTask(length=3), corrector or ExpertCorrector())

    return make


class Counting(ExpertCorrector):
    """Counts its calls in its state."""

    calls = 0

    def correct(self, requests):
        self.calls += 1
        return super().correct(requests)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


class Trap:
    """Makes a folder wherever it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def list_files(checkpoint):
    """Write sizes and checksums of a checkpoint's files anew, as whoever tampers with one would."""
    Manifest.read(checkpoint).listing(checkpoint).write(checkpoint)


def test_nothing_that_is_planted_in_a_checkpoint_is_executed(make_trainer, tmp_path):
    make_trainer().train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    names = sorted(path.name for path in checkpoint.iterdir() if path.name != "manifest.json")
    for name in names:
        file, trap = checkpoint / name, tmp_path / f"trap-{name}"
        whole = file.read_bytes()
        if name.endswith(".npz"):
            with np.load(file) as arrays:
                np.savez(file, **dict.fromkeys(arrays, np.array([Trap(trap)], dtype=object)))
        else:
            file.write_bytes(pickle.dumps(Trap(trap)))
        list_files(checkpoint)
        with suppress(Exception):  # each file has its own reader, and its own way to refuse
            make_trainer(total_env_steps=32).train(resume_from_checkpoint=str(checkpoint))
        assert not trap.exists(), name
        file.write_bytes(whole)
    list_files(checkpoint)
    assert make_trainer(total_env_steps=32).train(resume_from_checkpoint=str(checkpoint)).global_step == 2


def test_a_pickle_of_environments_is_read_only_where_the_run_asks_for_it(make_trainer, tmp_path):
    make_trainer(pickle_environments=True).train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    file, trap = checkpoint / "environments_0.json.gz", tmp_path / "trap"
    whole = file.read_bytes()
    file.write_bytes(gzip.compress(json.dumps(encode({"pickled": pickle.dumps(Trap(trap))})).encode()))
    list_files(checkpoint)
    with pytest.raises(
        ValueError, match=r"as a pickle, which can execute anything.*`pickle_environments=True` only if"
    ):
        make_trainer().train(resume_from_checkpoint=str(checkpoint))
    assert not trap.exists()
    file.write_bytes(whole)
    list_files(checkpoint)
    resumed = make_trainer(pickle_environments=True, total_env_steps=32)
    assert resumed.train(resume_from_checkpoint=str(checkpoint)).global_step == 2


def test_environments_that_cant_be_read_are_told(make_trainer, tmp_path):
    make_trainer().train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    file = checkpoint / "environments_0.json.gz"
    for damaged in (b"", b"no gzip", gzip.compress(b"[" * 100_000), gzip.compress(b'{"!Popen": []}')):
        file.write_bytes(damaged)
        list_files(checkpoint)
        with pytest.raises(ValueError, match=r"checkpoint-1 is damaged: environments_0.json.gz can't be read"):
            make_trainer().train(resume_from_checkpoint=str(checkpoint))


def test_a_checkpoint_of_version_0_1_is_refused(make_trainer, tmp_path):
    make_trainer().train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    (checkpoint / "manifest.json").rename(checkpoint / "gtr_contents.json")
    with pytest.raises(
        ValueError, match=r"checkpoint-1 is a checkpoint of trl-gtr 0\.1, which this version can't resume"
    ):
        make_trainer().train(resume_from_checkpoint=str(checkpoint))
    make_trainer(overwrite=True).train()  # but it may be overwritten


def test_a_saved_agent_is_not_resumed(make_trainer, tmp_path):
    trainer = make_trainer()
    trainer.train()
    trainer.save_model()
    assert saved_task(tmp_path / "run") == "colours"
    with pytest.raises(ValueError, match="is a saved agent, not a checkpoint: resume from a checkpoint-"):
        make_trainer().train(resume_from_checkpoint=str(tmp_path / "run"))


def test_other_versions_are_named(make_trainer, tmp_path, caplog):
    make_trainer().train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    manifest = Manifest.read(checkpoint)
    replace(manifest, versions={**manifest.versions, "torch": "1.0"}).write(checkpoint)
    make_trainer(total_env_steps=32).train(resume_from_checkpoint=str(checkpoint))
    assert "checkpoint-1 was written with torch 1.0 (now " in caplog.text


def test_a_corrector_that_is_new_starts_afresh(make_trainer, tmp_path, caplog):
    make_trainer().train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    trainer = make_trainer(total_env_steps=32, corrector=Counting(), allow_changed_config=True)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert "checkpoint-1 holds no state of the corrector, which starts afresh" in caplog.text
    assert trainer.corrector.calls == 4
    again = make_trainer(total_env_steps=48, corrector=Counting())
    again.train(resume_from_checkpoint=True)
    assert again.corrector.calls == 8
    assert again.counters.env_steps == 48


def test_a_checkpoint_knows_whether_it_is_this_runs_own(make_trainer, tmp_path):
    trainer = make_trainer()
    assert not trainer.checkpointer.is_saved(1)
    trainer.train()
    assert trainer.checkpointer.is_saved(1)
    assert not make_trainer().checkpointer.is_saved(1)  # an earlier run's
    elsewhere = make_trainer(output_dir=str(tmp_path / "other"))
    elsewhere.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert not elsewhere.checkpointer.is_saved(1)
