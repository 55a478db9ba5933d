"""The Sokoban task: find player, boxes and targets in the picture, then push every box home.

{"player": "3,3", "boxes": ["3,4"], "targets": ["3,5"], "thoughts": "I push the box at 3,4 to 3,5, so I go right.",
"action": "right"}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym

from ... import environments  # noqa: F401  registers the games
from ...environments.grids.sokoban_rooms import MOVES, Room, read_room
from ...environments.grids.sokoban_solver import best_moves, solve
from ...responses.format import Field
from ..base import Rubric
from .base import GridTask, Reading
from .words import write_position, write_positions

ENV_ID = "trl_gtr/Sokoban-v0"

PROMPT = """\
You are playing Sokoban. The picture shows a room from above: brick walls, stone floor, wooden boxes, targets (red \
rings) and you (in blue). A green box is on a target.
Goal: push every box onto a target. Walking into a box pushes it one square if the square behind it is free. Boxes \
can't be pulled, and a box in a corner is stuck.
Positions are "row,column", counted from 1 in the upper left corner, walls included.
Allowed actions: {moves}
{instructions}"""

RUBRIC = Rubric(
    role="You judge one step of an agent that plays Sokoban.",
    questions={
        "positions": "At which row and column are the player, each box and each target, and did the agent read all of "
        "them right?",
        "plan": "Which box should be pushed next, and to where?",
        "move": "Does the agent's move lead there on a shortest way, without getting a box stuck?",
    },
    advice="Rows and columns are counted from 1 in the upper left corner, walls included. Green boxes stand on "
    "targets. Boxes can be pushed, one at a time, but never pulled; a box in a corner without a target is lost.",
    solution_key="possible_solution",
)


class SokobanTask(GridTask):
    """The task around `trl_gtr/Sokoban-v0`. Stateless.

    Args:
        env_kwargs: Options of the environment, e.g. `{"size": 7, "boxes": 2}`.
        thoughts: Ask for thoughts; false trains actions alone.
        cut: End training episodes that can no longer be won.
    """

    name = "sokoban"
    rubric = RUBRIC
    reward_scale = 0.1
    moves = MOVES
    template = PROMPT
    fields = (
        Field("player", "text", 'your position, e.g. "2,3"'),
        Field("boxes", "list", "the position of every box"),
        Field("targets", "list", "the position of every target, also of those under a box or under you"),
    )

    def __init__(
        self, *, env_kwargs: Mapping[str, Any] | None = None, thoughts: bool = True, cut: bool = True
    ) -> None:
        super().__init__(env_kwargs=env_kwargs, thoughts=thoughts)
        self.cut = cut

    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        env = gym.make(ENV_ID, disable_env_checker=True, **self.env_kwargs)
        return DeadEndsEnd(env) if self.cut and not evaluation else env

    def reading(self, info: Mapping[str, Any]) -> Reading:
        room = read_room(info["Room"])
        return {
            "player": write_position(room.position(room.player)),
            "boxes": write_positions(map(room.position, room.boxes)),
            "targets": write_positions(map(room.position, room.plan.targets)),
        }

    def best_moves(self, info: Mapping[str, Any]) -> Sequence[str]:
        return best_moves(read_room(info["Room"]))

    def reason(self, info: Mapping[str, Any], move: str) -> str:
        room = read_room(info["Room"])
        here, there = _next_push(room, MOVES.index(move))
        if here == room.player + room.plan.steps[MOVES.index(move)]:
            return f"I push the box at {_at(room, here)} to {_at(room, there)}, so I go {move}."
        behind = _at(room, 2 * here - there)
        return f"I want to push the box at {_at(room, here)} to {_at(room, there)} from {behind}, so I go {move}."

    def difficulty(self, info: Mapping[str, Any]) -> str:
        boxes = len(read_room(info["Room"]).boxes)
        return f"{boxes} boxes" if boxes > 1 else "1 box"


class DeadEndsEnd(gym.Wrapper, gym.utils.RecordConstructorArgs):
    """Ends an episode when a box is stuck for good.

    The step costs 1 more. Sets `truncated`, `info["cut"]` and `info["bootstrap"] = False`, so that the advantages
    treat it as a terminal step.
    """

    def __init__(self, env: gym.Env) -> None:
        gym.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated or solve(read_room(info["Room"])) is not None:
            return observation, reward, terminated, truncated, info
        return observation, float(reward) - 1.0, False, True, {**info, "cut": "dead end", "bootstrap": False}


def _next_push(room: Room, move: int) -> tuple[int, int]:
    """The first push of the shortest solution that starts with this move: from which square to which."""
    for each in (move, *(solve(room.moved(move)) or ())):
        after = room.moved(each)
        if after.boxes != room.boxes:
            return next(iter(room.boxes - after.boxes)), next(iter(after.boxes - room.boxes))
        room = after
    raise ValueError("no push follows this move")


def _at(room: Room, square: int) -> str:
    return write_position(room.position(square))
