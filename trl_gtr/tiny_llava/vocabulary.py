"""The tiny model's vocabulary: single bytes, and the fixed parts of prompts and responses as one token each.

A Points24 prompt, for example, is one token for its beginning, the formula symbol by symbol, and one token for the
rest. The parts are extracted from the tasks' own prompts, formats and sentences, so they always match. Any other text
is encoded byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..tasks import Task, blackjack, make_task, number_line
from ..tasks.points import thoughts as points_thoughts
from . import CARD_GAMES

BLANK = "987654321"
"""Placeholder for the variable parts of a response; valid as text and as a number, so that it fits every field."""
# Fillers longer than one character.
NUMBERS = tuple(str(number) for number in range(10, 22))
WORDS = ("below", "above", "up", "down", "soft ", *blackjack.ACTIONS)


def pieces() -> list[str]:
    """All single-token parts, without duplicates, in a fixed order."""
    found: dict[str, None] = {}
    for name in CARD_GAMES:
        for thoughts in (True, False):
            task = make_task(name, thoughts=thoughts)
            found |= dict.fromkeys([*prompt_parts(task), *response_parts(task)])
    found |= dict.fromkeys((*NUMBERS, *WORDS))
    return [piece for piece in found if len(piece) > 1]


def prompt_parts(task: Task) -> list[str]:
    """The text common to all prompts of a task: everything except the formula, if there is one."""
    return task.prompt(None, {"Formula": [BLANK]}).split(BLANK)


def response_parts(task: Task) -> Iterator[str]:
    """The text between the blanks in the expert's responses. The action key starts a new part."""
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
