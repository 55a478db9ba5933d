"""A training script from start to end: stopped at any moment it loses nothing, and resumed it shows the whole run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from toy import ColourTask, build_toy_model, quiet_config

from trl_gtr.config import GTRConfig
from trl_gtr.correctors import ExpertCorrector
from trl_gtr.engines.base import EngineLost, EngineRefused
from trl_gtr.evaluation.reports import read_evaluations
from trl_gtr.learning.mismatch import SamplerMismatch
from trl_gtr.scripts import train as script
from trl_gtr.scripts.settings import read_yaml
from trl_gtr.tasks import make_task
from trl_gtr.trainer import GTRTrainer


@pytest.mark.parametrize(
    "file", [*(ROOT / "trl_gtr" / "configs").glob("*.yaml"), *ROOT.glob("examples/configs/custom*")]
)
def test_the_embedded_models_runs_are_saved(file: Path) -> None:
    settings = read_yaml(str(file))
    assert settings.get("save_strategy", "steps") != "no"
    assert settings["save_total_limit"] == 1


@pytest.mark.parametrize(
    ("task", "options", "words"),
    [
        ("minigrid", {}, ""),
        ("minigrid", {"level": "MiniGrid-FourRooms-v0"}, "view partial, not with level MiniGrid-FourRooms-v0, view p"),
        ("minigrid", {"view": "full"}, "tiny-minigrid was fine-tuned with level BabyAI-GoToObj-v0, view partial, not"),
        ("frozen_lake", {}, ""),
    ],
)
@pytest.mark.parametrize("model", ["tiny-minigrid", "some/model", None])
def test_an_embedded_model_on_another_level_is_reported(
    task: str, options: dict[str, str], words: str, model: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    script.report_other_game(make_task(task, **options), model)
    assert words in caplog.text if model == "tiny-minigrid" else not caplog.text
    assert len(caplog.records) == bool(words and model == "tiny-minigrid")


# A short run that only a signal ends.
ENDLESS = [
    "--num_envs", "4", "--rollout_steps", "4", "--total_env_steps", "160000", "--per_device_train_batch_size", "8",
    "--num_ppo_epochs", "1", "--cloning_steps", "1", "--eval_episodes", "2", "--report", "false",
]  # fmt: skip


def start(*options: str, cwd: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trl_gtr.cli", "train", "--task", "points24", *ENDLESS, *options]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=environment, start_new_session=True, **both)


def test_ctrl_c_on_the_flagship_run_loses_nothing(tmp_path: Path) -> None:
    """With the settings that it has by default; as in a terminal, the signal reaches launcher and script."""
    process = start(cwd=tmp_path)
    folder = tmp_path / "runs" / "points24"
    end = time.monotonic() + 300
    while not list(folder.glob("checkpoint-*")) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    shown, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGINT, shown
    (checkpoint,) = folder.glob("checkpoint-*")  # only the last
    assert f"Resume from {checkpoint.relative_to(tmp_path)} (--resume_from_checkpoint true)." in shown
    assert "Traceback" not in shown
    update = int(checkpoint.name.removeprefix("checkpoint-"))

    process = start("--resume_from_checkpoint", "true", "--total_env_steps", str(16 * (update + 1)), cwd=tmp_path)
    shown, _ = process.communicate(timeout=300)
    assert process.returncode == 0, shown
    assert "Evaluation at the start" not in shown
    for row in ("pool, start", "unseen, start", "pool, end", "unseen, end"):
        assert row in shown
    assert f"before and after {update + 1} updates" in shown


@pytest.fixture
def make_trainer(toy_checkpoint: str, tmp_path: Path) -> Any:
    def make(model: str = toy_checkpoint, **settings: Any) -> GTRTrainer:
        config: GTRConfig = quiet_config(
            tmp_path / "run", **{"eval_episodes": 4, "save_strategy": "steps", **settings}
        )
        return GTRTrainer(model, config, ColourTask(), ExpertCorrector())

    return make


def press(trainer: GTRTrainer, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Press Ctrl-C as soon as the evaluation at this moment begins."""
    evaluate = trainer.evaluate

    def interrupted(task: Any, metric_key_prefix: str) -> Any:
        if metric_key_prefix.startswith(when):
            signal.raise_signal(signal.SIGINT)
        return evaluate(task, metric_key_prefix)

    monkeypatch.setattr(trainer, "evaluate", interrupted)


@pytest.mark.parametrize(
    ("when", "words"), [("start", "Nothing has been trained yet."), ("end", "The agent is in {folder}.")]
)
def test_ctrl_c_during_an_evaluation_is_one_line(
    make_trainer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    when: str,
    words: str,
) -> None:
    trainer = make_trainer()
    press(trainer, monkeypatch, when)
    with pytest.raises(SystemExit) as stopped:
        script.train_and_report(trainer, {"colours": ColourTask()}, report=False)
    assert stopped.value.code == 130
    assert f"SIGINT received during an evaluation. {words.format(folder=tmp_path / 'run')}" in caplog.text
    assert (tmp_path / "run" / "model.safetensors").is_file() == (when == "end")


def test_a_resumed_runs_table_keeps_its_start(
    make_trainer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = {"colours": ColourTask()}
    first = script.train_and_report(make_trainer(), tasks, report=False)
    longer = make_trainer(total_env_steps=48, resume_from_checkpoint="true")
    capsys.readouterr()
    reports = script.train_and_report(longer, tasks, report=False)
    assert list(reports) == ["colours, start", "colours, end"]
    assert reports["colours, start"].metrics() == first["colours, start"].metrics()
    assert "colours, start" in capsys.readouterr().out
    assert read_evaluations(tmp_path / "run") == reports


def test_a_restarted_run_without_a_checkpoint_is_evaluated_first(make_trainer: Any) -> None:
    """As a scheduler restarts it: `resume_from_checkpoint` with `overwrite`."""
    trainer = make_trainer(resume_from_checkpoint="true", overwrite=True)
    assert "colours, start" in script.train_and_report(trainer, {"colours": ColourTask()}, report=False)


@pytest.mark.parametrize(
    ("part", "error", "code"),
    [
        ("evaluate", EngineLost("the server is gone"), 1),
        ("evaluate", EngineRefused("other tokens"), 2),
        ("train", EngineLost("the server is gone"), 1),
        ("train", SamplerMismatch("old weights"), 1),
    ],
)
def test_an_engine_that_cannot_go_on_ends_the_run_with_one_line(
    part: str,
    error: Exception,
    code: int,
    make_trainer: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    trainer = make_trainer()
    monkeypatch.setattr(trainer, part, fail)
    with pytest.raises(SystemExit) as stopped:
        script.train_and_report(trainer, {"colours": ColourTask()}, report=False)
    assert stopped.value.code == code
    assert capsys.readouterr().err.endswith(f"error: {error}\n")


def test_an_engine_that_is_lost_while_a_signal_ends_the_run_is_no_news(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise EngineLost("nobody waits for it any more")

    trainer = make_trainer()
    monkeypatch.setattr(trainer, "evaluate", fail)
    with pytest.raises(SystemExit) as stopped:
        script.train_and_report(trainer, {"colours": ColourTask()}, report=False)
    assert stopped.value.code == 128 + signal.SIGTERM


def test_a_hopeless_run_ends_with_one_line(
    make_trainer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, processor = build_toy_model()
    model.save_pretrained(tmp_path / "untrained")
    processor.save_pretrained(tmp_path / "untrained")
    trainer = make_trainer(str(tmp_path / "untrained"), total_env_steps=64)
    with pytest.raises(SystemExit) as stopped:
        script.train_and_report(trainer, {"colours": ColourTask()}, report=False)
    assert stopped.value.code == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "examples/sft.py" in line


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--load_in_4bit true", "quantized: load it without quantization"),
        ("--load_in_8bit true", "quantized: load it without quantization"),
        ("--corrector openai", "--guide turbo_sft doesn't ask --corrector openai: add --turbo_with_corrector true"),
        ("--corrector=expert", "doesn't ask --corrector expert"),
        ("--corrector none", "it was loaded"),
        ("--corrector expert --turbo_with_corrector true", "it was loaded"),
        ("--guide corrector --corrector expert --load_in_4bit true", "it was loaded"),
        ("", "it was loaded"),
    ],
)
def test_what_contradicts_a_merged_teacher_is_told_before_a_model_is_loaded(
    words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*args: Any) -> None:
        raise ValueError("it was loaded")

    monkeypatch.setattr(script, "load_model", load)
    with pytest.raises(SystemExit):
        script.train(["--guide", "turbo_sft", "--output_dir", str(tmp_path), *words.split()])
    assert told in capsys.readouterr().err


def test_a_file_that_names_a_corrector_asks_for_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("model_name_or_path: tiny\nguide: turbo_kl\ncorrector: expert\n")
    with pytest.raises(SystemExit):
        script.train(["--config", str(file), "--output_dir", str(tmp_path / "run"), "--use_cpu", "--bf16", "false"])
    assert "--guide turbo_kl doesn't ask --corrector expert" in capsys.readouterr().err
