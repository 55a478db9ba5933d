"""Positions and moves as agents write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ..choices import CHOSEN, NOT_CHOSEN, mentions, settle

_POSITION = re.compile(
    r"[(\[]?\s*(?:row\s*)?(\d{1,3})\s*[,;/ ]\s*(?:col(?:umn)?\s*)?(\d{1,3})\s*[)\]]?", re.IGNORECASE
)
# Words for the moves of all grid worlds. "The right move", "two are left" and "left of the box" are not moves.
_MOVES = re.compile(
    r"""\b(?:(?P<up>up(?:wards?)?|north(?:wards?)?)|(?P<down>down(?:wards?)?|south(?:wards?)?)
    |(?P<left>(?<!(?<!to\ )the\ )(?<!\bis\ )(?<!\bare\ )left(?!\ of\b)|west(?:wards?)?)
    |(?P<right>(?<!(?<!to\ )the\ )(?<!\bis\ )(?<!\bare\ )right(?!\ (?:of|now|next)\b)|east(?:wards?)?)
    |(?P<pickup>pick(?:ing)?(?:\ (?:the\ passenger|them|him|her|it))?\ ?up)
    |(?P<dropoff>drop(?:ping)?(?:\ (?:the\ passenger|them|him|her|it))?\ ?off))\b""",
    re.IGNORECASE | re.VERBOSE,
)
_NOT_CHOSEN = re.compile(NOT_CHOSEN, re.IGNORECASE | re.VERBOSE)
_CHOSEN = re.compile(
    rf"{CHOSEN}|\b(?:I|we)(?:['’]ll)?\ (?:(?:will|must|should|now|first|have\ to|need\ to)\ )*"
    r"(?:go|move|walk|push|drive|step)\ (?:\w+\ ){0,3}$",
    re.IGNORECASE | re.VERBOSE,
)


def write_position(position: tuple[int, int]) -> str:
    """Row and column, as the response format asks for them."""
    return f"{position[0]},{position[1]}"


def write_positions(positions: Iterable[tuple[int, int]]) -> list[str]:
    return [write_position(position) for position in sorted(positions)]


def read_position(text: Any) -> tuple[int, int] | None:
    """A position such as `2,3`, `(2, 3)` or `row 2, column 3`; `None` for anything else."""
    found = _POSITION.fullmatch(text.strip()) if isinstance(text, str) else None
    return (int(found[1]), int(found[2])) if found else None


def same_reading(given: Any, true: str | list[str]) -> bool:
    """Whether a field of the thought says what is true: positions in any order and spelling, words in any case."""
    if isinstance(true, list):
        return isinstance(given, list) and sorted(map(_plain, given)) == sorted(map(_plain, true))
    return isinstance(given, str) and _plain(given) == _plain(true)


def _plain(text: Any) -> str:
    """A position, or words without articles, in a form that doesn't depend on spelling."""
    if (position := read_position(text)) is not None:
        return write_position(position)
    return " ".join(word for word in str(text).casefold().split() if word not in ("a", "an", "the"))


def named_move(thoughts: str) -> str | None:
    """The move that the text settles on: up, down, left, right, pickup or dropoff; `None` if it is ambiguous."""
    return settled_move(thoughts, _MOVES)


def settled_move(thoughts: str, names: re.Pattern[str]) -> str | None:
    """The move that the text settles on; `None` if it is ambiguous.

    Reasons and mentions that aren't choices are ignored: "not left", "because the target is above".

    Args:
        names: A pattern of all moves. The name of the group that matches is the move, with `_` for a space.
    """
    return settle(
        (str(match.lastgroup).replace("_", " "), bool(_CHOSEN.search(before)))
        for match, before in mentions(thoughts, names)
        if not _NOT_CHOSEN.search(before)
    )
