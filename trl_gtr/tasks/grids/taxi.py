"""The Taxi task: find taxi, passenger and destination in the picture, fetch the passenger and drive there.

{"taxi": "4,1", "passenger": "blue", "destination": "yellow", "thoughts": "The passenger waits at blue, so I drive
up.", "action": "up"}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.toy_text.taxi import TaxiEnv

from ...environments.grids.tabular import action_values, best_actions
from ...environments.rendered import RenderedObservation
from ...responses.format import Field
from ..base import Rubric
from .base import GridTask, Reading
from .words import read_position, write_position

ENV_ID = "Taxi-v4" if "Taxi-v4" in gym.registry else "Taxi-v3"
PADS = ("red", "green", "yellow", "blue")
IN_TAXI = "in taxi"

PROMPT = """\
You are driving a taxi. The picture shows a grid of 5 rows and 5 columns with walls, four coloured pads, a passenger \
and your taxi. The pad with the mark around it is the destination.
Goal: drive to the passenger, pick them up, drive to the destination and drop them off there. You can't drive through \
walls.{rainy}
Positions are "row,column", counted from 1 in the upper left corner of the grid.
Allowed actions: {{moves}}
{{instructions}}"""
RAINY = " It rains: a move may slide to its left or right."

RUBRIC = Rubric(
    role="You judge one step of an agent that drives a taxi.",
    questions={
        "positions": "Where are taxi, passenger and destination, and did the agent read all three right?",
        "aim": "Does the taxi have to go to the passenger first, or, with the passenger aboard, to the destination?",
        "move": "Does the agent's action follow a shortest way there, or pick up or drop off at the right place?",
    },
    advice="Rows and columns are counted from 1 in the upper left corner of the grid. The passenger waits at one of "
    'four pads (red, green, yellow, blue) or is "in taxi". Thick lines are walls.',
)


class TaxiTask(GridTask):
    """The task around gymnasium's Taxi. Stateless.

    Args:
        env_kwargs: Options of the environment, e.g. `{"is_rainy": true}`.
        thoughts: Ask for thoughts; false trains actions alone.
    """

    name = "taxi"
    rubric = RUBRIC
    reward_scale = 1 / 20
    moves = ("down", "up", "right", "left", "pickup", "dropoff")
    fields = (
        Field("taxi", "text", 'the taxi\'s position, e.g. "2,3"'),
        Field("passenger", "text", "red, green, yellow, blue or in taxi"),
        Field("destination", "text", "red, green, yellow or blue"),
    )

    def __init__(self, *, env_kwargs: Mapping[str, Any] | None = None, thoughts: bool = True) -> None:
        self.rainy = bool((env_kwargs or {}).get("is_rainy", False))
        self.template = PROMPT.format(rainy=RAINY if self.rainy else "")
        super().__init__(env_kwargs=env_kwargs, thoughts=thoughts)

    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        return RenderedObservation(
            gym.make(ENV_ID, disable_env_checker=True, render_mode="rgb_array", **self.env_kwargs)
        )

    def reading(self, info: Mapping[str, Any]) -> Reading:
        row, column, passenger, destination = _decode(int(info["observation"]))
        return {
            "taxi": write_position((row + 1, column + 1)),
            "passenger": (*PADS, IN_TAXI)[passenger],
            "destination": PADS[destination],
        }

    def best_moves(self, info: Mapping[str, Any]) -> Sequence[str]:
        probability = self.env_kwargs.get("rainy_probability", 0.8) if self.rainy else None
        return [self.moves[action] for action in best_actions(_values(probability)[int(info["observation"])])]

    def reason(self, info: Mapping[str, Any], move: str) -> str:
        reading = self.reading(info)
        aboard = reading["passenger"] == IN_TAXI
        if move == "pickup":
            return f"The passenger waits here at {reading['passenger']}, so I pick up."
        if move == "dropoff":
            return f"The passenger wants to go to {reading['destination']} and we are there, so I drop off."
        if aboard:
            return f"The passenger is in the taxi and wants to go to {reading['destination']}, so I drive {move}."
        return f"The passenger waits at {reading['passenger']}, so I drive {move}."

    def believed_info(self, fields: Mapping[str, Any], public_state: Mapping[str, Any]) -> dict[str, Any]:
        taxi = read_position(fields.get("taxi"))
        words = [str(fields.get(key)).strip().casefold() for key in ("passenger", "destination")]
        if taxi is None or not (1 <= taxi[0] <= 5 and 1 <= taxi[1] <= 5):
            raise ValueError("the taxi's position is row,column from 1,1 to 5,5")
        if words[0] not in (*PADS, IN_TAXI) or words[1] not in PADS or words[0] == words[1]:
            raise ValueError("passenger and destination are different colours, or the passenger is in the taxi")
        passenger, destination = (*PADS, IN_TAXI).index(words[0]), PADS.index(words[1])
        return {"observation": ((5 * (taxi[0] - 1) + taxi[1] - 1) * 5 + passenger) * 4 + destination}

    def difficulty(self, info: Mapping[str, Any]) -> str:
        """How far the passenger wants to go: whether start and destination are on the same side."""
        _, _, passenger, destination = _decode(int(info["observation"]))
        return "same side" if {passenger, destination} in ({0, 2}, {1, 3}) else "other side"


def _decode(state: int) -> tuple[int, int, int, int]:
    """The taxi's row and column, the passenger's place (4: in the taxi) and the destination."""
    rest, destination = divmod(state, 4)
    rest, passenger = divmod(rest, 5)
    row, column = divmod(rest, 5)
    return row, column, passenger, destination


@lru_cache(maxsize=4)
def _values(rainy_probability: float | None) -> np.ndarray:
    """Action values of every state, without rain (`None`) or with it."""
    if rainy_probability is None:
        return action_values(TaxiEnv().P)
    return action_values(TaxiEnv(is_rainy=True, rainy_probability=rainy_probability).P)
