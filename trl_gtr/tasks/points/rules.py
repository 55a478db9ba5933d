"""The rules of a points game, shared by its task and wrappers: symbols, target, and what can still be won."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...environments.cards import arithmetic

COUNTS = {10: "A counts 1; J, Q and K count 10.", 13: "A counts 1, J 11, Q 12 and K 13."}
"""Card values in words, by the highest number."""
RANKS = ("A", "2", "3", "4", "5", "6", "7", "8", "9", "10", "J", "Q", "K")


@dataclass(frozen=True)
class PointsRules:
    """One points game: Points24 or EZPoints."""

    cards: int
    target: int
    operators: str
    parentheses: bool
    max_elements: int
    """`=` is only accepted while the formula has at most this many elements, including spaces."""
    highest: int = 10
    """The highest card value: 10 if J, Q and K count 10, else 13."""
    symbols: tuple[str, ...] = field(init=False)
    """The action texts; a symbol's index is the environment action."""

    def __post_init__(self) -> None:
        numbers = [str(number) for number in range(1, self.highest + 1)]
        object.__setattr__(self, "symbols", (*numbers, *self.operators, *("()" if self.parentheses else ""), "="))

    def number(self, rank: str) -> int:
        """The value of a card of this rank."""
        return min(RANKS.index(rank) + 1, self.highest)

    def complete(self, info: Mapping[str, Any]) -> tuple[str, ...] | None:
        """The simplest winning formula that extends the current one, without spaces; `None` in a dead end."""
        formula, numbers = self._state(info)
        # Stay with the hand's simplest solution while it still fits; it is computed only once per deal.
        aim = arithmetic.complete((), numbers, **self._limits())
        if aim is not None and self.wins(aim, info):
            return aim
        return arithmetic.complete(formula, numbers, **self._limits())

    def reachable(self, info: Mapping[str, Any], *, from_start: bool = False) -> bool:
        """Whether the current formula (with `from_start`, the hand from an empty formula) can still win."""
        formula, numbers = self._state(info)
        return arithmetic.reachable(() if from_start else formula, numbers, **self._limits())

    def wins(self, aim: Sequence[str], info: Mapping[str, Any]) -> bool:
        """Whether `aim` uses the hand, reaches the target, extends the current formula and fits the limit."""
        formula = written(info)
        spaces = len(info["Formula"]) - len(formula)
        numbers = sorted(int(element) for element in aim if element.isdigit())
        return (
            tuple(aim[: len(formula)]) == formula
            and numbers == sorted(int(number) for number in info["Numbers"])
            and all(element in self.symbols and element != "=" for element in aim)
            and len(aim) + spaces <= self.max_elements
            and arithmetic.evaluate(aim) == self.target
        )

    def solutions(self, numbers: Sequence[int]) -> list[str]:
        """Every distinct solution of a hand, simplest first."""
        return ["".join(formula) for formula in arithmetic.solve(tuple(numbers), **self._limits())]

    def _state(self, info: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return tuple(str(element) for element in info["Formula"]), tuple(int(number) for number in info["Numbers"])

    def _limits(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "operators": self.operators,
            "parentheses": self.parentheses,
            "max_elements": self.max_elements,
        }


def written(info: Mapping[str, Any]) -> tuple[str, ...]:
    """The current formula's elements, without the spaces added by unavailable numbers."""
    return tuple(text for element in info["Formula"] if (text := str(element)).strip())


def printed_ranks(info: Mapping[str, Any]) -> list[str]:
    """The ranks as printed on the cards; the environments write T for ten."""
    return ["10" if name[1:] == "T" else name[1:] for name in info["Cards"]]


def read_ranks(cards: Any) -> list[str] | None:
    """Normalise a list of ranks; `None` if any is invalid."""
    if not isinstance(cards, (list, tuple)):
        return None
    ranks = ["10" if (rank := str(card).strip().upper()) == "T" else rank for card in cards]
    return ranks if all(rank in RANKS for rank in ranks) else None
