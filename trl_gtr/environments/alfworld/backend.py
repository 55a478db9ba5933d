"""What an ALFWorld engine gives to the environment, be it text or THOR."""

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
    """The share of the goal's conditions that hold."""
    view: dict[str, Any]
    """What can be seen, in words; see `World.view`."""
    plan: Plan


class Backend(Protocol):
    """One game at a time."""

    goal: Goal | None
    """Of the game that has been started."""

    def start(self, game: Game, seed: int) -> Moment:
        """Begin a game from its start. What is left to chance in it follows the seed."""

    def step(self, command: str) -> Moment:
        """Execute an admissible command."""

    def close(self) -> None: ...
