"""The grid worlds in sentences."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from trl_gtr.environments import TextObservation
from trl_gtr.tasks import make_task

LAKE = "The lake has 4 rows and 4 columns. You are at {}. Goal: 3,4. Holes: 1,3 4,1."
CLIFF = "The ground has 4 rows and 12 columns. You are at {}. Goal: 4,12. The cliff: 4,2 to 4,11."
TOWN = (
    "The town has 5 rows and 5 columns. Walls inside: right of 1,2, right of 2,2, right of 4,1, right of 4,3, right "
    "of 5,1, right of 5,3. Pads: red at 1,1, green at 1,5, yellow at 5,1, blue at 5,4. "
)
ROOM = "The room has 5 rows and 6 columns, with walls all around. Walls inside: 4,5. "


@pytest.mark.parametrize(
    ("task", "options", "action", "first", "then"),
    [
        (
            make_task("sokoban", env_kwargs={"size": (5, 6)}),
            {"room": ["######", "#@$ .#", "#.$  #", "#   ##", "######"]},
            3,
            ROOM + "You are at 2,2. Boxes: 2,3 3,3. Targets: 2,5 3,2.",
            ROOM + "You are at 2,3. Boxes: 2,4 3,3. Targets: 2,5 3,2.",
        ),
        (
            make_task("frozen_lake"),
            {"map": ["SFHF", "FFFF", "FFFG", "HFFF"]},
            1,
            LAKE.format("1,1"),
            LAKE.format("2,1"),
        ),
        (make_task("cliff_walking"), {}, 0, CLIFF.format("4,1"), CLIFF.format("3,1")),
    ],
    ids=["sokoban", "frozen_lake", "cliff_walking"],
)
def test_words(task: Any, options: dict[str, Any], action: int, first: str, then: str) -> None:
    env = TextObservation(task.make_env())
    text, _ = env.reset(seed=0, options=options)
    assert text == first
    text, *_ = env.step(action)
    assert text == then
    assert env.observation_space.contains(text)


@pytest.mark.parametrize(
    ("passenger", "words"), [(4, "The passenger is in the taxi."), (0, "The passenger is at the red pad.")]
)
def test_a_town_in_words(passenger: int, words: str) -> None:
    env = TextObservation(make_task("taxi").make_env())
    env.reset(seed=0)
    game: Any = env.unwrapped
    game.s = game.encode(2, 1, passenger, 3)
    text, *_ = env.step(0)  # down
    assert text == TOWN + f"The taxi is at 4,2. {words} The destination is the blue pad."
    assert env.observation_space.contains(text)


def test_a_town_has_walls_where_the_taxi_stops() -> None:
    """The walls as the transitions have them: driving right changes nothing."""
    game: Any = make_task("taxi").make_env().unwrapped
    places = [(row, column) for row in range(5) for column in range(4)]
    stops = [(row + 1, column + 1) for row, column in places if _drive_right(game, row, column) == (row, column)]
    assert "Walls inside: " + ", ".join(f"right of {row},{column}" for row, column in stops) + ". " in TOWN


def _drive_right(game: Any, row: int, column: int) -> tuple[int, int]:
    ((_, after, _, _),) = game.P[game.encode(row, column, 4, 3)][2]
    return tuple(map(int, list(game.decode(after))[:2]))  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["sokoban", "frozen_lake", "taxi", "cliff_walking"])
def test_words_say_what_the_expert_reads(name: str) -> None:
    task = make_task(name)
    env, rng = TextObservation(task.make_env(evaluation=True)), np.random.default_rng(0)
    for seed in range(5):
        text, info = env.reset(seed=seed)
        for _ in range(5):
            for value in task.reading(info).values():  # type: ignore[attr-defined]
                assert (value if isinstance(value, str) else " ".join(value) or "none").removeprefix("in ") in text
            text, _, terminated, truncated, info = env.step(int(rng.integers(4)))
            if terminated or truncated:
                break


def test_gymnasiums_own_lake_needs_no_picture() -> None:
    env = TextObservation(gym.make("FrozenLake-v1"))
    assert env.reset(seed=0)[0] == (
        "The lake has 4 rows and 4 columns. You are at 1,1. Goal: 4,4. Holes: 2,2 2,4 3,4 4,1."
    )
