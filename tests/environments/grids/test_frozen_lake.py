"""FrozenLake on changing maps."""

from __future__ import annotations

import pickle
import warnings
from collections import deque
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env

from trl_gtr.environments.grids.frozen_lake import FrozenLakeMapsEnv, split_of

SMALL = ["SFF", "FHF", "FFG"]


def steps_to_goal(lines: list[str]) -> int | None:
    waiting, seen = deque([((0, 0), 0)]), {(0, 0)}
    while waiting:
        (row, column), steps = waiting.popleft()
        if lines[row][column] == "G":
            return steps
        for to in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            inside = 0 <= to[0] < len(lines) and 0 <= to[1] < len(lines)
            if inside and to not in seen and lines[to[0]][to[1]] != "H":
                seen.add(to)
                waiting.append((to, steps + 1))
    return None


def test_every_episode_has_a_new_map_that_can_be_won() -> None:
    env = FrozenLakeMapsEnv()
    maps = [env.reset(seed=seed)[1]["map"] for seed in range(40)]
    assert maps == [env.reset(seed=seed)[1]["map"] for seed in range(40)]
    assert len({"".join(lines) for lines in maps}) > 30
    assert all(steps_to_goal(lines) is not None for lines in maps)
    env.reset(seed=0)
    assert env.reset()[1]["map"] != env.reset()[1]["map"]


def test_no_map_is_both_trained_on_and_unseen() -> None:
    maps = {}
    for split in ("train", "unseen"):
        env = FrozenLakeMapsEnv(split=split)
        maps[split] = {"/".join(env.reset(seed=seed)[1]["map"]) for seed in range(150)}
        assert {split_of(lines.split("/")) for lines in maps[split]} == {split}
    assert not maps["train"] & maps["unseen"]
    drawn = [split_of(FrozenLakeMapsEnv().reset(seed=seed)[1]["map"]) for seed in range(200)]
    assert 0.15 < drawn.count("unseen") / len(drawn) < 0.35
    assert split_of(["SFFF", "FHFH", "FFFH", "HFFG"]) == "train"  # for good: the shipped model was trained on it


def test_a_split_without_maps_is_refused() -> None:
    with pytest.raises(ValueError, match="choose a larger size"):  # the only map is one to train on
        FrozenLakeMapsEnv(size=2, frozen=1.0, split="unseen").reset(seed=0)


def test_the_map_decides_what_happens() -> None:
    env = FrozenLakeMapsEnv(size=3)
    assert env.reset(options={"map": SMALL})[1]["map"] == SMALL
    assert env.step(1)[:4] == (3, 0.0, False, False)
    assert env.step(2)[:4] == (4, 0.0, True, False)  # the hole
    env.reset(options={"map": ["SFF", "FFF", "HFG"]})
    states = [env.step(action) for action in (1, 2, 1, 2)]
    assert [state[0] for state in states] == [3, 4, 7, 8]
    assert states[-1][1:3] == (1.0, True)


def test_a_fixed_map() -> None:
    env = FrozenLakeMapsEnv(map=SMALL)
    assert [env.reset(seed=seed)[1]["map"] for seed in range(3)] == [SMALL] * 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 1}, "size must be"),
        ({"size": 9}, "from 2 to 8"),
        ({"frozen": 0}, "frozen must be"),
        ({"split": "test"}, "all, train, unseen"),
        ({"map": "SFHG"}, "list of lines"),
        ({"map": ["SF", "HGG"]}, "equal length"),
        ({"map": ["SF", "HX"]}, "made of S, F, H and G"),
        ({"map": ["SF", "HF"]}, "one S and one G"),
        ({"map": []}, "equal length"),
    ],
)
def test_options_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FrozenLakeMapsEnv(**options)


def test_reset_options_are_checked() -> None:
    env = FrozenLakeMapsEnv()
    with pytest.raises(ValueError, match="only the key 'map'"):
        env.reset(options={"maps": SMALL})
    with pytest.raises(ValueError, match="4 rows and 4 columns"):
        env.reset(options={"map": SMALL})


def test_gymnasium_approves() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make("trl_gtr/FrozenLake-v0").unwrapped, skip_render_check=True)


def test_it_can_be_pickled_before_it_has_drawn() -> None:
    env = FrozenLakeMapsEnv(is_slippery=True)
    env.reset(seed=1)
    env.step(2)
    twin = pickle.loads(pickle.dumps(env))
    assert env.step(1) == twin.step(1)
