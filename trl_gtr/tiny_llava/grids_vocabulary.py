"""The grid model's vocabulary: FrozenLake's and MiniGrid's prompts, positions, objects, and parts of responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from ..tasks import Task, make_task
from ..tasks.grids import frozen_lake, minigrid
from ..tasks.grids.words import write_position
from .vocabulary import BLANK

SIZE = 7
"""Positions up to this row and column: FrozenLake's maps have 4×4 squares, MiniGrid's partial view 7×7."""
PLANS = ("go to the ", "find the ")
COLORS = ("red", "green", "blue", "purple", "yellow", "grey")
KINDS = (" ball", " box", " key")
AHEAD = ("nothing", "wall")
REST = ("forward",)  # of "so I go forward", whose beginning is FrozenLake's too


def pieces() -> list[str]:
    """All single-token parts, without duplicates, in a fixed order."""
    found: dict[str, None] = {}
    for name, thoughts in product(("frozen_lake", "minigrid"), (True, False)):
        task = make_task(name, thoughts=thoughts)
        prompt = task.prompt(None, {"mission": BLANK, "carrying": "nothing"})
        found |= dict.fromkeys([*prompt.split(BLANK), *response_parts(task), *task.legal_actions({})])
    found |= dict.fromkeys(write_position(square) for square in product(range(1, SIZE + 1), range(1, SIZE + 1)))
    found |= dict.fromkeys((*PLANS, *COLORS, *KINDS, *AHEAD, *REST))
    return [piece for piece in found if len(piece) > 1]


def response_parts(task: Task) -> Iterator[str]:
    """The text between positions, objects and moves in the expert's responses. The action key starts a new part."""
    for values in _readings(task):
        thought = {field.key: values[field.key] for field in task.format.fields}
        before_action = task.format.render_thought(thought)
        yield from before_action.split(BLANK)
        yield from task.format.render(thought, BLANK)[len(before_action) :].split(BLANK)


def _readings(task: Task) -> Sequence[Mapping[str, Any]]:
    """The expert's thoughts with blanks, with nothing in their lists and with two things."""
    if task.name == "minigrid":
        sentence, thing = minigrid.REASON.format(plan=BLANK, move=BLANK), f"{BLANK} at {BLANK}"
        return [{"ahead": BLANK, "objects": things, "thoughts": sentence} for things in ([], [thing, thing])]
    sentence = frozen_lake.REASON.format(player=BLANK, goal=BLANK, kind="shortest", move=BLANK)
    return [{"player": BLANK, "goal": BLANK, "holes": holes, "thoughts": sentence} for holes in ([], [BLANK, BLANK])]
