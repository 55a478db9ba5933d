"""One deal after another, played step by step by a person or an agent, with a verdict on every thought."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..correctors.expert import ExpertCorrector
from ..responses.format import Field, ThoughtFormat
from ..rollouts.playing import PlayingRules
from ..tasks.base import Task
from ..types import Correction, CorrectionRequest, Transition
from .episode import Episode, start_options

_EMPTY: dict[str, Any] = {"text": "", "number": 0, "list": []}


class PlayedStep(NamedTuple):
    """A step, and what judge and expert say about it."""

    transition: Transition
    judgement: Mapping[str, bool]
    """Whether each part of the thought is true; empty if the task can't tell."""
    correction: Correction | None
    """The expert's verdict; `None` if the task has no expert."""


class Game:
    """The deals of an evaluation with this seed, one at a time. Close it after use.

    Args:
        task: The task to play.
        seed: Determines the deals.
    """

    def __init__(self, task: Task, seed: int = 0) -> None:
        self.task, self.seed = Task.ensure(task), seed
        self._rules = PlayingRules(self.task)
        self._env = self._rules.make_env(evaluation=True)
        self._starts = self.task.starts()
        self._corrector = ExpertCorrector() if self.task.defines("expert") else None
        self.played = self.won = 0
        """Finished deals, and how many of them succeeded."""
        self._number = 0
        self.episode = self._begin()

    def _begin(self) -> Episode:
        options = start_options(self._starts, self.seed, self._number)
        episode = Episode(self._rules, self._env, self._number, self.seed, options)
        episode.begin()
        return episode

    @property
    def image(self) -> np.ndarray:
        return self.episode.observation

    @property
    def prompt(self) -> str:
        return self.episode.prompt

    @property
    def rules(self) -> str:
        """The prompt for a person: without the instructions about JSON."""
        return self.prompt.replace(self.task.format.instructions(), "").strip()

    def is_legal(self, text: str) -> bool:
        """Whether this response names a legal action."""
        response = self.task.format.parse(text)
        return response.valid and self.task.to_env_action(response, self.episode.info) is not None

    def hint(self) -> str | None:
        """What the expert would say; `None` if it doesn't know, or there is none."""
        response = self.task.expert(self.episode.info)
        return None if response is None else response.text

    def step(self, text: str) -> PlayedStep:
        """Play a response. Without a legal action, a random one is played, as in training."""
        image, prompt, info = self.image, self.prompt, self.episode.info
        self.episode.step(prompt, text)
        transition = self.episode.transitions[-1]
        if self.episode.ended:
            self.played += 1
            self.won += self.succeeded
        public, correction = self.task.public_state(info), None
        if self._corrector is not None:
            request = CorrectionRequest(image, prompt, transition.response, public, info, self.task)
            (correction,) = self._corrector.correct([request])
        return PlayedStep(transition, self.task.judge(transition.response, info), correction)

    @property
    def ended(self) -> bool:
        return self.episode.ended

    @property
    def succeeded(self) -> bool:
        return bool(self.task.success(self.episode.transitions))

    def deal(self) -> None:
        """Go on to the next deal."""
        self._number += 1
        self.episode = self._begin()

    def close(self) -> None:
        self._env.close()


def written_response(format: ThoughtFormat, thought: Mapping[str, str], action: str) -> str:
    """A response from what a person typed for each part; parts left out are empty.

    Raises a `ValueError` if a part has the wrong kind.
    """
    values = {field.key: _typed(field, thought.get(field.key, "")) for field in format.fields}
    return format.render(values, action)


def readable(value: Any) -> str:
    """A part of a thought as a person would write it."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _typed(field: Field, text: str) -> Any:
    if not text.strip():
        return _EMPTY[field.kind]
    return text.replace(",", " ").split() if field.kind == "list" else text.strip()
