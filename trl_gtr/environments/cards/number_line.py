"""NumberLine: walk to a number."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from .canvas import BLACK, SIZE, WHITE, Picture, blank, put, words
from .picture_env import PictureEnv


class NumberLineEnv(PictureEnv):
    """Walk along the number line, one to the left or one to the right, until the target is reached.

    ## Description
    Target and start are drawn uniformly from 0 to `max_position`. If they are equal, the target moves by one
    (modulo `max_position`), so there is always some way to go.

    ## Observation
    `Box(0, 255, (300, 300, 3), uint8)`: the two lines "Target: x" and "Current: y", black on white.

    ## Actions
    `Discrete(2)`: 0 subtracts one (`-`), 1 adds one (`+`). At either end of the line the position stays.

    ## Rewards
    - the target is reached: +1
    - the distance to it did not shrink: −1
    - otherwise: 0

    ## Episode end
    Terminated at the target. Truncated after 2 · `max_position` steps.

    ## Information
    `Target` and `Current`.

    ## Arguments
    - `max_position=5`: the right end of the line, 2 or more.
    - `render_mode=None`: or `"rgb_array"`, or `"human"` (printed to a colour terminal).

    `reset(options={"target": 3, "current": 0})` sets both.
    """

    actions = ("-", "+")

    def __init__(self, max_position: int = 5, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        if not isinstance(max_position, int) or isinstance(max_position, bool) or max_position < 2:
            raise ValueError(f"max_position must be an integer of at least 2, not {max_position!r}")
        self.max_position = max_position
        self.action_space = spaces.Discrete(2)
        self._target = self._current = self._steps = 0

    @property
    def step_limit(self) -> int:
        return 2 * self.max_position

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Picture, dict[str, Any]]:
        super().reset(seed=seed)
        wishes = self._check_options(options, ("target", "current"))
        if wishes:
            self._target, self._current = self._wished_positions(dict(wishes))
        else:
            self._current, self._target = map(int, self.np_random.integers(0, self.max_position + 1, size=2))
            if self._current == self._target:
                self._target = (self._target + 1) % self.max_position
        self._steps = 0
        self._begin()
        return self.picture(), self._info()

    def _wished_positions(self, wishes: dict[str, Any]) -> tuple[int, int]:
        target, current = wishes.get("target", -1), wishes.get("current", -1)
        for position in (target, current):
            if not isinstance(position, int) or isinstance(position, bool) or not 0 <= position <= self.max_position:
                raise ValueError(
                    f"options need both 'target' and 'current', integers from 0 to {self.max_position}, not {wishes!r}"
                )
        if target == current:
            raise ValueError(f"'target' and 'current' must differ, both are {target}")
        return target, current

    def step(self, action: int) -> tuple[Picture, float, bool, bool, dict[str, Any]]:
        move = 2 * self._check_step(action) - 1
        distance = abs(self._target - self._current)
        self._current = min(max(self._current + move, 0), self.max_position)
        self._steps += 1
        terminated = self._current == self._target
        truncated = not terminated and self._steps >= self.step_limit
        reward = 0.0 if abs(self._target - self._current) < distance else -1.0
        if terminated:
            reward = 1.0
        self._end_step(terminated or truncated)
        return self.picture(), reward, terminated, truncated, self._info()

    def _info(self) -> dict[str, Any]:
        return {"Target": self._target, "Current": self._current}

    def picture(self) -> Picture:
        paper = blank(WHITE).copy()
        for label, position, base in (("Target:", self._target, 130), ("Current:", self._current, 260)):
            name = words(label, 36, BLACK, WHITE)
            put(paper, name, 10, base - 36)
            number = words(str(position), 90, BLACK, WHITE, max_width=86)
            put(paper, number, SIZE - 50 - number.shape[1] // 2, base - 90)
        return paper
