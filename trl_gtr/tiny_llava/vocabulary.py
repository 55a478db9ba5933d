"""The tiny model's vocabulary: single bytes, and the fixed parts of prompts and responses as one token each.

Whatever a task always says in the same words needs no spelling: a whole Points24 prompt is the begin of it, the
formula symbol by symbol, and the rest. The parts are cut out of the tasks' own prompts, formats and sentences, so that
they can't drift apart from them. Any other text is spelled byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..tasks import Task, blackjack, make_task, number_line
from ..tasks.points import thoughts as points_thoughts

GAMES = ("points24", "ezpoints", "number_line", "blackjack")
BLANK = "987654321"
"""Stands where a response varies; a text and a number at once, so that it fits every kind of field."""
# What fills the blanks by more than one character.
NUMBERS = tuple(str(number) for number in range(10, 22))
WORDS = ("below", "above", "up", "down", "soft ", *blackjack.ACTIONS)


def pieces() -> list[str]:
    """Every part that is one token, without repetition, always in the same order."""
    found: dict[str, None] = {}
    for name in GAMES:
        for thoughts in (True, False):
            task = make_task(name, thoughts=thoughts)
            found |= dict.fromkeys([*prompt_parts(task), *response_parts(task)])
    found |= dict.fromkeys((*NUMBERS, *WORDS))
    return [piece for piece in found if len(piece) > 1]


def prompt_parts(task: Task) -> list[str]:
    """What all prompts of a task have in common: all but the formula, where it has one."""
    return task.prompt(None, {"Formula": [BLANK]}).split(BLANK)


def response_parts(task: Task) -> Iterator[str]:
    """What stands between the blanks of the expert's responses. The action's key begins a part of its own."""
    for thoughts in _sentences(task):
        values: Mapping[str, Any] = {"thoughts": thoughts, "cards": [BLANK, BLANK]}
        thought = {field.key: values.get(field.key, BLANK) for field in task.format.fields}
        before_action = task.format.render_thought(thought)
        yield from before_action.split(BLANK)
        yield from task.format.render(thought, BLANK)[len(before_action) :].split(BLANK)


def _sentences(task: Task) -> Iterable[str]:
    frames: Sequence[str]
    if task.name == "number_line":
        frames = number_line.FRAMES
    elif task.name == "blackjack":
        frames = blackjack.FRAMES
    else:
        frames = [
            frame.replace("{target}", str(task.rules.target))  # type: ignore[attr-defined]
            for frame in (*points_thoughts.FRAMES, *points_thoughts.FIRST_FRAMES)
        ]
    names = ("aim", "formula", "symbol", "current", "target", "relation", "way", "action", "total", "dealer")
    return [frame.format(**dict.fromkeys(names, BLANK)) for frame in frames]
