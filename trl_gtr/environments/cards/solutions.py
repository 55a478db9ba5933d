"""All distinct solutions of a hand: build every expression, keep the correct ones, and group equivalent ones."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Union

from .completions import Hand, splits
from .formula import Rational, rational

Expression = Union[int, tuple["Expression", str, "Expression"]]  # noqa: UP007  (a recursive alias can't be written with |)
"""A number, or (left, operator, right)."""
Writing = tuple[str, ...]

RANK = {"+": 0, "*": 1, "-": 2, "/": 3, ")": 4, "(": 1}
"""The order in which elements are compared. Numbers can appear wherever `(` can: a number n ranks as −n."""


def solutions(hand: Hand, target: Rational, operators: str, parentheses: bool) -> tuple[Writing, ...]:
    """The simplest form of each distinct solution, simplest first; see `arithmetic.solve` for definitions."""
    simplest: dict[str, Writing] = {}
    for value, expression in _combine(hand, operators):
        if value != target:
            continue
        writing = _write(expression)
        if "(" in writing and not parentheses:
            continue
        _, same, _ = _canonical(expression)
        if same not in simplest or simplicity(writing) < simplicity(simplest[same]):
            simplest[same] = writing
    return tuple(sorted(simplest.values(), key=simplicity))


def simplicity(writing: Writing) -> tuple[int, list[int]]:
    """Sort key for formulas: fewer elements first, then element by element."""
    return len(writing), [RANK[element] if element in RANK else -int(element) for element in writing]


def _combine(hand: Hand, operators: str) -> Iterator[tuple[Rational, Expression]]:
    """Every expression that uses all of `hand`, with its value."""
    if len(hand) == 1:
        yield (hand[0], 1), hand[0]
        return
    for first, rest in splits(hand):
        if not first or not rest:
            continue
        for (p, q), left in _expressions(first, operators):
            for (r, s), right in _expressions(rest, operators):
                for operator in operators:
                    if operator == "+":
                        value = rational(p * s + r * q, q * s)
                    elif operator == "-":
                        value = rational(p * s - r * q, q * s)
                    elif operator == "*":
                        value = rational(p * r, q * s)
                    elif r:
                        value = rational(p * s, q * r)
                    else:
                        continue
                    yield value, (left, operator, right)


@lru_cache(maxsize=512)
def _expressions(hand: Hand, operators: str) -> tuple[tuple[Rational, Expression], ...]:
    return tuple(_combine(hand, operators))


def _write(expression: Expression, inside: str = "+") -> Writing:
    """The elements, with only the necessary parentheses. `inside` is the operator to the left, or `+` for the left
    operand of anything but a product."""
    if isinstance(expression, int):
        return (str(expression),)
    left, operator, right = expression
    writing = (*_write(left, "*" if operator in "*/" else "+"), operator, *_write(right, operator))
    is_sum = operator in "+-"
    return ("(", *writing, ")") if inside == "/" or (is_sum and inside in "-*") else writing


def _canonical(expression: Expression) -> tuple[int, str, Fraction]:
    """(sign, form, size): equivalent formulas have the same form; the value is sign × size."""
    if isinstance(expression, int):
        return 1, str(expression), Fraction(expression)
    if expression[1] in "*/":
        sign, size, factors = 1, Fraction(1), []
        for mark, (part_sign, form, part_size) in _parts(expression, "*/", "*"):
            sign *= part_sign
            size = size * part_size if mark == "*" else size / part_size
            factors.append(mark + form)
        return sign, f"[{''.join(sorted(factors))}]", size
    total, terms = Fraction(0), []
    for mark, (part_sign, form, part_size) in _parts(expression, "+-", "+"):
        term = part_sign * part_size if mark == "+" else -part_sign * part_size
        total += term
        terms.append((term >= 0, form))
    forms = ["".join(sorted("-+"[plus == upright] + form for plus, form in terms)) for upright in (True, False)]
    if total == 0:  # neither order is the positive one
        return 1, f"({min(forms)})", total
    return (1, f"({forms[0]})", total) if total > 0 else (-1, f"({forms[1]})", -total)


def _parts(expression: Expression, operators: str, mark: str) -> list[tuple[str, tuple[int, str, Fraction]]]:
    """The terms of a sum or factors of a product across all groupings, each with its operator."""
    if isinstance(expression, int) or expression[1] not in operators:
        return [(mark, _canonical(expression))]
    left, operator, right = expression
    turn = operator == operators[1]
    inner = operators[(operators.index(mark) + turn) % 2]
    return _parts(left, operators, mark) + _parts(right, operators, inner)
