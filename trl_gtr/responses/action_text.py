"""Match a text to an action exactly, apart from trivial differences in spelling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

QUOTES = "\"'`“”‘’"
# One character each, so that positions in the text don't change.
_SIGNS = str.maketrans({"−": "-", "–": "-", "×": "*", "✕": "*", "⋅": "*", "÷": "/", "∕": "/"})


def plain_signs(text: str) -> str:
    """Replace typographic signs (− × ÷) with ASCII ones (- * /)."""
    return text.translate(_SIGNS)


def match_action(text: str | None, legal: Sequence[str], *, signs: bool = False) -> int | None:
    """The index of the legal action named by `text`, or `None`.

    Case and surrounding whitespace and quotes are ignored. With `signs`, − × ÷ and the letter x (for *) are accepted.
    Otherwise the match is exact: "1" is not "10", and "drawer 1" is not "drawer 10".
    """
    if text is None:
        return None
    name = text.strip().strip(QUOTES).strip().casefold()
    if signs:
        name = "*" if name == "x" else plain_signs(name)
    return next((i for i, action in enumerate(legal) if action.casefold() == name), None)


def from_thoughts(read: Callable[[str], str | None], fields: Mapping[str, Any]) -> str | None:
    """Apply `read` to the thought's text; `None` if there is no text."""
    thoughts = fields.get("thoughts")
    return read(thoughts) if isinstance(thoughts, str) else None
