"""The CliffWalking task: find yourself in the picture and walk along the cliff without falling.

{"player": "4,1", "goal": "4,12", "thoughts": "From 4,1 the way to 4,12 starts up, so I go up.", "action": "up"}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.toy_text.cliffwalking import CliffWalkingEnv

from ...environments.grids.tabular import action_values, best_actions
from ...environments.rendered import RenderedObservation
from ...responses.format import Field
from ...types import Transition
from ..base import Rubric
from .base import GridTask, Reading
from .words import read_position, write_position

ENV_ID = "CliffWalking-v1"
MAX_STEPS, MAX_SLIPPERY_STEPS = 60, 200
"""gymnasium sets no limit. The shortest way takes 13 moves; on slippery ground the best way takes about 60."""
FALL = -100

PROMPT = """\
You are walking along a cliff. The picture shows a grid of {rows} rows and {columns} columns, you, and the goal (G).
Goal: reach the goal in as few moves as possible. The brown squares between start (S) and goal are the cliff: whoever \
steps on it falls and starts again.{slippery}
Positions are "row,column", counted from 1 in the upper left corner.
Allowed actions: {{moves}}
{{instructions}}"""
SLIPPERY = " The ground is slippery: a move goes to its left or to its right as often as straight on."

RUBRIC = Rubric(
    role="You judge one step of an agent that walks along a cliff to reach a goal.",
    questions={
        "positions": "At which row and column are the agent and the goal, and did it read both right?",
        "move": "Does the agent's move follow a shortest way to the goal that avoids the cliff?",
    },
    advice="Rows and columns are counted from 1 in the upper left corner. Stepping on the cliff costs 100 and leads "
    "back to the start.",
)


class CliffWalkingTask(GridTask):
    """The task around gymnasium's `CliffWalking-v1`. Stateless.

    Args:
        env_kwargs: Options of the environment: `is_slippery`, and `max_episode_steps` (60, or 200 if slippery).
        thoughts: Ask for thoughts; false trains actions alone.
    """

    name = "cliff_walking"
    rubric = RUBRIC
    reward_scale = 1 / 100
    moves = ("up", "right", "down", "left")
    fields = (
        Field("player", "text", 'your position, e.g. "2,3"'),
        Field("goal", "text", "the position of the goal"),
    )

    def __init__(self, *, env_kwargs: Mapping[str, Any] | None = None, thoughts: bool = True) -> None:
        self.slippery = bool((env_kwargs or {}).get("is_slippery", False))
        rows, columns = _world(self.slippery)[1]
        self.template = PROMPT.format(rows=rows, columns=columns, slippery=SLIPPERY if self.slippery else "")
        super().__init__(env_kwargs=env_kwargs, thoughts=thoughts)

    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        limit = MAX_SLIPPERY_STEPS if self.slippery else MAX_STEPS
        options = {"max_episode_steps": limit, **self.env_kwargs}
        return RenderedObservation(gym.make(ENV_ID, disable_env_checker=True, render_mode="rgb_array", **options))

    def reading(self, info: Mapping[str, Any]) -> Reading:
        rows, columns = _world(self.slippery)[1]
        row, column = divmod(int(info["observation"]), columns)
        return {"player": write_position((row + 1, column + 1)), "goal": write_position((rows, columns))}

    def best_moves(self, info: Mapping[str, Any]) -> Sequence[str]:
        return [self.moves[action] for action in best_actions(_world(self.slippery)[0][int(info["observation"])])]

    def reason(self, info: Mapping[str, Any], move: str) -> str:
        reading = self.reading(info)
        return f"From {reading['player']} the way to {reading['goal']} starts {move}, so I go {move}."

    def believed_info(self, fields: Mapping[str, Any], public_state: Mapping[str, Any]) -> dict[str, Any]:
        rows, columns = _world(self.slippery)[1]
        player = read_position(fields.get("player"))
        if player is None or not (1 <= player[0] <= rows and 1 <= player[1] <= columns):
            raise ValueError(f"positions are row,column from 1,1 to {rows},{columns}")
        if player[0] == rows and player[1] > 1:
            raise ValueError("nobody stands on the cliff or, before the end, on the goal")
        return {"observation": (player[0] - 1) * columns + player[1] - 1}

    def success(self, transitions: Sequence[Transition]) -> bool:
        """Whether the goal was reached: the only way an episode terminates."""
        return bool(transitions) and transitions[-1].terminated

    def metrics(self, transitions: Sequence[Transition]) -> dict[str, float]:
        """`falls`: how often the agent stepped on the cliff."""
        return {"falls": float(sum(transition.reward <= FALL for transition in transitions))}

    def difficulty(self, info: Mapping[str, Any]) -> str:
        return "slippery" if self.slippery else "dry"


@lru_cache(maxsize=2)
def _world(slippery: bool) -> tuple[np.ndarray, tuple[int, int]]:
    """Action values of every square, and the numbers of rows and columns."""
    cliff = CliffWalkingEnv(is_slippery=slippery)
    return action_values(cliff.P), cliff.shape
