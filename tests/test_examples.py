"""Every example, shortened, by the command that its docstring gives, or with its options in this process.
(convert_llava.py and audit_corrector.py have their own tests in test_convert_llava.py and test_audit.py.)"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from example_scripts import example, run_here
from paths import ROOT

from trl_gtr import tiny_llava
from trl_gtr.runs.manifest import saved_task

PYTHON = [sys.executable]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
# Two updates of 16 steps, two episodes of evaluation.
SHORT = [
    "--num_envs", "4", "--rollout_steps", "4", "--total_env_steps", "32", "--per_device_train_batch_size", "8",
    "--num_ppo_epochs", "1", "--cloning_steps", "1", "--eval_episodes", "2",
]  # fmt: skip


def run(launcher: list[str], script: str, *options: Any, cwd: Path) -> str:
    """The output of an example script, both streams; it must succeed."""
    return output_of([*launcher, str(ROOT / "examples" / script), *map(str, options)], cwd)


def command(*words: str, cwd: Path) -> str:
    """The output of `trl-gtr …`, both streams; it must succeed."""
    return output_of([*PYTHON, "-m", "trl_gtr.cli", *words], cwd)


def output_of(command: list[str], cwd: Path) -> str:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def log_of(folder: Path) -> dict[str, float]:
    """All that was logged, the last value of each name."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {name: value for entry in history for name, value in entry.items()}


def test_every_example_is_short_and_says_how_to_run_it() -> None:
    for script in (ROOT / "examples").glob("*.py"):
        text = script.read_text("utf-8")
        assert len(text.splitlines()) <= 100, script.name
        assert re.search(rf"(python|launch|--config_file \S+) examples/{script.name}", text), script.name


def test_points24_trains_and_its_agent_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run(ACCELERATE, "points24.py", *SHORT, "--output_dir", "agent", cwd=tmp_path)
    assert re.search(r"2/2 \[\d\d:\d\d<00:00", shown), "a progress bar with the time that is left"
    assert "points24 before and after 2 updates, 2 episodes each" in shown
    for row in ("pool, start", "pool, end", "unseen, start", "unseen, end"):
        assert row in shown
    assert "The agent is in agent." in shown
    log = log_of(tmp_path / "agent")
    assert {"start_pool_success", "end_pool_success", "end_unseen_success", "loss/policy", "loss/cloning"} <= set(log)
    assert saved_task(tmp_path / "agent") == "points24"

    options = ["--hands", "pool", "--episodes", "3", "--output", "played.json"]
    monkeypatch.chdir(tmp_path)
    shown = run_here("evaluate", "--agents", "expert", "random", "agent", *options)
    assert "success by kind of deal" in shown
    played = json.loads((tmp_path / "played.json").read_text())
    assert list(played) == ["expert", "random", "agent"]
    assert played["expert"]["metrics"]["success"] == 1.0
    kinds = [[episode["difficulty"] for episode in report["episodes"]] for report in played.values()]
    assert kinds[0] == kinds[1] == kinds[2]  # the same deals for everybody


@pytest.mark.parametrize("task", ["ezpoints", "number_line", "blackjack"])
def test_gym_cards(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--task", task, "--disable_tqdm=true", *SHORT]
    if task == "ezpoints":
        run(ACCELERATE, "gym_cards.py", *options, cwd=tmp_path)
    else:
        run_here("gym_cards", *options)
    folder = tmp_path / "runs" / task  # each game has its own
    assert {f"start_{task}_success", f"end_{task}_success"} <= set(log_of(folder))
    assert saved_task(folder) == task


OWN_TASK = """
from trl_gtr.tasks.blackjack import BlackjackTask

class Mine(BlackjackTask):
    name = "mine"

    def __init__(self, level=1):
        super().__init__()
        assert level == 3
"""


def test_a_task_of_ones_own_through_the_command(tmp_path: Path) -> None:
    """`trl-gtr train --task module:Class`, its option by name; a run is of whole updates, and says so."""
    (tmp_path / "my_tasks.py").write_text(OWN_TASK)
    own = ["--task", "my_tasks:Mine", "--level", "3"]
    options = ["--model_name_or_path", "tiny", "--use_cpu", "--output_dir", "agent", "--report", "false", *SHORT]
    options[options.index("--total_env_steps") + 1] = "20"
    shown = command("train", *own, *options, "--num_processes", "1", cwd=tmp_path)
    rounding = "total_env_steps = 20 is rounded up to 32: 2 updates of num_envs × rollout_steps = 4 × 4 steps."
    assert shown.splitlines().count(rounding) == 1
    assert saved_task(tmp_path / "agent") == "mine"
    shown = command("evaluate", *own, "--agents", "agent", "expert", "--episodes", "2", cwd=tmp_path)
    assert "my_tasks:Mine, level: 3, 2 episodes each" in shown


def test_gym_cards_without_a_corrector_asks_none(tmp_path: Path) -> None:
    """PPO alone, on the game of the other script."""
    ppo = ["--thought_cloning_coef", "0"]
    run_here("gym_cards", "--task=points24", "--output_dir", tmp_path / "agent", "--disable_tqdm=true", *ppo, *SHORT)
    log = log_of(tmp_path / "agent")
    assert log["buffer/size"] == 0
    assert not [name for name in log if name.startswith("corrector/")]


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])  # other tests may have launched on accelerate's own
    config = ROOT / "examples" / "accelerate_configs" / "cpu_2proc.yaml"
    two = [*ACCELERATE, "--config_file", str(config), "--main_process_port", port]
    shown = run(two, "points24.py", *SHORT, "--per_device_train_batch_size", "4", cwd=tmp_path)
    assert shown.count("The agent is in runs/points24.") == 1
    log = log_of(tmp_path / "runs" / "points24")
    assert log["env_steps"] == 32
    assert {"time/collect_rank_0", "time/collect_rank_1"} <= set(log)
    assert log["end_pool_episodes"] == 2  # one on each process


def test_custom_task(tmp_path: Path) -> None:
    run_here("custom_task", *SHORT, "--output_dir", tmp_path / "agent")
    assert {"start_lamp_success", "end_lamp_success"} <= set(log_of(tmp_path / "agent"))


@pytest.mark.slow
def test_sft_of_an_adapter_and_training_from_it(tmp_path: Path) -> None:
    """The way of a real checkpoint: LoRA on given weights, then GTR with another LoRA on the adapted model."""
    lora = ["--model_name_or_path", "tiny", "--use_peft", "--lora_r", "2"]
    short = ["--tasks", "ezpoints=16", "--per_device_train_batch_size", "8", "--max_steps", "1", "--use_cpu"]
    shown = run(PYTHON, "sft.py", *lora, *short, "--output_dir", "adapter", cwd=tmp_path)
    assert "The fine-tuned adapter is in adapter." in shown
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    lora[1] = "adapter"
    run(PYTHON, "gym_cards.py", "--task", "ezpoints", *lora, *SHORT, "--output_dir", "agent", cwd=tmp_path)
    assert "end_ezpoints_success" in log_of(tmp_path / "agent")


@pytest.mark.slow
def test_sft_makes_a_model_that_plays(tmp_path: Path) -> None:
    config = ROOT / "examples" / "configs" / "sft_tiny.yaml"
    short = ["--tasks", "ezpoints=16", "points24_pool=16", "--per_device_train_batch_size", "8"]
    shown = run(PYTHON, "sft.py", "--config", config, *short, "--output_dir", "start", cwd=tmp_path)
    assert "The fine-tuned model is in start." in shown
    assert {path.name for path in tiny_llava.path().iterdir()} <= {
        path.name for path in (tmp_path / "start").iterdir()
    }
    evaluate, train = [line.split() for line in shown.splitlines() if line.startswith("  trl-gtr ")]  # what comes next
    assert "ezpoints, 2 episodes each" in command(*evaluate[1:], "--episodes", "2", cwd=tmp_path)
    assert "The agent is in runs/ezpoints." in command(*train[1:], *SHORT, cwd=tmp_path)


def test_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--arms", "gtr", "ppo", "--seeds", "3", "--output", "study", "--", *SHORT]
    shown = run_here("compare", "--study", "points24", *options)
    assert "gtr" in shown
    assert re.search(r"points24 \(study/ARM/seedN/log\.txt\):.* 2/2 ", shown), "a bar over the runs"
    assert {run["arm"] for run in json.loads((tmp_path / "study" / "compare.json").read_text())} == {"gtr", "ppo"}
    assert (tmp_path / "study" / "compare.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "folders"),
    [
        (["--study", "turbo"], ["points24/ppo", "ezpoints/ppo", "number_line/ppo"]),
        (["--study", "turbo", "--tasks", "ezpoints"], ["ezpoints/ppo"]),
        (["--study", "points24", "--tasks", "points24", "ezpoints"], ["points24/ppo", "ezpoints/ppo"]),
        (["--study", "points24", "--task", "ezpoints"], ["ppo"]),
    ],
)
def test_runs_on_several_tasks_have_folders_of_their_own(
    options: list[str], folders: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare, started = example("compare"), []

    def run_nothing(folder: Path, settings: dict[str, Any], options: list[str]) -> list[dict[str, Any]]:
        started.append((str(folder.relative_to(tmp_path).parent), settings["task"]))
        return [{"episode/success": 0.5, "env_steps": 8}]

    monkeypatch.setattr(compare, "run", run_nothing)
    monkeypatch.setattr(compare, "draw_curves", lambda *args: None)
    words = ["compare.py", *options, "--arms", "ppo", "--seeds", "0", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    compare.main()
    assert [folder for folder, _ in started] == folders
    assert all(folder.removesuffix("ppo") in ("", f"{task}/") for folder, task in started)


def test_finished_runs_of_another_machine_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare, started = example("compare"), []
    log = [{"episode/success": 0.5, "env_steps": 8}]
    finished = [{"arm": "ppo", "seed": 0, "task": "ezpoints", "log": log}]
    (tmp_path / "finished.json").write_text(json.dumps(finished))
    monkeypatch.setattr(compare, "run", lambda folder, *_: started.append(str(folder.relative_to(tmp_path))) or log)
    monkeypatch.setattr(compare, "draw_curves", lambda *args: None)
    words = ["--study", "turbo", "--tasks", "ezpoints", "--arms", "ppo", "--seeds", "0", "1"]
    known = ["--finished", str(tmp_path / "finished.json"), "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["compare.py", *words, *known])
    compare.main()
    assert started == ["ezpoints/ppo/seed1"]
    assert [run["seed"] for run in json.loads((tmp_path / "compare.json").read_text())] == [0, 1]


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = run_here("demo", "--episodes", "4")
    assert "blackjack" in shown
    assert (tmp_path / "runs" / "demo.png").is_file()
