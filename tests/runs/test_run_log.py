"""What `run.json` says about the run itself: its state, how long it took, and the command, without secrets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT
from toy import quiet_config
from transformers import TrainerControl, TrainerState

import trl_gtr.scripts
from trl_gtr import tiny_llava
from trl_gtr.runs.run_log import RunLog, command_line

ABOUT = {"task": "colours", "model": "toy", "corrector": None}


@pytest.fixture
def log(tmp_path):
    return RunLog(quiet_config(tmp_path), ABOUT)


def card(folder):
    return json.loads((folder / "run.json").read_text())


def begin(log, folder, update=0):
    state = TrainerState(global_step=update, max_steps=4)
    log.on_train_begin(quiet_config(folder), state, TrainerControl())
    return state


@pytest.mark.parametrize(("updates", "state"), [(4, "finished"), (2, "stopped")])
def test_a_run_is_running_and_then_finished_or_stopped(log, tmp_path, updates, state):
    trainer_state = begin(log, tmp_path)
    assert (card(tmp_path)["state"], card(tmp_path)["updates"]) == ("running", 4)
    assert card(tmp_path)["process"]["pid"] == os.getpid()
    trainer_state.global_step = updates
    log.on_train_end(None, trainer_state, TrainerControl())
    assert card(tmp_path)["state"] == state
    assert 0 <= card(tmp_path)["seconds"] < 600


def test_a_resumed_run_adds_up_its_time(log, tmp_path):
    state = begin(log, tmp_path)
    log.on_train_end(None, state, TrainerControl())
    first = card(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(first | {"seconds": 1000.0, "started": "2026-01-01T00:00:00+00:00"}))
    again = RunLog(quiet_config(tmp_path), ABOUT)
    state = begin(again, tmp_path, update=2)
    again.on_train_end(None, state, TrainerControl())
    assert 1000.0 <= card(tmp_path)["seconds"] < 1600.0
    assert card(tmp_path)["started"] == "2026-01-01T00:00:00+00:00"


CRASH = """
import sys
from test_run_log import ABOUT, begin
from pathlib import Path
from toy import quiet_config
from trl_gtr.runs.run_log import RunLog

begin(RunLog(quiet_config(sys.argv[1]), ABOUT), Path(sys.argv[1]))
raise ValueError("the cat is on the keyboard")
"""


def test_a_run_that_ends_in_an_error_says_so(tmp_path):
    paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "runs")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", CRASH, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert card(tmp_path)["state"] == "crashed"
    assert card(tmp_path)["error"] == "ValueError('the cat is on the keyboard')"


def test_a_crash_leaves_the_card_of_a_later_run_alone(log, tmp_path):
    begin(log, tmp_path)  # and no end
    later = card(tmp_path) | {"state": "finished", "updated": "2999-01-01T00:00:00+00:00"}
    (tmp_path / "run.json").write_text(json.dumps(later))
    log._note_crash()
    assert card(tmp_path) == later
    (tmp_path / "run.json").unlink()
    log._note_crash()
    assert not (tmp_path / "run.json").exists()


def test_a_command_hides_its_secrets():
    words = ["train.py", "--hub_token", "hf_abc", "--openai_api_key=sk-1", "--seed", "3", "--labels", "two words"]
    shown = command_line(words)
    assert shown == "train.py --hub_token [hidden] --openai_api_key=[hidden] --seed 3 --labels 'two words'"
    # an option that takes no secret hides nothing
    assert command_line(["train.py", "--max_tokens", "64"]) == "train.py --max_tokens 64"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([str(Path(trl_gtr.scripts.__file__).parent / "train.py"), "--seed", "3"], "trl-gtr train --seed 3"),
        (["/home/me/examples/points24.py", "--config", "/home/me/my.yaml"], "points24.py --config my.yaml"),
        (["examples/points24.py", "--output_dir=/home/me/runs/1"], "examples/points24.py --output_dir=1"),
        (["-c", "/"], "-c /"),
    ],
)
def test_a_command_tells_no_local_folder(words, shown):
    assert command_line(words) == shown


def test_the_shipped_model_is_called_by_its_name(tmp_path):
    log = RunLog(quiet_config(tmp_path), ABOUT | {"model": str(tiny_llava.path("tiny-alfworld"))})
    begin(log, tmp_path)
    assert card(tmp_path)["model"] == "tiny-alfworld"
    assert tiny_llava.name_of("org/model") == "org/model"
