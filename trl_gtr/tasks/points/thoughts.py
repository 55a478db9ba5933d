"""Reading and writing thoughts about a points game.

    I aim at 4+9+1+10=24. The formula so far is 4+9, so the next symbol is +.

Two things are read from such a text: the formula aimed at and the next symbol.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ...environments.cards.arithmetic import tokenize
from ...responses.action_text import QUOTES, plain_signs

# The expert's sentences, for a non-empty and an empty formula.
FRAMES = (
    "I aim at {aim}={target}. The formula so far is {formula}, so the next symbol is {symbol}.",
    "{aim}={target} uses every card. After {formula} I append {symbol}.",
    "The cards make {aim}={target}. With {formula} written I choose {symbol}.",
)
FIRST_FRAMES = (
    "I aim at {aim}={target}. The formula is empty, so the next symbol is {symbol}.",
    "{aim}={target} uses every card. First I append {symbol}.",
    "The cards make {aim}={target}. With nothing written I choose {symbol}.",
)

_RUN = re.compile(r"[0-9+\-*/() ]*\Z")
_MAX_RUN = 120  # characters of a formula, spaces included; the games stop at 20 elements
_CUE = re.compile(r"\b(?:next|append|choose|play|pick|select|write|put|symbol|action)\b", re.IGNORECASE)
_CLAUSE = re.compile(r"[,;!?\n]|\.(?=\s|\Z)|\bthen\b", re.IGNORECASE)


def write_thought(aim: Sequence[str], formula: Sequence[str], target: int, symbol: str) -> str:
    """The expert's thought. The frame depends only on the state, so the same state always gets the same words."""
    frames = FRAMES if formula else FIRST_FRAMES
    frame = frames[(len(aim) + len(formula)) % len(frames)]
    return frame.format(aim="".join(aim), formula="".join(formula), target=target, symbol=symbol)


def read_aim(thoughts: str, target: int, cards: int) -> tuple[str, ...] | None:
    """The elements of the formula the text aims at, or `None` if it states none.

    This is the last equation `… = target` with as many numbers as there are cards, so that intermediate remarks such
    as "3*8=24" don't count; if there is none, the last equation.
    """
    text = plain_signs(thoughts)
    aim: tuple[str, ...] | None = None
    full = False
    for match in _equations(text, target):
        elements = tuple(tokenize(match.left) or ())
        is_full = sum(element.isdigit() for element in elements) == cards
        if elements and (is_full or not full):
            aim, full = elements, is_full
    return aim


def read_symbol(thoughts: str, symbols: Sequence[str], target: int) -> str | None:
    """The symbol the text names as the next one, or `None`.

    A clause ends at a comma, a full stop or "then". In the last clause with both a cue (next, append, choose, play,
    pick, select, write, put, symbol, action) and a stand-alone symbol, it is the first symbol after the last cue that
    precedes one, else the last symbol. If there is no such clause, it is the text's last stand-alone symbol.
    Stand-alone means delimited by spaces, quotes or parentheses, unlike the 1 of "10" and the + of "4+9". Equations
    with the target are ignored.
    """
    last: str | None = None
    named: str | None = None
    for clause in _CLAUSE.split(_without_equations(plain_signs(thoughts), target)):
        found = _stand_alone(clause, symbols)
        if not found:
            continue
        last = found[-1][1]
        cues = [cue.end() for cue in _CUE.finditer(clause)]
        if cues:
            reach = max((cue for cue in cues if cue <= found[-1][0]), default=None)
            named = last if reach is None else next(symbol for place, symbol in found if place >= reach)
    return named or last


class _Equation(NamedTuple):
    left: str
    start: int
    end: int


def _equations(text: str, target: int) -> list[_Equation]:
    """Every `… = target` in the text, with the longest possible left-hand side."""
    found = []
    for match in re.finditer(rf"=\s*{target}(?![0-9]|\.[0-9])", text):
        run = _RUN.search(text, max(0, match.start() - _MAX_RUN), match.start())
        if run and run.group().strip():
            found.append(_Equation(run.group(), run.start(), match.end()))
    return found


def _without_equations(text: str, target: int) -> str:
    pieces, position = [], 0
    for equation in _equations(text, target):
        pieces.append(text[position : equation.start])
        position = equation.end
    return " # ".join([*pieces, text[position:]])


def _stand_alone(clause: str, symbols: Sequence[str]) -> list[tuple[int, str]]:
    """The stand-alone symbols of a clause with their positions."""
    found = []
    for match in re.finditer(r"\S+", clause):
        word = match.group().rstrip(".:").strip(QUOTES).rstrip(".:")
        if len(word) > 2 and word[0] == "(" and word[-1] == ")":
            word = word[1:-1]
        if word in symbols:
            found.append((match.start(), word))
        elif word in ("x", "X") and "*" in symbols:
            found.append((match.start(), "*"))
    return found
