"""Environments saved as plain data and played again."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import AddRenderObservation
from toy import ColourEnv

from trl_gtr.rollouts.playing import PlayingRules
from trl_gtr.rollouts.replay import LocalVectorEnv, Replayable
from trl_gtr.rollouts.vector_envs import unpack_infos
from trl_gtr.storage.plain_data import decode, encode, fingerprint
from trl_gtr.tasks import make_task


def through_json(state: Any) -> Any:
    return decode(json.loads(json.dumps(encode(state))))


def play(envs: LocalVectorEnv, steps: int, seed: int) -> list[str]:
    """Random actions; fingerprints of everything that comes of them."""
    rng = np.random.default_rng(seed)
    results = []
    for _ in range(steps):
        actions = rng.integers(envs.single_action_space.n, size=envs.num_envs)  # type: ignore[attr-defined]
        observations, rewards, terminated, truncated, infos = envs.step(actions)
        parts = [observations, rewards, terminated, truncated, unpack_infos(infos, envs.num_envs)]
        results.append(fingerprint(parts))
    return results


def check(make: Callable[[], gym.Env], steps: int = 25) -> None:
    """A copy that was restored from JSON goes on as the original, past the ends of episodes."""
    envs, others = LocalVectorEnv(make, 3), LocalVectorEnv(make, 3)
    envs.reset(seed=[1, 2, 3])
    others.reset(seed=[7, 8, 9])
    for before in (0, 1, 17):  # with a seed, in the middle of the first episode, in a later one
        play(envs, before, seed=before)
        state = through_json(envs.get_states())
        others.set_states(state)
        assert others.get_states() == state
        assert play(envs, steps, seed=5) == play(others, steps, seed=5)
    envs.close()
    others.close()


@pytest.mark.parametrize("invalid_action", ["random", "penalty"])
@pytest.mark.parametrize("name", ["points24", "ezpoints", "blackjack", "number_line", "sokoban"])
def test_the_games_go_on_from_plain_data(name: str, invalid_action: str) -> None:
    check(PlayingRules(make_task(name), invalid_action).make_env)


def test_a_pool_of_hands_goes_on_from_plain_data() -> None:
    task = make_task("points24", hands=[["4", "6", "A", "A"], ["10", "K", "3", "8"], ["H2", "S3", "D4", "CA"]])
    check(PlayingRules(task).make_env)


@pytest.mark.parametrize("name", ["FrozenLake-v1", "Taxi-v4", "CliffWalking-v1", "Blackjack-v1"])
def test_games_that_pygame_draws_go_on_from_plain_data(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pygame")
    monkeypatch.setitem(os.environ, "SDL_VIDEODRIVER", "dummy")
    check(lambda: AddRenderObservation(gym.make(name, render_mode="rgb_array")), steps=20)


@pytest.mark.parametrize("name", ["frozen_lake", "taxi", "cliff_walking"])
def test_rendered_grids_go_on_from_plain_data(name: str) -> None:
    pytest.importorskip("pygame")
    check(PlayingRules(make_task(name)).make_env, steps=10)


def test_a_gym_task_goes_on_from_plain_data() -> None:
    pytest.importorskip("pygame")
    check(PlayingRules(make_task("gym:FrozenLake-v1", actions=["left", "down", "right", "up"])).make_env)


class Window(ColourEnv):
    """Can't be pickled once it has drawn something."""

    def _show(self) -> tuple[np.ndarray, dict[str, Any]]:
        self.window = threading.Lock()
        return super()._show()


def test_an_environment_that_cant_be_pickled_goes_on() -> None:
    check(partial(Window, length=3))


def test_a_state_is_small() -> None:
    env = Replayable(make_task("points24").make_env())
    env.reset(seed=0)
    for action in (0, 10, 1):
        env.step(action)
    assert len(json.dumps(encode(env.get_state()))) < 1_000


def test_the_options_of_a_reset_are_kept() -> None:
    env, twin = (Replayable(make_task("points24").make_env()) for _ in range(2))
    _, info = env.reset(options={"cards": ["H4", "SK", "D7", "CA"]})
    assert twin.set_state(through_json(env.get_state()))[1] == info
    assert info["Cards"] == ["H4", "SK", "D7", "CA"]


# -- what can't be played again ---------------------------------------------------------------------------------------


class OwnGenerator(ColourEnv):
    """Draws from a generator of its own, which a later episode goes on with."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        if seed is not None:
            self.own = np.random.default_rng(seed)
        observation, info = super().reset(seed=seed)
        return observation, {**info, "drawn": int(self.own.integers(2**31))}


class Numbered(ColourEnv):
    """Counts its episodes."""

    episodes = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        self.episodes += 1
        observation, info = super().reset(seed=seed)
        return observation, {**info, "episode": self.episodes}


class Bonus(ColourEnv):
    """Pays by chance."""

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, random.random(), terminated, truncated, info


class Noisy(ColourEnv):
    """Shows the same state in another picture every time."""

    def _show(self) -> tuple[np.ndarray, dict[str, Any]]:
        observation, info = super()._show()
        return observation ^ np.random.default_rng().integers(2, size=observation.shape, dtype=np.uint8), info


@pytest.mark.parametrize(
    ("make", "differing"),
    [
        (OwnGenerator, "start"),
        (Numbered, "start"),
        (Bonus, "reward"),
        (Noisy, "observation"),
    ],
)
def test_a_replay_that_differs_is_refused(make: Callable[..., gym.Env], differing: str) -> None:
    env, twin = Replayable(make(length=3)), Replayable(make(length=3))
    twin.reset(seed=5)
    env.reset(seed=0)
    for _ in range(4):
        env.reset()
    env.step(0)
    state = through_json(env.get_state())
    with pytest.raises(ValueError, match=f"gave a different {differing}.*fully determined by its seed and actions"):
        twin.set_state(state)
    with pytest.warns(UserWarning, match=f"gave a different {differing}"):
        observation, info = twin.set_state(state, exact=False)
    assert observation.shape == env.observation_space.shape
    assert "colour" in info


def test_an_environment_that_says_so_may_show_another_picture() -> None:
    env, twin = Replayable(Noisy(length=3)), Replayable(Noisy(length=3))
    twin.unwrapped.spec = EnvSpec("Noisy-v0", nondeterministic=True)
    env.reset(seed=0)
    with pytest.warns(UserWarning, match="different observation"):
        twin.set_state(env.get_state())


class Picky(ColourEnv):
    """Refuses an action once."""

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if action == 3 and not os.environ.get("PICKY"):
            raise RuntimeError("not that one")
        return super().step(action)


def test_a_replay_whose_action_fails_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    env, twin = Replayable(Picky(length=3)), Replayable(Picky(length=3))
    env.reset(seed=0)
    with monkeypatch.context() as then:
        then.setitem(os.environ, "PICKY", "no")
        env.step(3)
    state = env.get_state()
    with pytest.raises(ValueError, match=r"can't replay its episode: RuntimeError\('not that one'\)"):
        twin.set_state(state)
    with pytest.warns(UserWarning, match="starts a new one"):
        twin.set_state(state, exact=False)
    assert twin.step(0)[4]


@pytest.mark.parametrize("make", [OwnGenerator, Numbered, Bonus])
def test_environments_that_cant_be_replayed_fail_early(make: Callable[[], gym.Env]) -> None:
    envs = LocalVectorEnv(make, 2)
    envs.reset(seed=[0, 1])
    envs.get_states()
    play(envs, 5, seed=0)
    with pytest.raises(ValueError, match="gave a different"):
        envs.get_states()
    kept = LocalVectorEnv(make, 2, pickle_environments=True)
    kept.reset(seed=[0, 1])
    play(kept, 5, seed=0)
    other = LocalVectorEnv(make, 2, pickle_environments=True)
    other.reset(seed=[0, 1])
    observations, _ = other.set_states(kept.get_states())
    assert observations.shape == (2, *kept.single_observation_space.shape)  # type: ignore[misc]


def test_saving_before_reset_raises() -> None:
    with pytest.raises(ValueError, match=r"call reset\(\) first"):
        Replayable(ColourEnv()).get_state()


def test_a_generator_other_than_numpys_raises() -> None:
    class Old(ColourEnv):
        np_random = random.Random(0)  # type: ignore[assignment]

        def reset(self, **_: Any) -> tuple[np.ndarray, dict]:  # type: ignore[override]
            return np.zeros((28, 28, 3), np.uint8), {}

    env = Replayable(Old())
    env.reset()
    with pytest.raises(ValueError, match=r"not a `numpy.random.Generator`"):
        env.get_state()
