"""Environments that can be saved mid-episode as plain data: how the episode began, and the actions since.

`Replayable` records both for any environment: wrapped, rendered or simulated. `LocalVectorEnv` is gymnasium's
`SyncVectorEnv` with saved states; `WorkerVectorEnv` does the same in worker processes.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, SupportsFloat

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate

from ..storage.plain_data import fingerprint

RESTARTED = "restarted"
"""In the info of an episode that could not be replayed, so that another one began."""
_MAX_TEST_RESTORES = 16
_REMEDY = (
    "An episode must be fully determined by its seed and actions: draw random numbers from `self.np_random` only, and "
    "carry no state from one episode to the next."
)


class Replayable(gym.Wrapper):
    """Records its episode, so that another copy of the environment can replay it up to this point.

    A state is plain data: the seed of the last reset, or the state of `np_random` before it; the reset options; the
    actions since; and fingerprints of the results. These must fully determine the episode. If they don't, the
    fingerprints differ and `set_state` raises a `ValueError`.

    If the environment's `spec` is `nondeterministic`, a different image of the same state is only a warning.
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self._start: dict[str, Any] | None = None
        self._actions: list[Any] = []
        self._rewards: list[float] = []
        self._first: dict[str, Any] = {}
        self._first_fingerprint: str | None = None
        self._latest: tuple[Any, dict[str, Any]] = (None, {})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        start = {"seed": seed, "options": copy.deepcopy(options), "random": self._random() if seed is None else None}
        self._latest = self.env.reset(seed=seed, options=options)
        self._start, self._actions, self._rewards = start, [], []
        self._first = copy.deepcopy(self._latest[1])  # some environments mutate what they returned
        self._first_fingerprint = None
        return self._latest

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        action = copy.deepcopy(action)
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._latest = observation, info
        self._actions.append(action)
        self._rewards.append(float(reward))
        return observation, reward, terminated, truncated, info

    def get_state(self) -> Any:
        """The episode so far. Cheap: only the latest observation is fingerprinted."""
        if self._start is None:
            raise ValueError("there is no episode to save: call reset() first")
        if self._start["seed"] is None and self._start["random"] is None:
            raise ValueError("the environment's `np_random` is not a `numpy.random.Generator`, so it can't be saved")
        return {**self._start, "actions": list(self._actions), "outcome": self._outcome()}

    def set_state(self, state: Any, exact: bool = True) -> tuple[Any, dict[str, Any]]:
        """Replay an episode and return its latest observation and info.

        Args:
            exact: Raise if the replay differs from the original. `False` warns and continues from there, or from the
                start of a new episode.
        """
        if state["random"] is not None:
            self.env.unwrapped.np_random.bit_generator.state = state["random"]
        try:
            self.reset(seed=state["seed"], options=state["options"])
            for action in state["actions"]:
                self.step(action)
        except Exception as error:
            if exact:
                raise ValueError(f"{self.env} can't replay its episode: {error!r}. {_REMEDY}") from error
            warnings.warn(f"{self.env} can't replay its episode and starts a new one: {error!r}", stacklevel=2)
            observation, info = self.reset()
            return observation, {**info, RESTARTED: True}
        outcome = self._outcome()
        differing = [name for name in outcome if outcome[name] != state["outcome"][name]]
        if differing:
            difference = f"Replaying the episode of {self.env} gave a different {' and '.join(differing)}."
            if exact and not (differing == ["observation"] and self.spec is not None and self.spec.nondeterministic):
                raise ValueError(f"{difference} {_REMEDY}")
            warnings.warn(difference, stacklevel=2)
        return self._latest

    def _random(self) -> dict[str, Any] | None:
        generator = self.env.unwrapped.np_random
        return dict(generator.bit_generator.state) if isinstance(generator, np.random.Generator) else None

    def _outcome(self) -> dict[str, str]:
        observation, info = self._latest
        if self._first_fingerprint is None:
            self._first_fingerprint = fingerprint(self._first)
        return {
            "start": self._first_fingerprint,
            "observation": fingerprint(observation),
            "info": fingerprint(info),
            "reward": fingerprint(self._rewards),
        }


class Pickled(Replayable):
    """Saves its environment as a pickle instead. Restoring it can execute arbitrary code."""

    def get_state(self) -> Any:
        return cloudpickle.dumps((self.env, self._latest))

    def set_state(self, state: Any, exact: bool = True) -> tuple[Any, dict[str, Any]]:
        if isinstance(state, dict):  # saved without pickling
            return super().set_state(state, exact)
        restored = cloudpickle.loads(state)
        self.env.close()
        self.env, self._latest = restored
        return self._latest


def restorable(make_env: Callable[[], gym.Env], pickled: bool = False) -> Replayable:
    """A new environment whose state can be saved and restored."""
    return (Pickled if pickled else Replayable)(make_env())


def of_worker(state: Any) -> bool:
    """Whether a state was saved by a `WorkerVectorEnv`, which adds its own to each environment's."""
    return isinstance(state, dict) and "environment" in state


class LocalVectorEnv(SyncVectorEnv):
    """`num_envs` environments in this process; autoreset in the same step.

    The first few times that states are saved, one is test-restored in a spare environment, so that an environment
    that can't be restored fails early rather than when a run is resumed.

    Args:
        make_env: Creates one environment.
        pickle_environments: Save environments as pickles instead of replaying them.
    """

    envs: list[Replayable]  # type: ignore[assignment]

    def __init__(self, make_env: Callable[[], gym.Env], num_envs: int, *, pickle_environments: bool = False) -> None:
        self._make_env = partial(restorable, make_env, pickle_environments)
        self._spare_env: Replayable | None = None
        self._test_restores = 0
        super().__init__([self._make_env] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)

    def reset_some(self, seeds: Mapping[int, int]) -> dict[int, tuple[Any, dict[str, Any]]]:
        """Start an episode in some environments: seeds, and the results, by environment."""
        return {i: copy.deepcopy(self.envs[i].reset(seed=seed)) for i, seed in seeds.items()}

    def step_some(self, actions: Mapping[int, Any]) -> dict[int, tuple[Any, float, bool, bool, dict[str, Any]]]:
        """Step some environments, without autoreset: actions, and the results, by environment."""
        results = {}
        for i, action in actions.items():
            observation, reward, terminated, truncated, info = self.envs[i].step(action)
            seen = copy.deepcopy((observation, info))  # some environments mutate what they returned
            results[i] = seen[0], float(reward), bool(terminated), bool(truncated), seen[1]
        return results

    def get_states(self) -> list[Any]:
        """The state of every environment mid-episode, as plain data unless pickled."""
        states = [env.get_state() for env in self.envs]
        if self._test_restores < _MAX_TEST_RESTORES:
            self._spare_env = self._spare_env or self._make_env()
            self._spare_env.set_state(states[self._test_restores % self.num_envs])
            self._test_restores += 1
        return states

    def set_states(self, states: Sequence[Any], exact: bool = True) -> tuple[Any, dict[str, Any]]:
        """Restore states, also those of a `WorkerVectorEnv`; returns observations and infos like `reset`."""
        states = [state["environment"] if of_worker(state) else state for state in states]
        if None in states:
            raise ValueError(
                "A worker was lost right before these states were saved, and only workers can report that: continue "
                "with vectorization='workers'."
            )
        infos: dict[str, Any] = {}
        for i, (env, state) in enumerate(zip(self.envs, states, strict=True)):
            self._env_obs[i], info = env.set_state(state, exact)
            infos = self._add_info(infos, info, i)
        self._observations = concatenate(self.single_observation_space, self._env_obs, self._observations)
        return copy.deepcopy(self._observations), infos

    def close_extras(self, **kwargs: Any) -> None:
        super().close_extras(**kwargs)
        if self._spare_env is not None:
            self._spare_env.close()
