"""Which action does a text name? An exact match, apart from what is plainly the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

QUOTES = "\"'`“”‘’"
# One character each, so that positions in a text stay what they are.
_SIGNS = str.maketrans({"−": "-", "–": "-", "×": "*", "✕": "*", "⋅": "*", "÷": "/", "∕": "/"})


def plain_signs(text: str) -> str:
    """The text with typographic signs (− × ÷) as the ones on a keyboard (- * /)."""
    return text.translate(_SIGNS)


def match_action(text: str | None, legal: Sequence[str], *, signs: bool = False) -> int | None:
    """The index of the legal action that `text` names, or `None`.

    Case, white space and quotes around it don't matter. With `signs`, − × ÷ and the letter x (for *) are understood.
    Everything else must be equal: "1" is not "10", and "drawer 1" is not "drawer 10".
    """
    if text is None:
        return None
    name = text.strip().strip(QUOTES).strip().casefold()
    if signs:
        name = "*" if name == "x" else plain_signs(name)
    return next((i for i, action in enumerate(legal) if action.casefold() == name), None)


def from_thoughts(read: Callable[[str], str | None], fields: Mapping[str, Any]) -> str | None:
    """What `read` finds in a thought's words; `None` in a thought without any."""
    thoughts = fields.get("thoughts")
    return read(thoughts) if isinstance(thoughts, str) else None
