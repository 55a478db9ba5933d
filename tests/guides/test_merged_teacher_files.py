"""The past of a merged teacher on disk: what a run needs there, finds there, and can't go on with."""

import shutil
from types import SimpleNamespace

import pytest

from trl_gtr.guides.merged_teacher import MergedTeacher, check_disk


def test_another_merge_is_another_run(make_trainer, tmp_path):
    settings = {"save_strategy": "steps", "total_env_steps": 8}
    make_trainer(MergedTeacher("kl"), **settings).train()
    with pytest.raises(ValueError, match=r"guide\.merge was 'ties' and is 'linear'"):
        make_trainer(MergedTeacher("kl", merge="linear"), **settings).train(resume_from_checkpoint=True)


def test_a_new_run_starts_with_an_empty_past(make_trainer, tmp_path):
    for _ in range(2):
        trainer = make_trainer(total_env_steps=16)
        trainer.train()
        assert set(trainer.guide.files()) == {"start_000000.safetensors", "sums_000001.safetensors"}
    with pytest.raises(ValueError, match="contains an earlier run"):
        make_trainer(overwrite=False).train()


def test_sums_go_on_only_with_the_rule_they_were_made_by(make_trainer):
    settings = {"save_strategy": "steps", "total_env_steps": 16, "allow_changed_config": True}
    make_trainer(MergedTeacher("kl", merge="linear", weighting="sma"), **settings).train()
    settings["total_env_steps"] = 24
    for changed in ({"merge": "linear", "weighting": "ema"}, {"merge": "ties", "weighting": "sma"}):
        with pytest.raises(
            ValueError, match=r"holds sums for merge='linear', weighting='sma', with which .* resume with"
        ):
            make_trainer(MergedTeacher("kl", **changed), **settings).train(resume_from_checkpoint=True)
    unused = MergedTeacher("kl", merge="linear", weighting="sma", ties_density=0.5, ema_alpha=0.1)
    make_trainer(unused, **settings).train(resume_from_checkpoint=True)


def test_adapters_may_be_merged_by_another_rule(make_trainer):
    """Their past is kept policy by policy."""
    settings = {"save_strategy": "steps", "total_env_steps": 16, "allow_changed_config": True, "lora": True}
    make_trainer(MergedTeacher("kl", merge="linear"), **settings).train()
    resumed = make_trainer(MergedTeacher("kl"), **settings | {"total_env_steps": 24})
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3


# --- disk space ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True])
def test_a_full_disk_is_told_before_training_with_the_figure(make_trainer, monkeypatch, lora):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(
        ValueError, match=r"needs (0\.0|2\.05e-)\d+ GB in .*teacher for this run, but only 1e-06 GB are free"
    ):
        make_trainer(lora=lora)


def test_files_that_are_there_already_need_no_space(make_trainer, monkeypatch):
    trainer = make_trainer(lora=True)
    past = trainer.guide._run.past
    needed = past.bytes_needed(5, checkpoints=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed - 1))
    with pytest.raises(ValueError, match="are free"):
        check_disk(past, trainer.args, merge_every=1)
    past.add()
    check_disk(past, trainer.args, merge_every=1)


def test_a_resumed_run_has_what_its_checkpoints_hold_already(make_trainer, monkeypatch):
    """Three checkpoints have three sums, of which only the last is in `teacher/` too; two more are needed."""
    settings = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 3}
    first = make_trainer(MergedTeacher("kl"), **settings)
    first.train()
    past = first.guide._run.past
    start, sums = (past.files()[name].stat().st_size for name in (past.START, "sums_000003.safetensors"))
    assert past.bytes_held() == start + 3 * sums
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2 * sums))
    make_trainer(MergedTeacher("kl"), **settings)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=sums))
    with pytest.raises(ValueError, match="are free"):
        make_trainer(MergedTeacher("kl"), **settings)


def test_a_group_method_needs_space_for_the_updates_it_is_expected_to_have(make_trainer, monkeypatch, caplog):
    """It has 4 updates of 2 steps in each environment, or up to 8 with one step each: 5 or 9 policies."""
    trainer = make_trainer(lora=True)
    past, args = trainer.guide._run.past, trainer.args
    monkeypatch.setattr(args, "group_size", 2)
    for policies, warnings in ((9, 0), (8, 1), (5, 1)):
        caplog.clear()
        free = past.bytes_needed(policies, checkpoints=0)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        check_disk(past, args, merge_every=1)
        assert sum("expected 4 updates" in each and "up to 8" in each for each in caplog.messages) == warnings
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free - 1))
    with pytest.raises(ValueError, match="are free"):
        check_disk(past, args, merge_every=1)
