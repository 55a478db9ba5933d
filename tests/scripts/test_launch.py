"""`trl-gtr train`: what it answers without torch, what it hands to accelerate's launcher, and how it fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import EXAMPLES, ROOT
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from trl_gtr import cli
from trl_gtr.scripts import launch
from trl_gtr.scripts.settings import default_config
from trl_gtr.tasks import TASKS


def fresh(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`trl-gtr …` in a fresh interpreter; the last line of its output says whether torch was imported."""
    code = f"""
import sys
from trl_gtr.cli import main
try:
    status = main({list(argv)!r})
except SystemExit as stopped:
    status = stopped.code
print("torch" in sys.modules)
sys.exit(status)
"""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "119",
    }
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize(
    "argv", [["train"], ["train", "--task", "alfworld"], ["evaluate"], ["report"], ["check"], ["play"]]
)
def test_help_needs_no_torch_and_names_its_command(argv: list[str], tmp_path: Path) -> None:
    done = fresh(*argv, "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    *shown, torch = done.stdout.splitlines()
    assert torch == "False"
    assert shown[0].startswith(f"usage: trl-gtr {argv[0]}")
    assert all(len(line) <= 119 for line in shown)
    if argv[0] != "report":
        assert f"  {', '.join(TASKS)}," in shown
        assert any("gym:ID" in line and "module:Class" in line for line in shown)


def test_help_names_the_tasks_with_default_settings() -> None:
    text = " ".join((launch.__doc__ or "").split())
    named = re.findall(r"Without --config, (.*?) train an embedded model", text)
    assert re.split(", | and ", named[0]) == [task for task in TASKS if default_config(task) is not None]


def test_the_plan_has_two_levels_of_help_with_its_own_options_first(capsys: pytest.CaptureFixture[str]) -> None:
    names = {}
    for level in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            cli.main(["plan", level, "--config", str(EXAMPLES / "configs" / "points24_llava.yaml")])
        shown = capsys.readouterr().out
        assert "PlannedConfig" not in shown
        names[level] = re.findall(r"^  --(\w+)", shown, re.MULTILINE)
    assert names["--help"][:2] == ["processes", "card"]
    assert len(names["--help"]) < 150
    assert set(names["--help"]) < set(names["--help-all"])


def test_one_line_for_each_option_and_all_of_them_on_the_second_level(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for level in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            cli.main(["train", level])
        shown[level] = capsys.readouterr().out.splitlines()
    assert len(shown["--help"]) < 170
    assert any(line.split() and line.split()[0] == "--num_envs" for line in shown["--help"])
    assert any(
        "--hands" in line and "[pool]" in line for line in shown["--help"]
    )  # the default of this task's settings
    names = {level: {line.split()[0] for line in lines if line.startswith("  --")} for level, lines in shown.items()}
    assert names["--help"] < names["--help-all"]
    assert "--adam_beta1" in names["--help-all"] - names["--help"]
    assert "--num_mini_batches" not in names["--help-all"]  # GTRConfig refuses it


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["train", "--num_env", "5"],
            "Unknown option `num_env` on the command line: did you mean `num_envs`?",
        ),
        (["train", "--num_proceses", "2"], "did you mean `num_processes`?"),
        (["train", "--task", "point24"], "There is no task 'point24'; did you mean 'points24'?"),
        (["train", "--config", "nowhere.yaml"], "nowhere.yaml can't be read"),
        (["evaluate", "--handz", "pool"], "did you mean `hands`?"),
        (["tain"], "Unknown command `tain`: did you mean `trl-gtr train`?"),
        ([], "Missing command: commands: train, evaluate, play, report, plan, check."),
    ],
)
def test_a_typo_needs_no_torch(argv: list[str], message: str, tmp_path: Path) -> None:
    done = fresh(*argv, cwd=tmp_path)
    assert (done.returncode, done.stdout.split()) == (2, ["False"])
    (line,) = done.stderr.splitlines()
    assert message in line


def test_the_words_are_divided() -> None:
    words = ["--num_processes", "2", "--task", "points24", "--hands", "pool", "--config-file=two.yaml", "--multi_gpu"]
    words += ["--seed", "1", "--debug", "underflow_overflow"]
    for_launcher, for_script = launch.divide(words)
    assert for_launcher == ["--num_processes", "2", "--config_file", "two.yaml", "--multi_gpu"]
    assert for_script == ["--task", "points24", "--hands", "pool", "--seed", "1", "--debug", "underflow_overflow"]


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--num_processes"], "--num_processes needs a value"), (["--multi_gpu", "yes"], "doesn't take yes")],
)
def test_wrong_words_for_the_launcher(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch.divide(words)


def test_an_option_of_the_launcher_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("num_processes: 2\n")
    with pytest.raises(SystemExit):
        cli.main(["train", "--config", str(file)])
    assert (
        "num_processes is an option of accelerate's launcher: give it on the command line." in capsys.readouterr().err
    )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records what accelerate would launch."""
    calls: list[Any] = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", calls.append)
    monkeypatch.setattr(launch.signal, "signal", lambda *_: None)
    return calls


def test_the_launcher_gets_its_options_and_the_script_the_rest(launched: list[Any]) -> None:
    assert cli.main(["train", "--task", "blackjack", "--num_processes", "3", "--accelerate_config", "zero2"]) == 0
    (args,) = launched
    assert (args.num_processes, args.module, args.training_script) == (3, True, "trl_gtr.scripts.train")
    assert args.training_script_args == ["--task", "blackjack"]
    assert Path(args.config_file).name == "zero2.yaml"


def test_an_unknown_launcher_file_is_one_line(launched: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "--accelerate_config", "nothing"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("error: Accelerate config nothing is neither")
    assert not launched


@pytest.mark.parametrize(("status", "reported"), [(2, 2), (1, 1), (-15, 143)])
def test_the_scripts_exit_status_is_passed_on(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch, status: int, reported: int
) -> None:
    def fails(args: Any) -> None:
        raise subprocess.CalledProcessError(status, "python")

    monkeypatch.setattr("accelerate.commands.launch.launch_command", fails)
    assert cli.main(["train"]) == reported


@pytest.mark.parametrize(
    ("status", "reported", "line"),
    [
        (2, 2, ""),
        (130, 130, ""),
        (1, 1, "error: Process 1 failed with exit status 1; any error of its own is above.\n"),
        (-9, 137, "error: Process 1 was killed by signal 9; any error of its own is above.\n"),
    ],
)
def test_a_failed_process_of_several_is_one_line_at_most(
    launched: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    reported: int,
    line: str,
) -> None:
    def fails(args: Any) -> None:
        raise ChildFailedError("train", {1: ProcessFailure(local_rank=1, pid=1, exitcode=status, error_file="")})

    monkeypatch.setattr("accelerate.commands.launch.launch_command", fails)
    assert cli.main(["train"]) == reported
    assert capsys.readouterr().err == line


def test_a_mistake_is_one_line_with_two_processes(tmp_path: Path) -> None:
    """Every process finds it; one reports it, and neither torch nor accelerate adds a traceback."""
    two = ["--config_file", str(EXAMPLES / "accelerate_configs" / "cpu_2proc.yaml"), "--main_process_port", "0"]
    done = fresh("train", *two, "--gamma", "2", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if "error" in line.lower() or "Traceback" in line]
    assert errors == ["error: `gamma` must be at least 0 and at most 1, got 2.0."]
