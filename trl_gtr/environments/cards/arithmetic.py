"""Exact arithmetic for the card games: read a formula, evaluate it, solve a hand, and see a dead end coming.

A formula is a sequence of *elements*: numbers as text (`"10"`), `+ - * /`, `(` and `)`, and spaces, which mean nothing
but count towards the length limit of the games. All values are rational numbers, held exactly.

The functions that search share their arguments:

- `formula`: the elements so far, e.g. an environment's `info["Formula"]`.
- `numbers`: the whole hand (one to five), those in the formula included. A solution uses each of them once.
- `target`: the value to reach.
- `operators`: the operators that may be played.
- `parentheses`: whether parentheses may be played.
- `max_elements`: the longest formula, spaces included, for which `=` is still accepted (Points24 20, EZPoints 5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache

from .completions import Hand, Rules
from .formula import OPERATORS, State, evaluate, read, symbols_of, tokenize
from .solutions import RANK, solutions

__all__ = ["OPERATORS", "complete", "evaluate", "next_tokens", "reachable", "solve", "tokenize"]

MAX_NUMBERS = 5


def next_tokens(
    formula: Sequence[str | int],
    numbers: Sequence[int],
    target: int | Fraction = 24,
    operators: str = OPERATORS,
    parentheses: bool = True,
    max_elements: int = 20,
) -> frozenset[str]:
    """The tokens after which the target can still be reached; empty for a dead end.

    Exact for every formula: a token is included if and only if some solution within the limit begins with the formula
    and this token. For a complete and correct formula the answer is `"="`. It never includes a space.

    >>> sorted(next_tokens(["8", "/"], [8, 3, 8, 3]))
    ['(']
    """
    rules, hand = _game(numbers, target, operators, parentheses)
    return _next_tokens(rules, symbols_of(formula), hand, max_elements - len(formula))


def reachable(
    formula: Sequence[str | int],
    numbers: Sequence[int],
    target: int | Fraction = 24,
    operators: str = OPERATORS,
    parentheses: bool = True,
    max_elements: int = 20,
) -> bool:
    """Whether the target can still be reached from this formula.

    >>> reachable([], [1, 1, 1, 1]), reachable(["8", "/"], [8, 3, 8, 3])
    (False, True)
    """
    rules, hand = _game(numbers, target, operators, parentheses)
    return _reachable(rules, symbols_of(formula), hand, max_elements - len(formula))


def complete(
    formula: Sequence[str | int],
    numbers: Sequence[int],
    target: int | Fraction = 24,
    operators: str = OPERATORS,
    parentheses: bool = True,
    max_elements: int = 20,
) -> tuple[str, ...] | None:
    """The simplest solution that begins with `formula`: its elements without spaces and `=`, or `None`.

    Simplest means the fewest elements, and among those the first in the order of `solve`. It is stable:
    after its next element is played, the answer is the same.

    >>> "".join(complete(["(", "3"], [6, 5, 3, 2]))
    '(3+5)*6/2'
    """
    rules, hand = _game(numbers, target, operators, parentheses)
    return _complete(rules, symbols_of(formula), hand, max_elements - len(formula))


def solve(
    numbers: Sequence[int],
    target: int | Fraction = 24,
    operators: str = OPERATORS,
    max_elements: int = 20,
    parentheses: bool = True,
) -> tuple[tuple[str, ...], ...]:
    """All distinct solutions of a hand, the simplest first, each in its simplest form.

    Two formulas are the same solution if one becomes the other by changing the order of terms or factors, by
    parentheses that only regroup a sum or a product (`8-(3-2)` is `8-3+2`, `8/(4/2)` is `8/4*2`), or by flipping the
    signs of differences (`(1-5)*(2-8)` is `(5-1)*(8-2)`). `6*4*1` and `6*4/1` are two solutions.

    Simplest means the fewest elements; among those the first when elements are compared one by one, large numbers
    before small ones and before `(`, and `+` before `*`, `-`, `/` and `)`.

    >>> print(*("".join(solution) for solution in solve([8, 3, 8, 3])))
    8/(3-8/3)
    """
    rules, hand = _game(numbers, target, operators, parentheses)
    found = _solve(rules, hand)
    return tuple(solution for solution in found if len(solution) <= max_elements)


def _game(numbers: Sequence[int], target: int | Fraction, operators: str, parentheses: bool) -> tuple[Rules, Hand]:
    """Check the arguments that all searches share."""
    if not 1 <= len(numbers) <= MAX_NUMBERS or not all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 10**9 for n in numbers
    ):
        raise ValueError(f"numbers must be one to {MAX_NUMBERS} integers from 0 to 999999999, not {numbers!r}")
    if not operators or not set(operators) <= set(OPERATORS):
        raise ValueError(f"operators must be some of {OPERATORS!r}, not {operators!r}")
    rules = _rules(Fraction(target), "".join(sorted(set(operators), key=RANK.__getitem__)), bool(parentheses))
    return rules, tuple(sorted(numbers, reverse=True))


_rules = lru_cache(maxsize=256)(Rules)  # the caches below are keyed by these objects


def _position(rules: Rules, symbols: tuple[str, ...], hand: Hand) -> tuple[State, Hand] | None:
    """The formula's state and the numbers left to play, or `None` if the formula breaks the rules."""
    allowed = set(rules.operators) | set("()" if rules.parentheses else "")
    if any(symbol not in allowed and not symbol.isdecimal() for symbol in symbols):
        return None
    state = read(symbols)
    if state is None:
        return None
    left = Counter(hand)
    left.subtract(state.used)
    if any(count < 0 for count in left.values()):
        return None
    return state, tuple(sorted(left.elements(), reverse=True))


def _without(hand: Hand, token: str) -> Hand:
    """The numbers left after `token` is played."""
    if not token.isdecimal():
        return hand
    index = hand.index(int(token))
    return hand[:index] + hand[index + 1 :]


def _live_tokens(rules: Rules, state: State, left: Hand, room: int) -> Iterator[str]:
    """The tokens but `=` after which the target is in reach within `room` elements, simplest first."""
    if state.value is None:
        candidates = [*map(str, sorted(set(left), reverse=True)), *("(" if rules.parentheses else "")]
    else:
        candidates = [*(rules.operators if left else ""), *(")" if state.frames else "")]
    for token in candidates:
        after = state.after(token)
        if after is not None and rules.fits(after, _without(left, token), room - 1):
            yield token


@lru_cache(maxsize=32768)
def _next_tokens(rules: Rules, symbols: tuple[str, ...], hand: Hand, room: int) -> frozenset[str]:
    position = _position(rules, symbols, hand)
    if position is None:
        return frozenset()
    state, left = position
    if state.value is not None and not state.frames and not left:
        return frozenset("=" if rules.fits(state, left, room) else "")
    return frozenset(_live_tokens(rules, state, left, room))


@lru_cache(maxsize=32768)
def _reachable(rules: Rules, symbols: tuple[str, ...], hand: Hand, room: int) -> bool:
    position = _position(rules, symbols, hand)
    return position is not None and rules.fits(*position, room)


@lru_cache(maxsize=32768)
def _complete(rules: Rules, symbols: tuple[str, ...], hand: Hand, room: int) -> tuple[str, ...] | None:
    position = _position(rules, symbols, hand)
    if position is None:
        return None
    state, left = position
    # With no more room than the shortest completion needs, every token that keeps the target in reach is part of one.
    least = next((room_used for room_used in range(room + 1) if rules.fits(state, left, room_used)), None)
    if least is None:
        return None
    tokens: list[str] = []
    for room_left in range(least, 0, -1):
        token = next(_live_tokens(rules, state, left, room_left))
        after = state.after(token)
        assert after is not None  # it was live
        state, left = after, _without(left, token)
        tokens.append(token)
    return (*symbols, *tokens)


@lru_cache(maxsize=2048)
def _solve(rules: Rules, hand: Hand) -> tuple[tuple[str, ...], ...]:
    return solutions(hand, rules.target, rules.operators, rules.parentheses)
