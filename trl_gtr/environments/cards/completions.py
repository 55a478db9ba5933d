"""A fast, exact test of whether a formula can still be completed.

A completion must play the remaining numbers, one operator before each, and close every open parenthesis: that length
is fixed. Only the parentheses it opens itself can vary, so "does it fit the length limit?" becomes "how many new pairs
of parentheses does it need?", which is what the tables here store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import product

from .formula import START, Pending, Rational, State, Value, apply, rational

Hand = tuple[int, ...]
"""Numbers to play, largest first."""
Table = dict[Rational, int]
"""Value → the fewest parenthesis pairs needed to make it."""

# Hands of up to three numbers recur all the time, so all deals share the tables.


@lru_cache(maxsize=4096)
def splits(hand: Hand) -> tuple[tuple[Hand, Hand], ...]:
    """Every distinct way to split the numbers in two (one part may be empty), small first parts first."""
    counts = sorted(Counter(hand).items(), reverse=True)
    parts = []
    for taken in product(*(range(count + 1) for _, count in counts)):
        first = tuple(n for (n, _), k in zip(counts, taken, strict=True) for _ in range(k))
        rest = tuple(n for (n, count), k in zip(counts, taken, strict=True) for _ in range(count - k))
        parts.append((first, rest))
    return tuple(sorted(parts, key=lambda part: len(part[0])))


def _keep_least(table: Table, value: Rational, pairs: int) -> None:
    if table.get(value, pairs + 1) > pairs:
        table[value] = pairs


@lru_cache(maxsize=4096)
def _factors(hand: Hand, operators: str, parentheses: bool) -> Table:
    """Values that can stand where one number can: a number, or all of `hand` in parentheses."""
    if len(hand) == 1:
        return {(hand[0], 1): 0}
    table: Table = {}
    if parentheses:
        for first, rest in splits(hand):
            if first and rest:
                for (p, q), pairs in _factors(first, operators, parentheses).items():
                    for value, more in _level_values((0, p, q), rest, operators, parentheses):
                        _keep_least(table, value, 1 + pairs + more)
    return table


@lru_cache(maxsize=4096)
def _multipliers(hand: Hand, operators: str, parentheses: bool) -> Table:
    """Values x such that "* …" or "/ …" with all of `hand` multiplies the term before it by x."""
    if not hand:
        return {(1, 1): 0}
    table: Table = {}
    for first, rest in splits(hand):
        if not first:
            continue
        for (p, q), pairs in _factors(first, operators, parentheses).items():
            for (r, s), more in _multipliers(rest, operators, parentheses).items():
                if "*" in operators:
                    _keep_least(table, rational(p * r, q * s), pairs + more)
                if "/" in operators and p:
                    _keep_least(table, rational(q * r, p * s), pairs + more)
    return table


@lru_cache(maxsize=4096)
def _addends(hand: Hand, operators: str, parentheses: bool) -> Table:
    """Values y such that "+ …" or "- …" with all of `hand` adds y to what precedes it."""
    if not hand:
        return {(0, 1): 0}
    table: Table = {}
    for first, rest in splits(hand):
        if not first:
            continue
        for (p, q), pairs in _terms(first, operators, parentheses).items():
            for (r, s), more in _addends(rest, operators, parentheses).items():
                if "+" in operators:
                    _keep_least(table, rational(r * q + p * s, q * s), pairs + more)
                if "-" in operators:
                    _keep_least(table, rational(r * q - p * s, q * s), pairs + more)
    return table


@lru_cache(maxsize=4096)
def _terms(hand: Hand, operators: str, parentheses: bool) -> Table:
    """Values of products and quotients of factors that use all of `hand`."""
    table: Table = {}
    for first, rest in splits(hand):
        if not first:
            continue
        for (p, q), pairs in _factors(first, operators, parentheses).items():
            for (r, s), more in _multipliers(rest, operators, parentheses).items():
                _keep_least(table, rational(p * r, q * s), pairs + more)
    return table


def _level_values(value: Value, hand: Hand, operators: str, parentheses: bool) -> Iterator[tuple[Rational, int]]:
    """The final values of a level now at `value` if all of `hand` is played in it, with the new pairs needed."""
    a, t, d = value
    for first, rest in splits(hand):
        addends = _addends(rest, operators, parentheses)
        for (p, q), pairs in _multipliers(first, operators, parentheses).items():
            for (r, s), more in addends.items():
                yield rational((a * q + t * p) * s + r * d * q, d * q * s), pairs + more


def _useful(frames: tuple[Pending, ...], numbers_left: int) -> tuple[Pending, ...]:
    """Drop open parentheses that can't matter: of several in a row, each needs its own number after it closes."""
    kept: list[Pending] = []
    run = 0
    for frame in frames:
        run = run + 1 if frame == START else 0
        if run <= numbers_left:
            kept.append(frame)
    return tuple(kept)


class Rules:
    """The target and the allowed operators and parentheses. One object per combination."""

    def __init__(self, target: Fraction, operators: str, parentheses: bool) -> None:
        self.target: Rational = (target.numerator, target.denominator)
        self.operators = operators
        self.parentheses = parentheses

    def fits(self, state: State, hand: Hand, room: int) -> bool:
        """Whether the target can be reached with all of `hand` and at most `room` more elements."""
        operators = len(hand) - (state.pending is not None)
        spare = room - len(hand) - operators - len(state.frames)
        if spare < 0 or operators < 0:
            return False
        return self._completes(state, hand, min(spare // 2, len(hand)) if self.parentheses else 0)

    def _completes(self, state: State, hand: Hand, pairs: int) -> bool:
        """Whether the target can be reached with all of `hand` and at most `pairs` new pairs of parentheses."""
        frames = _useful(state.frames, len(hand))
        if state.value is not None:
            return self._after_value(frames, state.value, hand, pairs)
        assert state.pending is not None
        # Parentheses that are still empty can be closed after the next number, so they never hurt; at best they save
        # a new pair. Try without them first.
        outer, pending = frames, state.pending
        while pending == START and outer:
            outer, pending = outer[:-1], outer[-1]
        if len(outer) < len(frames):
            if self._before_value(outer, pending, hand, pairs):
                return True
            if not self._before_value(outer, pending, hand, len(hand)):
                return False
        return self._before_value(frames, state.pending, hand, pairs)

    def _before_value(self, frames: tuple[Pending, ...], pending: Pending, hand: Hand, pairs: int) -> bool:
        for first, rest in splits(hand):
            for (p, q), cost in _factors(first, self.operators, self.parentheses).items() if first else ():
                if cost <= pairs:
                    value = apply(pending, p, q)
                    if value is not None and self._after_value(frames, value, rest, pairs - cost):
                        return True
        return False

    def _after_value(self, frames: tuple[Pending, ...], value: Value, hand: Hand, pairs: int) -> bool:
        if not frames:
            return self._ends_on_target(value, hand, pairs)
        for first, rest in splits(hand):
            for (p, q), cost in _level_values(value, first, self.operators, self.parentheses):
                if cost <= pairs:
                    closed = apply(frames[-1], p, q)
                    if closed is not None and self._after_value(frames[:-1], closed, rest, pairs - cost):
                        return True
        return False

    def _ends_on_target(self, value: Value, hand: Hand, pairs: int) -> bool:
        """Outside all parentheses: for each multiplier of the last term, look up the missing addend."""
        a, t, d = value
        m, n = self.target
        for first, rest in splits(hand):
            addends = _addends(rest, self.operators, self.parentheses)
            for (p, q), cost in _multipliers(first, self.operators, self.parentheses).items():
                missing = rational(m * d * q - (a * q + t * p) * n, n * d * q)
                if cost + addends.get(missing, pairs + 1) <= pairs:
                    return True
        return False
