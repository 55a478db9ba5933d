"""What a run leaves on disk for its report: sampled episodes, metrics, its card, and pictures in the trackers."""

import errno
import json
import logging
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from toy import COLOURS, ColourTask, quiet_config
from transformers import TrainerCallback

from trl_gtr.correctors import ExpertCorrector
from trl_gtr.runs.episode_log import SCHEMA, write_shard
from trl_gtr.trainer import GTRTrainer

STEPS = {"rollout_steps": 3, "total_env_steps": 36, "per_device_train_batch_size": 12}


@pytest.fixture
def make_trainer(toy_checkpoint, tmp_path):
    def make(task=None, **overrides):
        args = quiet_config(
            **{"output_dir": tmp_path / "run", **STEPS, "episode_log_rate": 1.0, "overwrite": False, **overrides}
        )
        return GTRTrainer(toy_checkpoint, args, task or ColourTask(), ExpertCorrector())

    return make


def rows(folder):
    shards = sorted((folder / "episodes").glob("update-*-process-*.parquet"))
    return [row for shard in shards for row in pq.read_table(shard).to_pylist()]


def where(row):
    return row["env_index"], row["episode"], row["step"]


def test_load_dataset_opens_whole_episodes_with_what_was_seen_and_learned(make_trainer, tmp_path):
    from datasets import load_dataset

    task = ColourTask(length=2)
    trainer = make_trainer(task)
    trainer.train()
    folder = tmp_path / "run" / "episodes"
    data = load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    assert data.features == SCHEMA
    assert len(data) == 36
    # 9 steps of each environment in episodes of 2: the last one is open, and its success unknown
    assert sorted({(row["env_index"], row["episode"]) for row in data}) == [
        (env, n) for env in range(4) for n in range(5)
    ]
    known = {(row["env_index"], row["episode"]) for row in data if row["success"] is not None}
    assert {episode for _, episode in known} == {0, 1, 2, 3}
    for row in data:
        assert row["image"].size == (28, 28)
        assert "".join(row["tokens"]) == row["response"]
        assert len(row["tokens"]) == len(row["token_logprobs"])
        assert all(logprob <= 0 for logprob in row["token_logprobs"])
        if row["action"] is not None:
            # the token that straddles the boundary belongs to the action
            start = row["action_start"]
            assert row["thought"].startswith("".join(row["tokens"][:start]))
            assert len("".join(row["tokens"][: start + 1])) > len(row["thought"])
        (judged,) = row["judgement"]
        shown = min(COLOURS, key=lambda c: np.abs(np.asarray(row["image"]).mean((0, 1)) - COLOURS[c]).sum())
        assert judged == {"part": "colour", "right": row["thought_text"] == f"it is {shown}"}
        if row["valid"] and not judged["right"]:
            assert row["verdict"] == "corrected"
            assert row["corrected_thought"] == f'{{"thoughts": "it is {shown}", '
        if row["ended"]:
            assert row["success"] is not None
    # what a step earned decides what its episode was
    for episode in known:
        steps = [row for row in data if (row["env_index"], row["episode"]) == episode]
        assert {row["success"] for row in steps} - {None} == {all(row["reward"] > 0 for row in steps)}


def test_a_resumed_run_writes_what_an_unbroken_one_writes(make_trainer, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "episode_log_rate": 0.5}
    whole = make_trainer(**options, output_dir=str(tmp_path / "whole"))
    whole.train()
    broken = make_trainer(**options)
    broken.train()
    # The run "crashed" after the second checkpoint: a third update's files, and half of a fourth's, are there.
    left_over = tmp_path / "run" / "episodes" / ".update-000004-process-0.parquet"
    left_over.write_bytes(b"half a file")
    kept = foreign_files(tmp_path / "run")
    resumed = make_trainer(**options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert not left_over.exists()
    assert [path.read_text() for path in kept] == ["mine"] * len(kept)
    expected, found = rows(tmp_path / "whole"), rows(tmp_path / "run")
    assert [where(row) for row in found] == [where(row) for row in expected]
    assert [row["response"] for row in found] == [row["response"] for row in expected]
    assert 0 < len(found) < 36
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]


def foreign_files(folder):
    """What others keep where a run writes: files, and a folder."""
    mine = folder / "episodes" / "mine"
    mine.mkdir(parents=True, exist_ok=True)
    kept = [folder / "notes.txt", folder / "episodes" / "notes.md", mine / "update-000001-process-0.parquet"]
    kept += [folder / "episodes" / name for name in ("train.parquet", "update-000009.parquet")]
    for path in kept:
        path.write_text("mine")
    return kept


def test_a_fresh_run_leaves_foreign_files_alone(make_trainer, tmp_path):
    kept = foreign_files(tmp_path / "run")
    make_trainer(total_env_steps=12).train()
    assert [path.read_text() for path in kept] == ["mine"] * len(kept)


def test_a_fresh_run_does_not_destroy_an_earlier_one(make_trainer, tmp_path):
    folder = tmp_path / "run"
    first = make_trainer(save_strategy="steps", save_steps=3)
    first.train()
    kept = foreign_files(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(
        ValueError, match=r"holds an earlier run \(metrics\.jsonl, .*Set `overwrite=True` \(--overwrite\) to replace"
    ):
        make_trainer(total_env_steps=12).train()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    first.train()  # the same trainer may go on: it has nothing to do
    make_trainer(total_env_steps=12, overwrite=True).train()
    shards = sorted((folder / "episodes").glob("update-*-process-*.parquet"))
    assert [shard.name for shard in shards] == ["update-000001-process-0.parquet"]
    assert not (folder / "checkpoint-3").exists()
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
    assert [path.read_text() for path in kept] == ["mine"] * len(kept)


def test_a_checkpoint_of_another_folder_is_not_continued_over_an_earlier_run(make_trainer, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1}
    make_trainer(**options).train()
    make_trainer(**options, output_dir=str(tmp_path / "other")).train()
    resumed = make_trainer(**options, output_dir=str(tmp_path / "other"))
    with pytest.raises(ValueError, match="other holds an earlier run"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    resumed = make_trainer(**options, output_dir=str(tmp_path / "third"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert {row["update"] for row in rows(tmp_path / "third")} == {3}


def test_the_number_of_steps_is_bounded(make_trainer, tmp_path):
    make_trainer(episode_log_max_steps=12).train()
    assert 0 < len(rows(tmp_path / "run")) < 24
    make_trainer(episode_log_rate=0.0, total_env_steps=12, output_dir=str(tmp_path / "none")).train()
    assert not (tmp_path / "none" / "episodes").exists()


def test_lone_surrogates_and_long_lines_can_be_written(tmp_path):
    row = dict.fromkeys(SCHEMA) | {
        "image": np.zeros((2, 3, 3), np.uint8),
        "response": "\ud800</script>",
        "thought": "x" * 100_000,
        "tokens": ["\udfff", "é"],
    }
    write_shard(tmp_path / "episodes" / "update-000001-process-0.parquet", [row])
    (found,) = rows(tmp_path)
    assert found["response"] == "\ufffd</script>"
    assert len(found["thought"]) == 100_000
    assert found["tokens"] == ["\ufffd", "é"]


def test_metrics_and_card_are_there_while_the_run_goes_on(make_trainer, tmp_path, caplog):
    trainer = make_trainer(hub_token="hf_secret", eval_episodes=2)
    trainer.evaluate(metric_key_prefix="start")
    seen = []

    class Look:
        """A metric's own moment: after each log, what a reader of the folder would find."""

        def __init__(self, trainer):
            self.log = trainer.log
            trainer.log = self

        def __call__(self, logs, *args):
            logging.getLogger("trl_gtr.test").warning("look at update %d", trainer.state.global_step)
            self.log(logs, *args)
            seen.append(len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))

    Look(trainer)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert seen == [2, 3, 4]
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["start_episodes"] == 2.0
    text = (tmp_path / "run" / "run.json").read_text()
    card = json.loads(text)
    assert "hf_secret" not in text
    assert (card["task"], card["corrector"], card["hardware"]["processes"]) == ("colours", "expert", 1)
    assert {"num_envs", "temperature", "episode_log_rate"} <= set(card["changed"])
    assert "gamma" not in card["changed"]
    assert [(w["message"], w["update"], w["count"]) for w in card["warnings"]] == [
        (f"look at update {n}", n, 1) for n in (1, 2, 3)
    ]


class DiskFull(TrainerCallback):
    """From the second update on there is no space left for this file."""

    def __init__(self, path, monkeypatch):
        self.path, self.monkeypatch = path, monkeypatch

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            replace, open_file = os.replace, Path.open

            def full(path):
                if Path(path) == self.path:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            self.monkeypatch.setattr(
                "trl_gtr.storage.files.os.replace", lambda old, new: full(new) or replace(old, new)
            )
            self.monkeypatch.setattr(Path, "open", lambda path, *a, **k: full(path) or open_file(path, *a, **k))


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "episodes/update-000003-process-0.parquet"])
def test_a_full_disk_ends_the_run_with_what_to_do(make_trainer, tmp_path, monkeypatch, name):
    trainer = make_trainer(save_strategy="steps", save_steps=1)
    path = tmp_path / "run" / name
    with monkeypatch.context() as patch:
        trainer.callback_handler.callbacks.insert(0, DiskFull(path, patch))
        with pytest.raises(OSError, match=r"No space left on device.*Earlier checkpoints are intact") as caught:
            trainer.train()
    assert f"{path} could not be written" in str(caught.value)
    assert not path.with_name(f".{path.name}").exists()  # nothing half written is left
    # The last update before is whole, and the run goes on from it once there is space again.
    resumed = make_trainer(save_strategy="steps", save_steps=1)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


@pytest.mark.parametrize("folder", ["run", "run/episodes"])
def test_a_folder_that_can_not_be_made_is_named(make_trainer, tmp_path, folder):
    """A file in its place stands for a read-only disk, which binds nobody who may do everything."""
    trainer = make_trainer()
    path = tmp_path / folder
    if path.is_dir():
        path.rmdir()
    path.write_text("in the way")
    with pytest.raises(OSError, match=rf"{path}.* could not be written .*resume\.$"):
        trainer.train()


def test_tensorboard_gets_numbers_and_pictures(make_trainer, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    make_trainer(report_to="tensorboard", num_completions_to_print=2).train()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    tags = events.Tags()
    assert "train/thoughts/true" in tags["scalars"]
    assert tags["images"] == ["samples/0", "samples/1"]
    assert [event.step for event in events.Images("samples/0")] == [1, 2, 3]
    assert events.Images("samples/0")[0].width == 28


def test_a_damaged_card_does_not_end_a_resumed_run(make_trainer, tmp_path, caplog):
    make_trainer(save_strategy="steps", save_steps=1).train()
    (tmp_path / "run" / "run.json").write_text('{"started": ')
    make_trainer(save_strategy="steps", save_steps=1).train(resume_from_checkpoint=True)
    assert "run.json can't be read" in caplog.text
    assert json.loads((tmp_path / "run" / "run.json").read_text())["started"]


def test_a_restarted_run_that_had_saved_nothing_begins_afresh(make_trainer, tmp_path):
    make_trainer(save_strategy="no").train()
    with pytest.raises(ValueError, match="holds no checkpoint"):
        make_trainer(overwrite=False).train(resume_from_checkpoint=True)
    again = make_trainer(overwrite=True)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == again.args.num_updates


def test_an_adapter_of_an_earlier_run_is_not_mixed_with_a_model(make_trainer, tmp_path):
    """Both in one folder, the adapter would be loaded."""
    (tmp_path / "run").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "manifest.json"):
        (tmp_path / "run" / name).write_text("{}")
    with pytest.raises(ValueError, match=r"holds an earlier run .*adapter_config\.json"):
        make_trainer(overwrite=False).train()
    trainer = make_trainer(overwrite=True)
    trainer.train()
    trainer.save_model()
    assert not list((tmp_path / "run").glob("adapter_*"))
