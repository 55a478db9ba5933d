"""The task of MiniGrid and BabyAI levels: see what is around, then do what the mission says.

{"ahead": "nothing", "objects": ["red ball at 3,4"], "thoughts": "I want to go to the red ball, so I go forward.",
"action": "go forward"}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium as gym

from ...responses.format import Field
from ..base import Rubric
from .base import GridTask, Reading
from .words import settled_move, write_position

LEVEL = "BabyAI-GoToObj-v0"
VIEWS = ("partial", "full")
_INSTALL = 'MiniGrid and BabyAI levels need a package that is not installed: pip install "trl-gtr[minigrid]"'

START = "You are an agent in a grid world. Your mission: {mission}. You carry {carrying}.\n"
PROMPT = """\
{picture}
"turn left" and "turn right" turn you where you stand. "go forward" takes you to the next square if it is free. \
"pick up" takes the object on the square in front of you if you carry nothing. "drop" puts what you carry on that \
square if it is free. "toggle" opens or closes a door there; a locked door needs a key of its color in your hands.
Positions are "row,column", counted from 1 in the upper left corner of the picture.
Allowed actions: {{moves}}
{{instructions}}"""
PICTURES = {
    "partial": "The picture shows the squares in front of you. You are the red triangle in the middle of the lowest "
    "row, facing up; your left and right are the picture's. Black squares are out of sight.",
    "full": "The picture shows all squares from above. You are the red triangle, facing where it points.",
}
REASON = "I want to {plan}, so I {move}."
# The moves as the expert's sentences say them, where that differs.
SAID = {"pick up": "pick it up", "drop": "drop it", "toggle": "toggle it"}
_NAMES = re.compile(
    r"""\b(?:(?P<turn_left>(?:turn|rotat|go|mov|fac|look)(?:e|ing|ning)?\ (?:to\ (?:the|my)\ )?left|left\ turn)
    |(?P<turn_right>(?:turn|rotat|go|mov|fac|look)(?:e|ing|ning)?\ (?:to\ (?:the|my)\ )?right|right\ turn)
    |(?P<go_forward>(?:(?:go|mov|walk|step|keep|continu)(?:e|ing)?\ )?(?:straight\ )?(?:forwards?|straight\ on))
    |(?P<pick_up>pick(?:ing)?(?:\ (?:it|(?:the|a|this)(?:\ \w+){1,2}))?\ ?up)
    |(?P<drop>drop(?:ping)?|put(?:ting)?\ (?:it|the(?:\ \w+){1,2})\ down)
    |(?P<toggle>toggl(?:e|ing)|(?:unlock|open|clos)(?:e|ing)?\ (?:it|the)))\b""",
    re.IGNORECASE | re.VERBOSE,
)
_VERBS = ("go to", "pick up", "open", "put")

RUBRIC = Rubric(
    role="You judge one step of an agent in a grid world: it turns, walks, and moves objects.",
    questions={
        "objects": "Which objects and doors does the picture show, on which row and column, and did the agent read "
        "them right?",
        "ahead": "What is on the square in front of the agent, and did the agent see that?",
        "plan": "What has to be done next for the mission? If it depends on something out of sight, where should the "
        "agent look?",
        "move": "Does the agent's action do that, or bring it closer?",
    },
    advice="Rows and columns are counted from 1 in the upper left corner. The agent is the red triangle and faces "
    "where its tip points. It can't walk through walls, objects or closed doors, and it can carry one object at a "
    "time. A locked door is filled with a dark shade of its color and has a key slot; it opens with a key of that "
    "color. A closed door has a round handle, an open one is a narrow strip.",
)


class MiniGridTask(GridTask):
    """The task around MiniGrid's and BabyAI's levels. Stateless.

    The expert is BabyAI's bot. In the partial view it knows only what the agent has seen in this episode.

    Args:
        level: The level's id: one with BabyAI's instructions, a goal square, or an object to pick up.
        view: `partial`, the squares in front of the agent, or `full`, the whole level.
        env_kwargs: Options of the level, e.g. `{"max_steps": 64}`.
        thoughts: Ask for thoughts; false trains actions alone.
    """

    name = "minigrid"
    rubric = RUBRIC
    moves = ("turn left", "turn right", "go forward", "pick up", "drop", "toggle")
    named_move = staticmethod(partial(settled_move, names=_NAMES))

    def __init__(
        self,
        *,
        level: str = LEVEL,
        view: str = "partial",
        env_kwargs: Mapping[str, Any] | None = None,
        thoughts: bool = True,
    ) -> None:
        if view not in VIEWS:
            raise ValueError(f"view must be one of {', '.join(VIEWS)}, not {view!r}.")
        self.level, self.view = level, view
        self.options = {"level": level, "view": view}
        own = (
            Field("player", "text", 'your position, e.g. "2,3"'),
            Field("facing", "text", "up, down, left or right"),
        )
        self.fields = (
            *(own if view == "full" else ()),
            Field("ahead", "text", 'what is on the square in front of you, e.g. "nothing", "wall", "red ball"'),
            Field("objects", "list", 'every object and door in the picture, e.g. "red ball at 2,3"'),
        )
        self.template = PROMPT.format(picture=PICTURES[view])
        super().__init__(env_kwargs=env_kwargs, thoughts=thoughts)

    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        try:
            from ...environments.grids.minigrid import make_level
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] != "minigrid":
                raise
            raise ImportError(_INSTALL) from error
        return make_level(self.level, self.view, **self.env_kwargs)

    def prompt(self, observation: Any, info: Mapping[str, Any]) -> str:
        return START.format(mission=info["mission"], carrying=_carried(info)) + super().prompt(observation, info)

    def earlier_prompt(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Without the rules and instructions, which stay the same."""
        return START.format(mission=info["mission"], carrying=_carried(info)).strip()

    def public_state(self, info: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().public_state(info), "mission": info["mission"], "carrying": info["carrying"]}

    def reading(self, info: Mapping[str, Any]) -> Reading:
        found = {
            "player": write_position(info["player"]),
            "facing": info["facing"],
            "ahead": info["ahead"],
            "objects": [f"{name} at {write_position((row, column))}" for row, column, name in info["objects"]],
        }
        return {key: found[key] for key in self.reading_parts}

    def best_moves(self, info: Mapping[str, Any]) -> Sequence[str]:
        """The bot's next move; empty if it has no plan."""
        return [] if info["expert"] is None else [self.moves[info["expert"]]]

    def reason(self, info: Mapping[str, Any], move: str) -> str:
        return REASON.format(plan=info["plan"], move=SAID.get(move, move))

    def solvable(self, info: Mapping[str, Any]) -> bool:
        """Always true: a bot without a plan doesn't mean that there is none."""
        return True

    def difficulty(self, info: Mapping[str, Any]) -> str:
        """What the mission asks for, by its verb; `several` for more than one thing."""
        mission = info["mission"]
        if re.search(r", then| and | after you ", mission):
            return "several"
        return next(
            (verb for verb in ("go to", "pick up", "open", "put") if mission.startswith(verb)), "reach the goal"
        )

    def describe_start(self, info: Mapping[str, Any]) -> dict[str, str]:
        return {"mission": info["mission"]}


def _carried(info: Mapping[str, Any]) -> str:
    carried = str(info["carrying"])
    return carried if carried == "nothing" else f"the {carried}"
