"""MiniGrid and BabyAI levels, and BabyAI's bot as their expert."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from minigrid_cases import needs_minigrid
from rollout_cases import transition

from trl_gtr.environments import TextObservation
from trl_gtr.rollouts.replay import Replayable
from trl_gtr.tasks import make_task

pytestmark = needs_minigrid

LEVELS = [
    "MiniGrid-Empty-Random-6x6-v0",
    "MiniGrid-DoorKey-6x6-v0",
    "MiniGrid-FourRooms-v0",
    "MiniGrid-UnlockPickup-v0",
    "MiniGrid-MultiRoom-N2-S4-v0",
    "MiniGrid-MultiRoom-N4-S5-v1",
    "MiniGrid-LockedRoom-v0",
    "BabyAI-GoToObj-v0",
    "BabyAI-PickupLoc-v0",
    "BabyAI-UnlockPickup-v0",
]


def play(level: str, view: str, seed: int, exploration: float = 0.0) -> bool:
    """Play one episode as the expert, with some random moves. Every response must be true and mean what it does."""
    task = make_task("minigrid", level=level, view=view)
    env, rng, ended = task.make_env(), np.random.default_rng(seed), False
    _, info = env.reset(seed=seed)
    while not ended:
        expert = task.expert(info)
        assert expert is not None
        assert all(task.judge(expert, info).values()), (expert.text, info)
        assert task.format.conclusion(expert.fields) == expert.action
        action: Any = task.to_env_action(expert, info)
        if rng.random() < exploration:
            action = int(rng.integers(3))  # turns and steps: the bot copes with these on every level
        _, reward, terminated, truncated, info = env.step(action)
        ended = terminated or truncated
    return task.success([transition(reward=float(reward), terminated=terminated, truncated=truncated)])


@pytest.mark.parametrize("view", ["partial", "full"])
@pytest.mark.parametrize("level", LEVELS)
def test_the_bot_wins(level: str, view: str) -> None:
    assert play(level, view, seed=1)
    assert play(level, view, seed=2, exploration=0.3)


def test_the_bot_is_told_what_was_really_done() -> None:
    """Left alone, it would go on with its plan: after a turn it did not ask for, it must turn back."""
    env = make_task("minigrid", level="MiniGrid-Empty-8x8-v0", view="full").make_env()
    _, info = env.reset(seed=0)
    assert info["expert"] == 2  # forward
    assert env.step(0)[4]["expert"] == 1  # turned left: turn right


def test_both_views() -> None:
    for view, shape in (("partial", (224, 224, 3)), ("full", (256, 256, 3))):
        env = make_task("minigrid", level="BabyAI-GoToObj-v0", view=view).make_env()
        picture, info = env.reset(seed=0)
        assert (picture.shape, picture.dtype) == (shape, np.uint8)
        assert picture.shape == env.observation_space.shape
        column, row = (3, 6) if view == "partial" else env.unwrapped.agent_pos  # type: ignore[attr-defined]
        assert info["player"] == [row + 1, column + 1]
        squares, size = np.array_split(np.arange(shape[0]), shape[0] // 32), 32
        for row, column, _ in info["objects"]:  # there is something in colour on each of these squares
            tile = picture[squares[row - 1]][:, squares[column - 1]].reshape(size * size, 3).astype(int)
            assert (tile.max(1) - tile.min(1)).max() > 60


def test_a_level_in_words() -> None:
    env = TextObservation(make_task("minigrid", level="MiniGrid-DoorKey-6x6-v0", view="full").make_env())
    text, _ = env.reset(seed=3)
    assert text == (
        "Your mission: use the key to open the door and then get to the goal. You carry: nothing. You are at 4,2, "
        "facing down. In front of you: nothing. You see: locked yellow door at 2,4, yellow key at 3,2, goal at 5,5."
    )
    assert env.observation_space.contains(text)


def test_a_carried_object_is_told_but_not_seen() -> None:
    task = make_task("minigrid", level="MiniGrid-DoorKey-6x6-v0")
    env = task.make_env()
    _, info = env.reset(seed=0)
    while info["carrying"] == "nothing":
        _, _, terminated, truncated, info = env.step(info["expert"])
        assert not terminated
        assert not truncated
    assert info["carrying"] == "yellow key"
    assert not [name for *_, name in info["objects"] if "key" in name]


def test_a_bot_that_has_lost_its_way_says_nothing() -> None:
    """It gives up when a box is opened."""
    env = make_task("minigrid", level="BabyAI-PickupLoc-v0", view="full").make_env()
    for seed in range(20):
        _, info = env.reset(seed=seed)
        for _ in range(30):
            if info["ahead"].endswith("box"):
                info = env.step(5)[4]
                assert (info["expert"], info["plan"]) == (None, "")
                assert env.step(0)[4]["expert"] is None
                assert env.reset(seed=seed)[1]["expert"] is not None
                return
            _, _, terminated, _, info = env.step(info["expert"])
            if terminated:
                break
    pytest.fail("no box was met")


@pytest.fixture
def ten_seconds() -> Iterator[None]:
    """Fail rather than hang."""

    def give_up(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("ten_seconds")
@pytest.mark.parametrize("view", ["partial", "full"])
@pytest.mark.parametrize("seed", [4, 7, 9])
def test_a_plan_without_end_is_no_plan(view: str, seed: int) -> None:
    """On these seeds the bot would add subgoals for ever, in the partial view after a step or two."""
    env = make_task("minigrid", level="BabyAI-UnlockToUnlock-v0", view=view).make_env()
    _, info = env.reset(seed=seed)
    for _ in range(3):
        if info["expert"] is not None:
            info = env.step(info["expert"])[4]
    assert (info["expert"], info["plan"]) == (None, "")
    assert env.reset(seed=0)[1]["expert"] is not None


def test_an_episode_can_be_replayed() -> None:
    task = make_task("minigrid", level="BabyAI-UnlockPickup-v0")
    env, copy = Replayable(task.make_env()), Replayable(task.make_env())
    _, info = env.reset(seed=5)
    for action in (0, 2, None, 1, None, None):
        _, _, _, _, info = env.step(info["expert"] if action is None else action)
    _, restored = copy.set_state(env.get_state())
    assert restored["expert"] == info["expert"]
    for _ in range(3):  # the bot goes on where it was
        ours, theirs = env.step(info["expert"]), copy.step(restored["expert"])
        np.testing.assert_array_equal(ours[0], theirs[0])
        info, restored = ours[4], theirs[4]
        assert (info["expert"], info["plan"]) == (restored["expert"], restored["plan"])


@pytest.mark.parametrize(
    ("level", "words"),
    [
        ("MiniGrid-Emptyy-8x8-v0", "there is no level"),
        ("MiniGrid-Fetch-5x5-N2-v0", "can't play"),
        ("CartPole-v1", "not a MiniGrid or BabyAI level"),
    ],
)
def test_other_levels_are_refused(level: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_task("minigrid", level=level).make_env()
