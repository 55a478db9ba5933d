"""What the four games share: the picture as observation, render modes, and refusing what makes no sense."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from .canvas import SIZE, Picture, in_terminal


class PictureEnv(gym.Env[Any, Any]):
    """A game with a discrete action whose state is drawn as a 300×300 RGB picture.

    A subclass sets `actions` and `action_space`, and implements `picture()`, `step_limit` and gymnasium's `reset` and
    `step`.
    """

    metadata: dict[str, Any] = {"render_modes": ["human", "rgb_array"], "render_fps": 4}  # noqa: RUF012

    actions: tuple[str, ...]
    """The text of each action, by its index."""

    def __init__(self, render_mode: str | None = None) -> None:
        modes = self.metadata["render_modes"]
        if render_mode is not None and render_mode not in modes:
            raise ValueError(f"unknown render_mode {render_mode!r}: choose one of {modes} or None")
        self.render_mode = render_mode
        self.observation_space = self._space()
        self._running = False
        self._has_state = False

    def __getstate__(self) -> dict[str, Any]:
        # The bounds of the pixels alone are more than a megabyte; a checkpoint needs the state of the game only.
        return {name: value for name, value in vars(self).items() if name != "observation_space"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.observation_space = self._space()

    def _space(self) -> spaces.Space[Any]:
        return spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)

    @property
    def step_limit(self) -> int:
        """The most steps that an episode can have by the rules of the game."""
        raise NotImplementedError

    def picture(self) -> Picture:
        """The current state as a new uint8 array, (300, 300, 3)."""
        raise NotImplementedError

    def render(self) -> Any:
        """`"rgb_array"`: the picture. `"human"`: prints it to a colour terminal of 96 columns."""
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
        """The end of every `reset`."""
        self._running = self._has_state = True
        if self.render_mode == "human":
            self.render()

    def _check_step(self, action: Any) -> int:
        """The beginning of every `step`: the action as a plain int."""
        if not self._running:
            raise ValueError("the episode is over or was never begun: call reset() before step()")
        if isinstance(action, np.ndarray) and action.shape == ():
            action = action[()]
        is_index = isinstance(action, (int, np.integer)) and not isinstance(action, bool)
        if not is_index or not 0 <= action < len(self.actions):
            choices = ", ".join(f"{index} {text!r}" for index, text in enumerate(self.actions))
            raise ValueError(f"no such action: {action!r}. An action is an integer, one of: {choices}")
        return int(action)

    def _end_step(self, ended: bool) -> None:
        """The end of every `step`."""
        self._running = not ended
        if self.render_mode == "human":
            self.render()

    @staticmethod
    def _check_options(options: Any, allowed: Sequence[str]) -> Mapping[str, Any]:
        if options is None:
            return {}
        if not isinstance(options, Mapping) or not set(options) <= set(allowed):
            raise ValueError(f"reset options must be a dict with no keys but {list(allowed)}, not {options!r}")
        return options
