"""A task as an environment of TRL's `GRPOTrainer`: the agent's whole response is one call of the tool `act`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset
from PIL import Image

from ..evaluation.episode import Episode, start_options
from ..rollouts.playing import PlayingRules
from ..tasks.base import Task
from .chat import EPISODE_OVER

Content = list[dict[str, Any]]


class TaskEnvironment:
    """One environment of a task, in the form that TRL wants. [`environment_factory`] makes them.

    TRL offers every public method to the model as a tool, except `reset` and `get_reward`.
    """

    def __init__(self, rules: PlayingRules, seed: int) -> None:
        self._rules, self._seed = rules, seed
        self._env = rules.make_env()
        self._starts = rules.task.starts()
        self._episode: Episode | None = None
        self._failure: Exception | None = None

    def reset(self, episode: int | None = None, **row: Any) -> Content:
        """Begin the episode with this number. Returns the first picture and prompt."""
        if episode is None:
            raise ValueError(
                "The training data has no column `episode`, so the rollouts of a group would start in different "
                "states and could not be compared: pass train_dataset=trl_gtr.interop.episodes(64)."
            )
        options = start_options(self._starts, self._seed, episode)
        self._failure = None
        self._episode = Episode(self._rules, self._env, episode, self._seed, options)
        self._episode.begin()
        return self._observation(self._episode)

    def act(self, response: str) -> Content:
        """
        Play one step.

        Args:
            response: The JSON object that the prompt asks for, as text.

        Returns:
            The next picture and prompt.
        """
        episode = self._begun()
        if not episode.ended:
            try:
                episode.step(self._rules.task.prompt(episode.observation, episode.info), response)
            except Exception as error:
                self._failure = error  # TRL shows a tool's errors to the model and goes on
                raise
        return [{"type": "text", "text": EPISODE_OVER}] if episode.ended else self._observation(episode)

    def get_reward(self) -> float:
        """The episode's return so far. Raises what went wrong in a step."""
        episode = self._begun()
        if self._failure is not None:
            raise RuntimeError(f"A step of episode {episode.index} failed: {self._failure}") from self._failure
        return float(sum(transition.reward for transition in episode.transitions))

    def _succeeded(self) -> bool:
        episode = self._begun()
        return episode.ended and bool(self._rules.task.success(episode.transitions))

    def _begun(self) -> Episode:
        if self._episode is None:
            raise RuntimeError("call reset() first")
        return self._episode

    def _observation(self, episode: Episode) -> Content:
        prompt = self._rules.task.prompt(episode.observation, episode.info)
        return [{"type": "image", "image": Image.fromarray(episode.observation)}, {"type": "text", "text": prompt}]


def environment_factory(task: Task, *, seed: int = 0, invalid_action: str = "random") -> Callable[[], TaskEnvironment]:
    """What TRL's `GRPOTrainer` takes as `environment_factory`. The model must be prepared: [`prepare_model`].

    Args:
        task: The task to play.
        seed: Together with an episode's number, determines its start.
        invalid_action: What happens without a legal action, as in `GTRConfig`: `random` or `penalty`.
    """
    rules = PlayingRules(Task.ensure(task), invalid_action, whole_episodes=True)
    return lambda: TaskEnvironment(rules, seed)


def episodes(count: int, first: int = 0) -> Dataset:
    """The data set to go with it: a row for each of `count` episodes. TRL plays it once for each rollout of a group.

    Args:
        count: Number of different starts.
        first: Number of the first episode; begin an evaluation's rows where the training's end.
    """
    numbers = list(range(first, first + count))
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": []}]] * count, "episode": numbers})


def success(environments: Sequence[TaskEnvironment], **kwargs: Any) -> list[float]:
    """A reward function that logs the share of successful episodes, as `rewards/success/mean`.

    With `GRPOConfig(reward_weights=[0.0])` it is only logged: the return is a reward of its own.
    """
    return [float(environment._succeeded()) for environment in environments]
