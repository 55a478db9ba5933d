"""The common base of the four games: image observations, render modes and input validation."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from .canvas import SIZE, Picture, in_terminal


class PictureEnv(gym.Env[Any, Any]):
    """A game with discrete actions whose state is drawn as a 300×300 RGB image.

    A subclass sets `actions` and `action_space`, and implements `picture()`, `step_limit` and gymnasium's `reset` and
    `step`.
    """

    metadata: dict[str, Any] = {"render_modes": ["human", "rgb_array"], "render_fps": 4}  # noqa: RUF012

    actions: tuple[str, ...]
    """The text of each action, by index."""

    def __init__(self, render_mode: str | None = None) -> None:
        modes = self.metadata["render_modes"]
        if render_mode is not None and render_mode not in modes:
            raise ValueError(f"unknown render_mode {render_mode!r}: choose one of {modes} or None")
        self.render_mode = render_mode
        self.observation_space = self._space()
        self._running = False
        self._has_state = False

    def __getstate__(self) -> dict[str, Any]:
        # The pixel bounds alone take more than a megabyte; a checkpoint only needs the game's state.
        return {name: value for name, value in vars(self).items() if name != "observation_space"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.observation_space = self._space()

    def _space(self) -> spaces.Space[Any]:
        return spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)

    @property
    def step_limit(self) -> int:
        """The maximum episode length under the game's rules."""
        raise NotImplementedError

    def picture(self) -> Picture:
        """The current state as a new uint8 array, (300, 300, 3)."""
        raise NotImplementedError

    def render(self) -> Any:
        """`"rgb_array"` returns the image; `"human"` prints it to a colour terminal, 96 columns wide."""
        if not self._has_state:
            raise ValueError("nothing to render yet: call reset() first")
        if self.render_mode == "rgb_array":
            return self.picture()
        if self.render_mode == "human":
            sys.stdout.write(in_terminal(self.picture()))
            sys.stdout.flush()
        else:
            gym.logger.warn("render() does nothing without a render_mode: make the environment with one")
        return None

    def _begin(self) -> None:
        """Called at the end of every `reset`."""
        self._running = self._has_state = True
        if self.render_mode == "human":
            self.render()

    def _check_step(self, action: Any) -> int:
        """Called at the start of every `step`: returns the action as a plain int."""
        if not self._running:
            raise ValueError("the episode is over or hasn't started: call reset() before step()")
        if isinstance(action, np.ndarray) and action.shape == ():
            action = action[()]
        is_index = isinstance(action, (int, np.integer)) and not isinstance(action, bool)
        if not is_index or not 0 <= action < len(self.actions):
            choices = ", ".join(f"{index} {text!r}" for index, text in enumerate(self.actions))
            raise ValueError(f"no such action: {action!r}. An action is an integer, one of: {choices}")
        return int(action)

    def _end_step(self, ended: bool) -> None:
        """Called at the end of every `step`."""
        self._running = not ended
        if self.render_mode == "human":
            self.render()

    @staticmethod
    def _check_options(options: Any, allowed: Sequence[str]) -> Mapping[str, Any]:
        if options is None:
            return {}
        if not isinstance(options, Mapping) or not set(options) <= set(allowed):
            raise ValueError(f"reset options must be a dict with only the keys {list(allowed)}, not {options!r}")
        return options
