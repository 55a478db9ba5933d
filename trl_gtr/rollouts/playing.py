"""How a response becomes a step. One set of rules for training and evaluation.

[`PlayingRules`] makes the environments, chooses the action of a response, and knows what a response without a legal
action costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from ..tasks.base import Task
from ..types import Response

INVALID_ACTION_PENALTY = -1.0
DEFAULT_STEP_LIMIT = 300


class Choice(NamedTuple):
    """What an environment is stepped with."""

    action: Any
    legal: bool
    """Whether it is the action that the response names."""
    substitute: str | None = None
    """The text of the random action that takes its place."""


class PlayingRules:
    """The rules of playing a task.

    Args:
        task: What is played.
        invalid_action: What a response without a legal action does. `"random"` plays any legal action, at the task's
            `illegal_reward`. `"penalty"` steps nothing and pays -1.
    """

    def __init__(self, task: Task, invalid_action: str = "random") -> None:
        if invalid_action not in ("random", "penalty"):
            raise ValueError(f"`invalid_action` is 'random' or 'penalty', not {invalid_action!r}.")
        self.task, self.penalize = task, invalid_action == "penalty"

    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        """One environment. An evaluation's episodes always end: at the game's own limit or, without one, at ours."""
        env = self.task.make_env(evaluation=evaluation)
        if self.penalize:
            return SkippableStep(env)
        return StepLimit(env) if evaluation else env

    def choose(
        self, response: Response, info: Mapping[str, Any], action_space: gym.Space, rng: np.random.Generator
    ) -> Choice:
        """The action that the response names; without a legal one a skipped step or a random action."""
        if response.valid:
            action = self.task.to_env_action(response, info)
            if action is not None:
                return Choice(action, legal=True)
        if self.penalize:
            return Choice(SkippableStep.skip(action_space), legal=False)
        text = str(rng.choice(np.array(self.task.legal_actions(info), dtype=object)))
        action = self.task.to_env_action(replace(response, action=text, error=None), info)
        return Choice(action, legal=False, substitute=text)

    def reward(self, earned: float, legal: bool) -> float:
        """The reward of a step: what the environment paid, and the task's price of an illegal action.

        A skipped step costs no more than its -1.
        """
        return float(earned) + (0.0 if legal or self.penalize else self.task.illegal_reward)


class StepLimit(gym.Wrapper):
    """Truncates an episode at the game's own limit (`step_limit`)."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.limit = step_limit(env)
        self.steps = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.steps = 0
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.steps += 1
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated or (self.steps >= self.limit and not terminated), info


class SkippableStep(StepLimit):
    """Adds an action that steps nothing and pays -1: what an unreadable response costs under `"penalty"`.

    A skip counts as a step towards the limit, so that an episode is never longer than one without skips can be.
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        if isinstance(env.action_space, gym.spaces.Discrete):
            self.action_space = gym.spaces.Discrete(int(env.action_space.n) + 1)
        self.last: tuple[Any, dict[str, Any]] = (None, {})

    @staticmethod
    def skip(action_space: gym.Space) -> Any:
        """The action that skips: one past the last of a discrete space, the empty text elsewhere."""
        return int(action_space.n) - 1 if isinstance(action_space, gym.spaces.Discrete) else ""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.last = super().reset(**kwargs)
        return self.last

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if action == self.skip(self.action_space):
            self.steps += 1
            return self.last[0], INVALID_ACTION_PENALTY, False, self.steps >= self.limit, self.last[1]
        observation, reward, terminated, truncated, info = super().step(action)
        self.last = observation, info
        return observation, reward, terminated, truncated, info


def step_limit(env: gym.Env) -> int:
    """The most steps that an episode can have, skips included.

    What the game's rules allow, which an environment or a wrapper gives as `step_limit`, or the `max_episode_steps` it
    was made with, whichever is less; 300 for an environment with neither.
    """
    limits = [env.get_wrapper_attr("step_limit")] if env.has_wrapper_attr("step_limit") else []
    if env.spec is not None and env.spec.max_episode_steps is not None:
        limits.append(env.spec.max_episode_steps)
    return min(limits, default=DEFAULT_STEP_LIMIT)
