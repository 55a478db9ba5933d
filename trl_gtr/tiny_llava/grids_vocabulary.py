"""The grid model's vocabulary: FrozenLake's prompts, positions on a 4×4 map, and the fixed parts of its responses."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ..tasks import Task, make_task
from ..tasks.grids.frozen_lake import REASON
from ..tasks.grids.words import write_position
from .vocabulary import BLANK

SIZE = 4


def pieces() -> list[str]:
    """All single-token parts, without duplicates, in a fixed order."""
    found: dict[str, None] = {}
    for thoughts in (True, False):
        task = make_task("frozen_lake", thoughts=thoughts)
        found |= dict.fromkeys([task.prompt(None, {}), *response_parts(task), *task.legal_actions({})])
    found |= dict.fromkeys(write_position(square) for square in product(range(1, SIZE + 1), range(1, SIZE + 1)))
    return [piece for piece in found if len(piece) > 1]


def response_parts(task: Task) -> Iterator[str]:
    """The text between positions and moves in the expert's responses. The action key starts a new part."""
    sentence = REASON.format(player=BLANK, goal=BLANK, kind="shortest", move=BLANK)
    for holes in ([], [BLANK, BLANK]):
        values = {"player": BLANK, "goal": BLANK, "holes": holes, "thoughts": sentence}
        thought = {field.key: values[field.key] for field in task.format.fields}
        before_action = task.format.render_thought(thought)
        yield from before_action.split(BLANK)
        yield from task.format.render(thought, BLANK)[len(before_action) :].split(BLANK)
