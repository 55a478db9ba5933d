"""The grid worlds as text. Positions are "row,column", counted from 1 in the upper left corner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.toy_text.cliffwalking import CliffWalkingEnv
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.envs.toy_text.taxi import TaxiEnv

from .sokoban import SokobanEnv
from .sokoban_rooms import read_room

_PADS = ("red", "green", "yellow", "blue")


def grid_in_words(game: gym.Env, state: Any, info: Mapping[str, Any]) -> str | None:
    """What the picture of a grid world shows; `None` for any other game.

    Args:
        game: The environment without its wrappers.
        state: Its own observation.
        info: Its `info`.
    """
    match game:
        case SokobanEnv():
            return _sokoban(info["Room"])
        case FrozenLakeEnv():
            return _frozen_lake(np.asarray(game.desc).astype(str).tolist(), int(state))
        case CliffWalkingEnv():
            return _cliff_walking(*game.shape, int(state))
        case TaxiEnv():
            return _taxi(game, int(state))
    return None


def _sokoban(lines: list[str]) -> str:
    room = read_room(lines)
    rows, columns = room.plan.height, room.plan.width
    inner = [(row, column) for row in range(2, rows) for column in range(2, columns)]
    walls = [(row, column) for row, column in inner if (row - 1) * columns + column - 1 not in room.plan.floor]
    return (
        f"The room has {rows} rows and {columns} columns, with walls all around. Walls inside: {_places(walls)}. "
        f"You are at {_place(*room.position(room.player))}. Boxes: {_places(map(room.position, room.boxes))}. "
        f"Targets: {_places(map(room.position, room.plan.targets))}."
    )


def _frozen_lake(signs: list[list[str]], state: int) -> str:
    squares = [(row, column, sign) for row, line in enumerate(signs, 1) for column, sign in enumerate(line, 1)]
    goals, holes = ([(row, column) for row, column, sign in squares if sign == kind] for kind in "GH")
    row, column = divmod(state, len(signs[0]))
    return (
        f"The lake has {len(signs)} rows and {len(signs[0])} columns. You are at {_place(row + 1, column + 1)}. "
        f"Goal: {_places(goals)}. Holes: {_places(holes)}."
    )


def _cliff_walking(rows: int, columns: int, state: int) -> str:
    row, column = divmod(state, columns)
    return (
        f"The ground has {rows} rows and {columns} columns. You are at {_place(row + 1, column + 1)}. Goal: "
        f"{_place(rows, columns)}. The cliff: {_place(rows, 2)} to {_place(rows, columns - 1)}."
    )


def _taxi(game: TaxiEnv, state: int) -> str:
    row, column, passenger, destination = game.decode(state)
    pads = [f"{color} at {_place(y + 1, x + 1)}" for color, (y, x) in zip(_PADS, game.locs, strict=True)]
    inside = game.desc[1:-1, 2:-1:2]  # what is to the right of each square, without the outer walls
    walls = [f"right of {_place(int(y) + 1, int(x) + 1)}" for y, x in np.argwhere(inside == b"|")]
    waits = "is in the taxi" if passenger == len(_PADS) else f"is at the {_PADS[passenger]} pad"
    return (
        f"The town has 5 rows and 5 columns. Walls inside: {', '.join(walls)}. Pads: {', '.join(pads)}. The taxi is "
        f"at {_place(row + 1, column + 1)}. The passenger {waits}. The destination is the {_PADS[destination]} pad."
    )


def _place(row: int, column: int) -> str:
    return f"{row},{column}"


def _places(positions: Iterable[tuple[int, int]]) -> str:
    """In reading order, separated by spaces, because a position has a comma in it."""
    return " ".join(_place(*position) for position in sorted(positions)) or "none"
