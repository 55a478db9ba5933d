"""The interface between the ALFWorld environment and its engines, text and THOR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .games import Game
from .goals import Goal
from .planner import Plan


@dataclass(frozen=True)
class Moment:
    """The state of a game after a command."""

    image: np.ndarray
    """uint8, (300, 300, 3), RGB."""
    feedback: str
    admissible_commands: list[str]
    won: bool
    goal_rate: float
    """The fraction of goal conditions that hold."""
    view: dict[str, Any]
    """What is visible, in words; see `World.view`."""
    plan: Plan


class Backend(Protocol):
    """Plays one game at a time."""

    goal: Goal | None
    """The goal of the current game."""

    def start(self, game: Game, seed: int) -> Moment:
        """Start a game. All randomness in it follows the seed."""

    def step(self, command: str) -> Moment:
        """Execute an admissible command."""

    def close(self) -> None: ...
