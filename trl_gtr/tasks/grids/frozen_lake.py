"""The FrozenLake task: find yourself, the goal and the holes in the picture, then walk around the holes.

{"player": "1,1", "goal": "4,4", "holes": ["2,2", "2,4", "3,4", "4,1"], "thoughts": "From 1,1 the
shortest way to 4,4 starts down, so I go down.", "action": "down"}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from ... import environments  # noqa: F401  registers the games
from ...environments.grids.frozen_lake import SPLITS, FrozenLakeMapsEnv
from ...environments.grids.tabular import GAMMA, action_values, best_actions
from ...environments.rendered import RenderedObservation
from ...responses.format import Field
from ..base import Rubric
from .base import GridTask, Reading
from .words import read_position, write_position, write_positions

ENV_ID = "trl_gtr/FrozenLake-v0"

PROMPT = """\
You are crossing a frozen lake. The picture shows you, the ice, holes in it (dark squares) and the goal.
Goal: reach the goal without falling into a hole.{slippery}
Positions are "row,column", counted from 1 in the upper left corner.
Allowed actions: {{moves}}
{{instructions}}"""
SLIPPERY = " The ice is slippery: a move goes to its left or to its right as often as straight on."
REASON = "From {player} the {kind} way to {goal} starts {move}, so I go {move}."

RUBRIC = Rubric(
    role="You judge one step of an agent that crosses a frozen lake.",
    questions={
        "positions": "At which row and column are the agent, the goal and each hole, and did the agent read all of "
        "them right?",
        "way": "Which squares does a shortest safe way to the goal cross?",
        "move": "Does the agent's move follow such a way?",
    },
    advice="Rows and columns are counted from 1 in the upper left corner. A hole ends the game. If the agent was told "
    "that the ice is slippery, a move that can't slip into a hole may be better than one straight to the goal.",
)


class FrozenLakeTask(GridTask):
    """The task around `trl_gtr/FrozenLake-v0`: a new map for every episode. Stateless.

    Args:
        split: Which random maps to play: `train`, `unseen` (a quarter of all maps, for evaluation) or `all`.
        env_kwargs: Options of the environment, e.g. `{"size": 8, "is_slippery": true}`.
        thoughts: Ask for thoughts; false trains actions alone.
    """

    name = "frozen_lake"
    rubric = RUBRIC
    moves = FrozenLakeMapsEnv.actions
    fields = (
        Field("player", "text", 'your position, e.g. "2,3"'),
        Field("goal", "text", "the position of the goal"),
        Field("holes", "list", "the position of every hole"),
    )

    def __init__(
        self, *, split: str = "all", env_kwargs: Mapping[str, Any] | None = None, thoughts: bool = True
    ) -> None:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}.")
        self.split = split
        self.options = {} if split == "all" else {"split": split}
        self.slippery = bool((env_kwargs or {}).get("is_slippery", False))
        self.template = PROMPT.format(slippery=SLIPPERY if self.slippery else "")
        super().__init__(env_kwargs=env_kwargs, thoughts=thoughts)

    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        options = {"render_mode": "rgb_array", "split": self.split, **self.env_kwargs}
        return RenderedObservation(gym.make(ENV_ID, disable_env_checker=True, **options))

    def reading(self, info: Mapping[str, Any]) -> Reading:
        lines = info["map"]
        found: dict[str, list[tuple[int, int]]] = {sign: [] for sign in "SFHG"}
        for row, line in enumerate(lines, start=1):
            for column, sign in enumerate(line, start=1):
                found[sign].append((row, column))
        row, column = divmod(int(info["observation"]), len(lines[0]))
        return {
            "player": write_position((row + 1, column + 1)),
            "goal": write_position(found["G"][0]),
            "holes": write_positions(found["H"]),
        }

    def best_moves(self, info: Mapping[str, Any]) -> Sequence[str]:
        values = _values(tuple(info["map"]), self.slippery)[int(info["observation"])]
        return [self.moves[action] for action in best_actions(values)] if values.max() > 0 else []

    def reason(self, info: Mapping[str, Any], move: str) -> str:
        kind = "safest" if self.slippery else "shortest"
        return REASON.format(kind=kind, move=move, **self.reading(info))

    def believed_info(self, fields: Mapping[str, Any], public_state: Mapping[str, Any]) -> dict[str, Any]:
        """The map if player, goal and holes are where the thought sees them."""
        size = self.env_kwargs.get("map") or ["F" * self.env_kwargs.get("size", 4)] * self.env_kwargs.get("size", 4)
        rows, columns = len(size), len(size[0])
        player, goal = read_position(fields.get("player")), read_position(fields.get("goal"))
        holes = [read_position(hole) for hole in fields.get("holes") or []]
        places = [player, goal, *holes]
        if any(each is None or not (1 <= each[0] <= rows and 1 <= each[1] <= columns) for each in places):
            raise ValueError(f"positions are row,column from 1,1 to {rows},{columns}")
        if player == goal or player in holes or goal in holes:
            raise ValueError("player, goal and holes are on different squares")
        signs = {player: "S", goal: "G", **dict.fromkeys(holes, "H")}
        lines = [
            "".join(signs.get((row, column), "F") for column in range(1, columns + 1)) for row in range(1, rows + 1)
        ]
        assert player is not None
        return {"map": lines, "observation": (player[0] - 1) * columns + player[1] - 1}

    def difficulty(self, info: Mapping[str, Any]) -> str:
        """Moves to the goal along the shortest safe way, on ice that isn't slippery."""
        best = _values(tuple(info["map"]), False)[int(info["observation"])].max()
        return f"distance {round(float(np.log(best) / np.log(GAMMA))) + 1:02d}" if best > 0 else "no way"


@lru_cache(maxsize=1024)
def _values(lines: tuple[str, ...], slippery: bool) -> np.ndarray:
    """Action values of every square of a map."""
    return action_values(FrozenLakeEnv(desc=list(lines), is_slippery=slippery).P)
