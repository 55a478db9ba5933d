"""The MiniGrid model's vocabulary: the prompts of both views, objects, positions, and the fixed parts of responses."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ..tasks import Task, make_task
from ..tasks.grids.minigrid import REASON, SAID, VIEWS
from ..tasks.grids.words import write_position
from .vocabulary import BLANK

SIZE = 7
COLORS = ("blue ", "green ", "grey ", "purple ", "red ", "yellow ")
OBJECTS = ("ball", "box", "key", "door", "open ", "closed ", "locked ", "goal", "wall", "nothing")
DIRECTIONS = ("up", "down", "left", "right")
PLANS = (
    *("go to the ", "find the ", "go next to the ", "pick up the ", "drop the ", "open the ", "close the "),
    *("step onto the goal", "next free square", "explore"),
)
MISSIONS = (
    *("go to a ", "pick up a ", "get to the green goal square", "reach the goal"),
    "use the key to open the door and then get to the goal",
)


def pieces() -> list[str]:
    """All single-token parts, without duplicates, in a fixed order."""
    found: dict[str, None] = {}
    for view, thoughts in product(VIEWS, (True, False)):
        task = make_task("minigrid", view=view, thoughts=thoughts)
        for carrying in ("nothing", BLANK):
            found |= dict.fromkeys(task.prompt(None, {"mission": BLANK, "carrying": carrying}).split(BLANK))
        found |= dict.fromkeys([*response_parts(task), *task.legal_actions({}), *SAID.values()])
    found |= dict.fromkeys((*COLORS, *OBJECTS, *DIRECTIONS, *PLANS, *MISSIONS))
    found |= dict.fromkeys(write_position(square) for square in product(range(1, SIZE + 1), range(1, SIZE + 1)))
    return [piece for piece in found if len(piece) > 1]


def response_parts(task: Task) -> Iterator[str]:
    """The text between objects, positions and moves in the expert's responses. The action key starts a new part."""
    for objects in ([], [f"{BLANK} at {BLANK}"] * 2):
        values = {"objects": objects, "thoughts": REASON.format(plan=BLANK, move=BLANK)}
        thought = {field.key: values.get(field.key, BLANK) for field in task.format.fields}
        before_action = task.format.render_thought(thought)
        yield from before_action.split(BLANK)
        yield from task.format.render(thought, BLANK)[len(before_action) :].split(BLANK)
