"""Any gymnasium environment with its rendered picture as the observation."""

from __future__ import annotations

import os
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import spaces

MIN_SIDE = 32
"""Smaller arrays are symbols, not pictures: MiniGrid encodes its 7×7 view as (7, 7, 3) bytes."""


def is_picture(space: spaces.Space[Any]) -> bool:
    """Whether observations of this space are RGB pictures."""
    return (
        isinstance(space, spaces.Box)
        and space.dtype == np.uint8
        and len(space.shape) == 3
        and space.shape[2] == 3
        and min(space.shape[:2]) >= MIN_SIDE
    )


class RenderedObservation(gym.Wrapper, gym.utils.RecordConstructorArgs):
    """Replaces the observation with the rendered picture and keeps the original in `info["observation"]`.

    The environment must have been made with `render_mode="rgb_array"`.
    """

    def __init__(self, env: gym.Env) -> None:
        # pygame's games open no window for `rgb_array`; without this, SDL complains where there is no display.
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        gym.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)
        env.reset()
        self.observation_space = spaces.Box(0, 255, self._picture().shape, np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._picture(), {**info, "observation": observation}

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._picture(), reward, terminated, truncated, {**info, "observation": observation}

    def _picture(self) -> np.ndarray:
        picture: Any = self.env.render()
        if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.shape[2:] != (3,):
            kind = f"{picture.dtype} {picture.shape}" if isinstance(picture, np.ndarray) else type(picture).__name__
            raise ValueError(
                f"render() of {self.env} must return a uint8 array of shape (height, width, 3), not {kind}: make the "
                'environment with render_mode="rgb_array".'
            )
        return picture
