"""Sokoban: push every box onto a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymnasium import spaces

from ..cards.canvas import Picture
from ..cards.picture_env import PictureEnv
from .sokoban_rooms import MAX_BOXES, MAX_SIDE, MIN_SIDE, MOVES, Room, make_room, read_room
from .sokoban_tiles import draw_room


class SokobanEnv(PictureEnv):
    """Push every box onto a target. Boxes can be pushed, one at a time, but never pulled.

    ## Description
    Every room is new: floor and walls are drawn at random, and the boxes are moved off their targets by playing
    backwards. So every room can be solved, but a push against a wall or into a corner may make it impossible.

    ## Observation
    `Box(0, 255, (300, 300, 3), uint8)`: brick walls, stone floor, targets as red rings, boxes as wooden crates (green
    ones stand on a target), and the player in blue.

    ## Actions
    `Discrete(4)`: 0 up, 1 down, 2 left, 3 right. Walking into a box pushes it if the square behind it is free;
    otherwise, as at a wall, nothing moves.

    ## Rewards
    - every step: −0.1
    - a box is pushed onto a target: +1; off a target: −1
    - all boxes are on targets: +10

    ## Episode end
    Terminated when every box is on a target. Truncated after `max_steps` steps.

    ## Information
    `Room`: its lines in the usual notation: `#` wall, space floor, `.` target, `$` box, `*` box on a target, `@`
    player, `+` player on a target.

    ## Arguments
    - `size=6`: rows and columns including the walls around, 5 to 8; or a pair of both.
    - `boxes=(1, 2)`: how many boxes, at most 3; or the fewest and the most.
    - `pushes=(1, 8)`: the fewest and the most pushes that a solution needs.
    - `walls=0.2`: share of inner squares that are walls.
    - `max_steps=60`: the longest episode.
    - `render_mode=None`: or `"rgb_array"`, or `"human"` (printed to a colour terminal).

    `reset(options={"room": ["#####", "#@$.#", "#   #", "#   #", "#####"]})` sets the room.
    """

    actions = MOVES

    def __init__(
        self,
        size: int | Sequence[int] = 6,
        boxes: int | Sequence[int] = (1, 2),
        pushes: int | Sequence[int] = (1, 8),
        walls: float = 0.2,
        max_steps: int = 60,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode)
        self.action_space = spaces.Discrete(len(MOVES))
        self.size = _pair("size", size, MIN_SIDE, MAX_SIDE)
        self.boxes = _pair("boxes", boxes, 1, MAX_BOXES, ordered=True)
        self.pushes = _pair("pushes", pushes, 1, 100, ordered=True)
        if not 0 <= walls < 1:
            raise ValueError(f"walls must be a share from 0 to below 1, not {walls!r}")
        if not isinstance(max_steps, int) or isinstance(max_steps, bool) or max_steps < 1:
            raise ValueError(f"max_steps must be an integer of at least 1, not {max_steps!r}")
        self.walls, self.max_steps = walls, max_steps
        self._room: Room | None = None
        self._lines: list[str] = []
        self._steps = 0

    @property
    def step_limit(self) -> int:
        return self.max_steps

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Picture, dict[str, Any]]:
        super().reset(seed=seed)
        requested = self._check_options(options, ("room",))
        self._enter(self._requested(requested["room"]) if requested else self._drawn())
        self._steps = 0
        self._begin()
        return self.picture(), self._info()

    def _drawn(self) -> Room:
        boxes = int(self.np_random.integers(self.boxes[0], self.boxes[1] + 1))
        return make_room(self.np_random, *self.size, boxes, self.pushes, self.walls)

    @staticmethod
    def _requested(lines: Any) -> Room:
        if isinstance(lines, str) or not isinstance(lines, Sequence) or not all(isinstance(row, str) for row in lines):
            raise ValueError(f"the option 'room' must be a list of lines, not {lines!r}")
        room = read_room(lines)
        if room.solved:
            raise ValueError("the room is solved already: put a box off its target")
        return room

    def _enter(self, room: Room) -> None:
        self._room, self._lines = room, room.text()

    def step(self, action: int) -> tuple[Picture, float, bool, bool, dict[str, Any]]:
        move = self._check_step(action)
        before = self._room
        assert before is not None  # checked with the action: there is an episode
        after = before.moved(move)
        self._enter(after)
        self._steps += 1
        targets = after.plan.targets
        reward = -0.1 + len(after.boxes & targets) - len(before.boxes & targets) + 10.0 * after.solved
        truncated = not after.solved and self._steps >= self.max_steps
        self._end_step(after.solved or truncated)
        return self.picture(), reward, after.solved, truncated, self._info()

    def _info(self) -> dict[str, Any]:
        return {"Room": list(self._lines)}

    def picture(self) -> Picture:
        return draw_room(self._lines)


def _pair(name: str, given: Any, least: int, most: int, ordered: bool = False) -> tuple[int, int]:
    """Two integers within limits, from one or two."""
    values = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given, given)
    whole = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    if len(values) != 2 or not whole or not all(least <= value <= most for value in values):
        raise ValueError(f"{name} must be an integer from {least} to {most}, or a pair of them, not {given!r}")
    if ordered and values[0] > values[1]:
        raise ValueError(f"{name} must be the fewest and the most, not {given!r}")
    return values[0], values[1]
