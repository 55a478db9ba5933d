"""MiniGrid and BabyAI levels with the bot's next action in `info`. Needs `pip install "trl-gtr[minigrid]"`."""

from __future__ import annotations

import contextlib
import io
from typing import Any, SupportsFloat

import gymnasium as gym
from minigrid.core.grid import Grid
from minigrid.minigrid_env import MiniGridEnv

from ..rendered import RenderedObservation
from .minigrid_bot import Guide, can_guide, name_of

VIEWS = ("partial", "full")
DIRECTIONS = ("right", "down", "left", "up")
_PICTURE_SIDE, _SMALLEST_TILE, _LARGEST_TILE = 304, 8, 32
_SCENERY = ("wall", "floor")


class GuidedLevel(gym.Wrapper, gym.utils.RecordConstructorArgs):
    """A MiniGrid or BabyAI level, what its picture shows in words, and the next action of BabyAI's bot.

    The bot is told every action that is really taken, so it also advises an agent that goes its own way.

    ## Description
    `make_level("BabyAI-GoToObj-v0")` makes the level with its picture as the observation. Nearly every level
    works that has BabyAI's instructions, a goal square, or a mission "pick up the red box".

    ## Observation
    The picture: the 7×7 squares in front of the agent, who stands in the middle of the lowest row and faces up
    (`view="partial"`), or the whole level (`view="full"`).

    ## Actions
    `Discrete(7)`, MiniGrid's own: 0 left, 1 right, 2 forward, 3 pickup, 4 drop, 5 toggle, 6 done (does nothing).

    ## Rewards
    On success 1 − 0.9 · steps / `max_steps`, otherwise 0.

    ## Episode end
    Terminated by success, by lava, and by breaking the instructions' order. Truncated after `max_steps`.

    ## Information
    - `mission`: what to do.
    - `carrying`: what the agent carries, or `"nothing"`.
    - `player`, `facing`: the agent's row and column in the picture, and where it faces there.
    - `ahead`: what is on the square in front of the agent; `"nothing"` if it is free.
    - `objects`: everything in the picture except walls, as `[row, column, name]`. Rows and columns count from 1.
    - `expert`: the bot's next action, or `None` if it has no plan; `plan`: what it is for.
    """

    def __init__(self, env: gym.Env, view: str = "partial") -> None:
        gym.utils.RecordConstructorArgs.__init__(self, view=view)
        super().__init__(env)
        if not isinstance(env.unwrapped, MiniGridEnv):
            raise ValueError(f"{env} is not a MiniGrid or BabyAI level")
        self.level: MiniGridEnv = env.unwrapped
        self.view = view
        self.guide: Guide | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        with contextlib.redirect_stdout(io.StringIO()):  # BabyAI prints every level that it draws and rejects
            observation, info = self.env.reset(seed=seed, options=options)
        if not can_guide(self.level):
            raise ValueError(
                f"BabyAI's bot can't play {self.level}, whose mission is {self.level.mission!r}: play it without an "
                "expert, as the task gym:ID"
            )
        self.guide = Guide(self.level, see_all=self.view == "full")
        return observation, self._with_words(info)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        if self.guide is None:
            raise RuntimeError("call reset() before step()")
        observation, reward, terminated, truncated, info = self.env.step(action)
        if not terminated:
            self.guide.told(int(action))
        return observation, float(reward), terminated, truncated, self._with_words(info)

    def _with_words(self, info: dict[str, Any]) -> dict[str, Any]:
        assert self.guide is not None
        planned = self.guide.action
        told = {
            "mission": self.level.mission,
            "carrying": name_of(self.level.carrying),
            "ahead": name_of(self.level.grid.get(*self.level.front_pos)),
            "expert": None if planned is None else int(planned),
            "plan": self.guide.plan,
        }
        return {**info, **told, **self._picture_in_words()}

    def _picture_in_words(self) -> dict[str, Any]:
        if self.view == "full":
            grid, facing = self.level.grid, DIRECTIONS[self.level.agent_dir]
            column, row = (int(place) for place in self.level.agent_pos)
        else:
            grid, _ = self.level.gen_obs_grid()  # without what the agent can't see
            column, row, facing = grid.width // 2, grid.height - 1, "up"
            grid.set(column, row, None)  # what it carries is drawn here
        return {"player": [row + 1, column + 1], "facing": facing, "objects": _objects(grid)}


def _objects(grid: Grid) -> list[list[Any]]:
    squares = [(row, column) for row in range(grid.height) for column in range(grid.width)]
    things = [(row, column, grid.get(column, row)) for row, column in squares]
    return [
        [row + 1, column + 1, name_of(thing)]
        for row, column, thing in things
        if thing is not None and thing.type not in _SCENERY
    ]


def make_level(env_id: str, view: str = "partial", **options: Any) -> gym.Env:
    """A level as a picture. `options` are the level's own, e.g. `max_steps=64` or `agent_view_size=5`."""
    if view not in VIEWS:
        raise ValueError(f"view must be 'partial' or 'full', not {view!r}")
    try:
        env = gym.make(env_id, disable_env_checker=True, render_mode="rgb_array", **options)
    except gym.error.UnregisteredEnv as error:
        raise ValueError(f"there is no level {env_id!r}: {error}") from error
    guided = GuidedLevel(env, view)
    level = guided.level
    level.agent_pov, level.highlight = view == "partial", False
    if "tile_size" not in options:
        level.tile_size = _tile_size(level, view)
    return RenderedObservation(guided)


def _tile_size(level: MiniGridEnv, view: str) -> int:
    """Pixels a square: the picture has about 300, however large the level."""
    squares = level.agent_view_size if view == "partial" else max(level.width, level.height)
    return max(_SMALLEST_TILE, min(_LARGEST_TILE, _PICTURE_SIDE // squares))
