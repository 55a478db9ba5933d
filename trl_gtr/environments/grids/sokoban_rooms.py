"""Sokoban's rules as pure functions, and rooms that are solvable by construction.

A room is text in the usual notation: `#` wall, space floor, `.` target, `$` box, `*` box on a target, `@` player, `+`
player on a target. Squares are numbered row by row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

MOVES = ("up", "down", "left", "right")
MIN_SIDE, MAX_SIDE, MAX_BOXES = 5, 8, 3
"""Up to this size every room is searched exhaustively in seconds at worst."""

_MAX_STATES = 400  # of the reverse play: enough for more pushes than anyone asks for, and fast
_SIGNS = {"#": (), " ": (), ".": ("target",), "$": ("box",), "*": ("box", "target"), "@": ("player",)}
_SIGNS["+"] = ("player", "target")


@dataclass(frozen=True)
class Plan:
    """What never moves in a room."""

    height: int
    width: int
    floor: frozenset[int]
    targets: frozenset[int]

    @property
    def steps(self) -> tuple[int, int, int, int]:
        """How far each move leads, in squares: up, down, left, right."""
        return (-self.width, self.width, -1, 1)


@dataclass(frozen=True)
class Room:
    """A plan, the player and the boxes."""

    plan: Plan
    player: int
    boxes: frozenset[int]

    @property
    def solved(self) -> bool:
        return self.boxes == self.plan.targets

    def moved(self, move: int) -> Room:
        """The room after a move: the same if a wall or a box that can't be pushed is in the way."""
        step = self.plan.steps[move]
        ahead, beyond = self.player + step, self.player + 2 * step
        if ahead not in self.plan.floor:
            return self
        if ahead not in self.boxes:
            return replace(self, player=ahead)
        if beyond not in self.plan.floor or beyond in self.boxes:
            return self
        return replace(self, player=ahead, boxes=self.boxes - {ahead} | {beyond})

    def position(self, square: int) -> tuple[int, int]:
        """Row and column, from 1 in the upper left corner."""
        row, column = divmod(square, self.plan.width)
        return row + 1, column + 1

    def text(self) -> list[str]:
        squares = [self._sign(square) for square in range(self.plan.height * self.plan.width)]
        return ["".join(squares[at : at + self.plan.width]) for at in range(0, len(squares), self.plan.width)]

    def _sign(self, square: int) -> str:
        on_target = square in self.plan.targets
        if square in self.boxes:
            return "*" if on_target else "$"
        if square == self.player:
            return "+" if on_target else "@"
        return "." if on_target else " " if square in self.plan.floor else "#"


def read_room(lines: Sequence[str]) -> Room:
    """A room from its text. Raises `ValueError` if the text isn't a room."""
    return _read_room(tuple(lines))


@lru_cache(maxsize=4096)
def _read_room(lines: tuple[str, ...]) -> Room:
    height, width = len(lines), len(lines[0]) if lines else 0
    if {len(line) for line in lines} != {width} or not {*"".join(lines)} <= _SIGNS.keys():
        raise ValueError(f"a room has lines of equal length, made of {''.join(_SIGNS)!r}, not {list(lines)!r}")
    found: dict[str, set[int]] = {"box": set(), "target": set(), "player": set()}
    floor = {square for square, sign in enumerate("".join(lines)) if sign != "#"}
    for square, sign in enumerate("".join(lines)):
        for thing in _SIGNS[sign]:
            found[thing].add(square)
    if any(square // width in (0, height - 1) or square % width in (0, width - 1) for square in floor):
        raise ValueError("a room must have walls all around")
    if not MIN_SIDE <= min(height, width) <= max(height, width) <= MAX_SIDE:
        raise ValueError(f"a room must have {MIN_SIDE} to {MAX_SIDE} rows and columns, not {height}×{width}")
    boxes, targets, players = (len(found[thing]) for thing in ("box", "target", "player"))
    if players != 1 or boxes != targets or not 1 <= boxes <= MAX_BOXES:
        raise ValueError(
            f"a room needs one player and 1 to {MAX_BOXES} boxes with a target each, not {players} players, {boxes} "
            f"boxes and {targets} targets"
        )
    plan = Plan(height, width, frozenset(floor), frozenset(found["target"]))
    return Room(plan, found["player"].pop(), frozenset(found["box"]))


# -- making rooms -----------------------------------------------------------------------------------------------------


def make_room(
    rng: np.random.Generator, height: int, width: int, boxes: int, pushes: tuple[int, int], walls: float = 0.2
) -> Room:
    """A random room, solvable because it was made by playing backwards from the solved one.

    Args:
        rng: Decides everything.
        height: Rows, including the walls around.
        width: Columns, likewise.
        boxes: How many boxes.
        pushes: The fewest and the most pushes of the shortest solution in pushes.
        walls: Share of inner squares that are walls.
    """
    for _ in range(1_000):
        floor = _carve(rng, height, width, walls)
        if len(floor) < 3 * boxes + 2:
            continue
        targets = frozenset(int(square) for square in rng.choice(sorted(floor), size=boxes, replace=False))
        plan = Plan(height, width, frozenset(floor), targets)
        starts = [
            (player, placed)
            for depth, player, placed in play_backwards(plan, pushes[1])
            if depth >= pushes[0] and not placed & targets
        ]
        if not starts:
            continue
        player, placed = starts[int(rng.integers(len(starts)))]
        reachable = sorted(reach(plan, player, placed))
        return Room(plan, reachable[int(rng.integers(len(reachable)))], placed)
    raise ValueError(
        f"found no {height}×{width} room with {boxes} boxes that takes {pushes[0]} to {pushes[1]} pushes: make it "
        "larger, or ask for fewer pushes"
    )


def _carve(rng: np.random.Generator, height: int, width: int, walls: float) -> set[int]:
    """Random floor inside the outer walls: its largest connected part."""
    is_floor = rng.random((height - 2, width - 2)) >= walls
    floor = {(int(row) + 1) * width + int(column) + 1 for row, column in zip(*np.nonzero(is_floor), strict=True)}
    largest: set[int] = set()
    while floor:
        part = _flood(floor, next(iter(sorted(floor))), width)
        floor -= part
        largest = max(largest, part, key=len)
    return largest


def _flood(floor: Collection[int], start: int, width: int) -> set[int]:
    seen, waiting = {start}, [start]
    while waiting:
        square = waiting.pop()
        for step in (-width, width, -1, 1):
            if square + step in floor and square + step not in seen:
                seen.add(square + step)
                waiting.append(square + step)
    return seen


def reach(plan: Plan, player: int, boxes: frozenset[int]) -> set[int]:
    """The squares that the player can walk to without pushing."""
    return _flood(plan.floor - boxes, player, plan.width)


def play_backwards(plan: Plan, max_pushes: int) -> Iterator[tuple[int, int, frozenset[int]]]:
    """Pull boxes off their targets, breadth first: pushes needed, a square the player may stand on, boxes.

    At most a few hundred states, so that rooms are made in milliseconds.
    """
    seen: set[tuple[int, frozenset[int]]] = set()
    waiting: deque[tuple[int, int, frozenset[int]]] = deque()

    def meet(depth: int, player: int, boxes: frozenset[int]) -> None:
        area = reach(plan, player, boxes)
        key = (min(area), boxes)
        if key not in seen:
            seen.add(key)
            waiting.append((depth, key[0], boxes))

    for square in sorted(plan.floor - plan.targets):
        meet(0, square, plan.targets)
    while waiting and len(seen) < _MAX_STATES:
        depth, player, boxes = waiting.popleft()
        yield depth, player, boxes
        if depth == max_pushes:
            continue
        area = reach(plan, player, boxes)
        for box in sorted(boxes):
            for step in plan.steps:
                stand, back = box + step, box + 2 * step
                if stand in area and back in plan.floor and back not in boxes:
                    meet(depth + 1, back, boxes - {box} | {stand})
    yield from waiting
