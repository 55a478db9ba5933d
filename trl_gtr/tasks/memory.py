"""What an agent sees again of its episode: the last steps, as earlier turns of the chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..responses.safe_text import storable
from ..types import Prompt, Turn
from .base import Task


class Memory:
    """The last steps of one episode. With `task.history_turns = 0`, prompts are the task's own.

    Args:
        task: Says how much is shown again: `history_turns`, `history_images`.
    """

    def __init__(self, task: Task) -> None:
        check_history(task)
        self.task = task
        self.turns: tuple[Turn, ...] = ()
        """The oldest first. Never changed in place, so that a checkpoint may refer to it."""

    def prompt(self, observation: Any, info: Mapping[str, Any]) -> str:
        """The prompt for this state, with the turns before it."""
        words = self.task.prompt(observation, info)
        return Prompt(words, self.turns) if self.turns else words

    def add(self, image: np.ndarray, info: Mapping[str, Any], response: str) -> None:
        """Remember a step: what the agent saw before it, and what it wrote."""
        if self.task.history_turns:
            new = Turn(str(self.task.earlier_prompt(image, info)), storable(response), image)
            self.restore((*self.turns, new))

    def restore(self, turns: Sequence[Turn]) -> None:
        """Remember these turns, as far as the task shows them again."""
        shown = turns[max(0, len(turns) - self.task.history_turns) :]
        first = len(shown) - self.task.history_images  # with its picture
        self.turns = tuple(
            replace(turn, image=None) if place < first and turn.image is not None else turn
            for place, turn in enumerate(shown)
        )

    def clear(self) -> None:
        """The episode is over."""
        self.turns = ()


def fullest_prompt(task: Task, observation: Any, info: Mapping[str, Any]) -> str:
    """A prompt for this state with as many turns before it as there can be, their responses left out."""
    memory = Memory(task)
    for _ in range(task.history_turns):
        memory.add(observation, info, "")
    return memory.prompt(observation, info)


def check_history(task: Task) -> None:
    """Raise a `ValueError` if the task's `history_turns` and `history_images` make no sense."""
    for name, value in {"history_turns": task.history_turns, "history_images": task.history_images}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"`{name}` must be a whole number, at least 0, not {value!r}.")
    if task.history_images > task.history_turns:
        raise ValueError(
            f"`history_images` = {task.history_images} is more than `history_turns` = {task.history_turns}: a picture "
            f"is shown with its turn. Set history_turns to at least {task.history_images}."
        )
