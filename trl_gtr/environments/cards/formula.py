"""Reading formulas: elements in, an exact rational value out.

A formula is a sequence of *elements*: numbers as text (`"10"`), `+ - * /`, `(` and `)`, and spaces, which mean
nothing. Numbers that stand side by side and unary signs don't parse. Nothing is ever handed to Python's own
evaluator.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from math import gcd

OPERATORS = "+-*/"

_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
_ELEMENT = re.compile(r"(?:0|[1-9][0-9]{0,8})(?![0-9])|[-+*/()]")

Rational = tuple[int, int]
"""Numerator and denominator, reduced, the denominator positive. Python's Fraction is several times slower."""
Value = tuple[int, int, int]
"""(a, t, d): a level's value so far, a/d + t/d. The last term t/d can still be multiplied or divided."""
Pending = tuple[int, int, int, str]
"""A `Value` and the operator that waits for its right-hand side."""

START: Pending = (0, 0, 1, "+")
"""What waits for the first number of a formula or of a parenthesis: nothing, to which it is added."""


def tokenize(text: str) -> list[str] | None:
    """Split a written formula such as `"8/(3-8/3)"` into elements, without its spaces.

    `None` if the text has characters that no formula has. A text that splits need not parse.
    """
    elements: list[str] = []
    position = 0
    while position < len(text):
        if text[position] == " ":
            position += 1
            continue
        match = _ELEMENT.match(text, position)
        if match is None:
            return None
        elements.append(match.group())
        position = match.end()
    return elements


def evaluate(elements: Sequence[str | int]) -> Fraction | None:
    """The formula's exact value; `None` if it doesn't parse or divides by zero."""
    state = read(symbols_of(elements))
    if state is None or state.value is None or state.frames:
        return None
    a, t, d = state.value
    return Fraction(a + t, d)


class State:
    """Where the reading of a formula stands.

    `frames`: what waits outside each open parenthesis. Exactly one of `value` (an operator or `)` comes next) and
    `pending` (a number or `(` comes next) is set.
    """

    __slots__ = ("frames", "pending", "used", "value")

    def __init__(
        self, frames: tuple[Pending, ...], value: Value | None, pending: Pending | None, used: tuple[int, ...] = ()
    ) -> None:
        self.frames, self.value, self.pending, self.used = frames, value, pending, used

    def after(self, symbol: str) -> State | None:
        """The state one element later, or `None` if that element can't stand here."""
        if self.pending is not None:
            if symbol == "(":
                return State((*self.frames, self.pending), None, START, self.used)
            if _NUMBER.fullmatch(symbol) is None:
                return None
            value = apply(self.pending, int(symbol), 1)
            return value and State(self.frames, reduced(value), None, (*self.used, int(symbol)))
        assert self.value is not None
        if symbol == ")":
            closed = self.frames and apply(self.frames[-1], self.value[0] + self.value[1], self.value[2])
            return State(self.frames[:-1], reduced(closed), None, self.used) if closed else None
        if len(symbol) == 1 and symbol in OPERATORS:
            return State(self.frames, None, waiting(self.value, symbol), self.used)
        return None


def symbols_of(elements: Sequence[str | int]) -> tuple[str, ...]:
    """The elements as text without the spaces. (The original games hand out numbers as int.)"""
    if isinstance(elements, str):
        raise ValueError(
            "a formula is a sequence of elements such as ['8', '*', '3']: split text with tokenize() first"
        )
    return tuple(text for element in elements if (text := str(element)) != " ")


def read(symbols: Sequence[str]) -> State | None:
    state: State | None = State((), None, START)
    for symbol in symbols:
        state = state and state.after(symbol)
    return state


def waiting(value: Value, operator: str) -> Pending:
    a, t, d = value
    # After + or - the finished term can no longer change: fold it, so that equal situations look equal.
    return (a + t, 0, d, operator) if operator in "+-" else (a, t, d, operator)


def apply(pending: Pending, p: int, q: int) -> Value | None:
    """Give the waiting operator its right-hand side p/q; `None` is a division by zero."""
    a, t, d, operator = pending
    if operator == "+":
        return (a + t) * q, p * d, d * q
    if operator == "-":
        return (a + t) * q, -p * d, d * q
    if operator == "*":
        return a * q, t * p, d * q
    return (a * p, t * q, d * p) if p else None


def reduced(value: Value) -> Value:
    a, t, d = value
    divisor = gcd(a, t, d) if d > 0 else -gcd(a, t, d)
    return a // divisor, t // divisor, d // divisor


def rational(p: int, q: int) -> Rational:
    divisor = gcd(p, q) if q > 0 else -gcd(p, q)
    return p // divisor, q // divisor
