"""Which action an ordinary sentence concludes: actions that it weighs, rejects or gives as a reason don't count."""

from __future__ import annotations

import time

import pytest

from trl_gtr.tasks import make_task
from trl_gtr.tasks.base import contradicts

BLACKJACK = {"Dealer Card": [(10, "K", "H"), (7, "7", "S")], "Player Card": [(9, "9", "C"), (6, "6", "D")]}


def concluded(name: str, thoughts: str) -> str | None:
    return make_task(name).format.conclusion({"thoughts": thoughts})


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        # reasons
        ("I stand because it is too risky to hit.", "stand"),
        ("I stand because I would bust by hitting", "stand"),
        ("I hit because I can't win if I stay, and standing on 12 is for cowards.", "hit"),
        ("Standing is the best choice, since hitting will almost certainly bust.", "stand"),
        ("I stand, as hitting leads to 22.", "stand"),
        ("Because hitting costs too much, I stand.", "stand"),
        ("Since hitting is dangerous I stand.", "stand"),
        ("I have 20 and since the dealer shows 6, I stand.", "stand"),
        ("I was going to hit because 12 is low, so standing is out, but I stand.", "stand"),
        # what is rejected
        ("better to stand than to hit", "stand"),
        ("There is no need to hit; I stand.", "stand"),
        ("I stand and avoid hitting.", "stand"),
        ("I stand, no hit.", "stand"),
        ("I stand given the risk of hitting.", "stand"),
        ("I stand, hitting isn't needed.", "stand"),
        ("It is too risky to hit.", "stand"),
        ("no need to hit", "stand"),
        ("I avoid hitting", "stand"),
        ("I decide against hitting", "stand"),
        ("It isn't safe to hit.", "stand"),
        ("Hitting is too risky.", "stand"),
        ("15 is too low to stand.", "hit"),
        ("It is not too risky to hit.", "hit"),
        ("It is safe to hit.", "hit"),
        ("15 isn't enough, hit", "hit"),
        # what is named, but by nobody chosen
        ("no hit", None),
        ("I would bust by hitting", None),
        ("the dealer will have to hit", None),
        ("I choose between stand and hit.", None),
        ("Stand or hit?", None),
        ("It is neither too risky to hit nor too risky to stand.", None),
        # cues
        ("I can hit or stand, so I hit.", "hit"),
        ("It is best to stand. To hit is the alternative.", "stand"),
        ("I will stand. Hit comes to mind too.", "stand"),
        ("Standing is tempting, but hitting is right.", "hit"),
    ],
)
def test_the_choice_of_a_blackjack_thought(text, choice):
    assert concluded("blackjack", text) == choice


def test_a_thought_that_warns_of_its_action_contradicts_it():
    task = make_task("blackjack")
    assert contradicts(task, {"thoughts": "It is too risky to hit."}, "hit", BLACKJACK)
    assert not contradicts(task, {"thoughts": "It is too risky to hit."}, "stand", BLACKJACK)


@pytest.mark.parametrize(
    ("text", "direction"),
    [
        ("so I choose + and not -", "+"),
        ("I add 1 (+) because - would lead away", "+"),
        ("I go up, since going down leads away.", "+"),
        ("I go up, as 4 is not down there.", "+"),
        ("Because 4 is not down there, I go up.", "+"),
        ("I go down rather than up.", "-"),
        ("I reach it by increasing the number.", "+"),
        ("I am not there: +", "+"),
        ("not (-) but (+)", "+"),
        ("- would lead away.", None),
        ("Going up is right, going down is wrong", "+"),
        ("Either + or -.", None),
        ("The target is up the line, not down, so I choose +.", "+"),
        ("I can go up or down, therefore I choose -.", "-"),
        ("I go down; if I go up, I never arrive.", "-"),
    ],
)
def test_the_direction_of_a_number_line_thought(text, direction):
    assert concluded("number_line", text) == direction


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("I go to sinkbasin 1 so that I can clean mug 1 with sinkbasin 1.", "go to sinkbasin 1"),
        ("I go to sinkbasin 1 so I can clean mug 1 with sinkbasin 1.", "go to sinkbasin 1"),
        ("Mug 1 is here, so I can take mug 1 from desk 1.", "take mug 1 from desk 1"),
        ("Because I have to clean mug 1 with sinkbasin 1, I go to sinkbasin 1.", "go to sinkbasin 1"),
        ("I go to desk 1 because I have to take mug 1 from desk 1.", "go to desk 1"),
    ],
)
def test_the_command_of_an_alfworld_thought(text, command):
    assert concluded("alfworld", text) == command


@pytest.mark.parametrize("name", ["blackjack", "number_line"])
def test_reading_long_texts_takes_linear_time(name):
    started = time.process_time()
    for unit in (
        "because ",
        "because hit, ",
        "since up so ",
        "no need to hit ",
        "than ",
        "I will ",
        "up ",
        "so I hit ",
    ):
        concluded(name, unit * (50_000 // len(unit)))
    assert time.process_time() - started < 10
