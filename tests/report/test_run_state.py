"""Running, finished, stopped or crashed: what a card says, and what its process says; times for people."""

import platform
import subprocess
import sys

import psutil
import pytest

from trl_gtr.report.reading import checked_card
from trl_gtr.report.state import duration, grows, moment, seconds_of, state_of


def card(process, state="running"):
    return {
        "state": state,
        "process": {"host": platform.node(), "pid": process.pid, "created": process.create_time()},
    }


def test_a_run_whose_process_is_gone_has_crashed():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    running = card(psutil.Process(child.pid))
    assert (state_of(running), grows(running)) == ("running", True)
    child.communicate(b"\n")
    assert (state_of(running), grows(running)) == ("crashed", False)
    finished = running | {"state": "finished"}
    assert (state_of(finished), grows(finished)) == ("finished", False)


def test_another_process_of_the_same_number_is_not_the_run():
    mine = card(psutil.Process())
    assert state_of(mine) == "running"
    mine["process"]["created"] -= 100.0
    assert state_of(mine) == "crashed"


def test_a_run_of_another_machine_is_believed():
    away = card(psutil.Process())
    away["process"] |= {"host": "elsewhere", "created": 0.0}
    assert (state_of(away), grows(away)) == ("running", True)
    assert state_of({}) is None
    assert not grows({})


@pytest.mark.parametrize("pid", [-1, 0, 2**80, "1", None, True])
def test_an_odd_process_number_ends_nothing(pid):
    assert state_of({"state": "running", "process": {"host": platform.node(), "pid": pid, "created": 1.0}})


def test_a_card_is_checked():
    assert checked_card({"state": "exploded", "seconds": "many", "process": 3, "command": ["a"], "updates": 1.5}) == {
        "changed": [],
        "warnings": [],
    }
    assert checked_card({"state": ["running"]}) == {"changed": [], "warnings": []}
    assert checked_card({"seconds": float("nan")}) == {"changed": [], "warnings": []}
    kept = {"state": "stopped", "seconds": 3.5, "command": "train.py", "updates": 7}
    assert checked_card(kept).items() >= kept.items()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (43, "43 s"),
        (60, "1 min"),
        (185, "3 min 5 s"),
        (1149, "19 min"),
        (3600, "1 h"),
        (7500, "2 h 5 min"),
        (3 * 86400 + 4 * 3600, "3 d 4 h"),
    ],
)
def test_durations_are_for_people(seconds, words):
    assert duration(seconds) == words


def test_moments_are_for_people():
    assert moment("2026-11-17T01:33:41+00:00") == "17 Nov 2026, 01:33 UTC"
    assert moment("2026-11-17T01:33:41+02:00") == "16 Nov 2026, 23:33 UTC"
    assert (moment("yesterday"), moment(None)) == ("yesterday", None)


def test_an_older_card_has_a_duration_too():
    assert seconds_of({"started": "2026-11-17T01:00:00+00:00", "updated": "2026-11-17T01:02:00+00:00"}) == 120.0
    assert seconds_of({"seconds": 5.0, "started": "2026-11-17T01:00:00+00:00"}) == 5.0
    assert seconds_of({"started": "then"}) is None
