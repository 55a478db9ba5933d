"""How a response becomes an environment step, with the same rules for training and evaluation.

[`PlayingRules`] creates the environments, picks the action for a response, and sets the cost of a response without a
legal action.
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
    """The action to step an environment with."""

    action: Any
    legal: bool
    """Whether it is the action named in the response."""
    substitute: str | None = None
    """Text of the random action played instead."""


class PlayingRules:
    """The rules for playing a task.

    Args:
        task: The task to play.
        invalid_action: What happens without a legal action. `"random"` plays a random legal action and adds the task's
            `illegal_reward`. `"penalty"` skips the step for a reward of -1.
        whole_episodes: Training episodes always end too.
    """

    def __init__(self, task: Task, invalid_action: str = "random", whole_episodes: bool = False) -> None:
        if invalid_action not in ("random", "penalty"):
            raise ValueError(f"`invalid_action` must be 'random' or 'penalty', not {invalid_action!r}.")
        self.task, self.penalize, self.whole_episodes = task, invalid_action == "penalty", whole_episodes

    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        """One environment. Evaluation episodes always end: at the game's own limit, or else at the default one."""
        env = self.task.make_env(evaluation=evaluation)
        if self.penalize:
            return SkippableStep(env)
        return StepLimit(env) if evaluation or self.whole_episodes else env

    def choose(
        self, response: Response, info: Mapping[str, Any], action_space: gym.Space, rng: np.random.Generator
    ) -> Choice:
        """The action named in the response; if it isn't legal, a skipped step or a random action."""
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
        """The step's reward: the environment's, plus the task's penalty for an illegal action.

        A skipped step costs only its -1.
        """
        return float(earned) + (0.0 if legal or self.penalize else self.task.illegal_reward)


class StepLimit(gym.Wrapper):
    """Truncates episodes at the game's own limit (`step_limit`)."""

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
    """Adds a no-op action with reward -1, for responses without a legal action under `"penalty"`.

    A skip counts towards the step limit, so skips never make episodes longer than the limit.
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        if isinstance(env.action_space, gym.spaces.Discrete):
            self.action_space = gym.spaces.Discrete(int(env.action_space.n) + 1)
        self.last: tuple[Any, dict[str, Any]] = (None, {})

    @staticmethod
    def skip(action_space: gym.Space) -> Any:
        """The skip action: one past the last of a discrete space, otherwise the empty string."""
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
    """The maximum number of steps in an episode, including skips.

    The smaller of the game's own limit (`step_limit` of the environment or a wrapper) and its `max_episode_steps`; 300
    if it has neither.
    """
    limits = [env.get_wrapper_attr("step_limit")] if env.has_wrapper_attr("step_limit") else []
    if env.spec is not None and env.spec.max_episode_steps is not None:
        limits.append(env.spec.max_episode_steps)
    return min(limits, default=DEFAULT_STEP_LIMIT)
