"""The common base of Points24 and EZPoints: build a formula from the cards' numbers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

from gymnasium import spaces

from .arithmetic import evaluate
from .canvas import CREAM, FELT, SIZE, SLATE, Picture, blank, formula_cell, put, read_only, words
from .cards import card_face, card_rank, check_card
from .picture_env import PictureEnv

FORMULA_TOP = 188


class FormulaEnv(PictureEnv):
    """Play numbers and signs until the formula equals the target; see `Points24Env` and `EZPointsEnv`."""

    hand_size: ClassVar[int]
    signs: ClassVar[str]
    """The playable signs, in action order, `=` last."""
    max_elements: ClassVar[int]
    """The longest formula, including spaces, for which `=` is accepted."""
    card_box: ClassVar[tuple[int, int]]
    """Width and height of a card in the image."""
    formula_grid: ClassVar[tuple[int, int]]
    """Rows and columns of the formula in the image."""

    def __init__(self, target_points: int, largest_number: int, render_mode: str | None) -> None:
        super().__init__(render_mode)
        if not isinstance(target_points, int) or isinstance(target_points, bool):
            raise ValueError(f"target_points must be an integer, not {target_points!r}")
        self.target_points = target_points
        self.largest_number = largest_number
        self.actions = (*map(str, range(1, largest_number + 1)), *self.signs)
        self.action_space = spaces.Discrete(len(self.actions))
        self._cards: tuple[str, ...] = ()
        self._numbers: tuple[int, ...] = ()
        self._formula: list[str] = []

    @property
    def step_limit(self) -> int:
        return self.max_elements + 2  # one element too many, and the step after it

    def deal(self) -> tuple[str, ...]:
        """Draw a hand at random."""
        raise NotImplementedError

    def check_deal(self, cards: tuple[str, ...]) -> None:
        """Raise a `ValueError` if the game never deals this hand."""

    def number_of(self, card: str) -> int:
        """The value of a card."""
        return min(card_rank(card), self.largest_number)

    def numbers_of(self, cards: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.number_of(card) for card in cards)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Picture, dict[str, Any]]:
        super().reset(seed=seed)
        requested = self._check_options(options, ("cards",))
        cards = self._requested_cards(requested["cards"]) if "cards" in requested else self.deal()
        self._cards, self._numbers, self._formula = cards, self.numbers_of(cards), []
        self._begin()
        return self.picture(), self._info()

    def _requested_cards(self, requested: Any) -> tuple[str, ...]:
        if not isinstance(requested, (list, tuple)) or len(requested) != self.hand_size:
            raise ValueError(f"options['cards'] must be a list of {self.hand_size} card names, not {requested!r}")
        cards = tuple(check_card(name) for name in requested)
        self.check_deal(cards)
        return cards

    def step(self, action: int) -> tuple[Picture, float, bool, bool, dict[str, Any]]:
        token = self.actions[self._check_step(action)]
        reward, terminated, truncated = 0.0, False, False
        if len(self._formula) > self.max_elements:
            reward, truncated = -1.0, True
        elif token == "=":
            reward, terminated = (10.0 if self._is_solved() else -1.0), True
        elif token.isdecimal() and self._is_spent(token):
            reward = -1.0
            self._formula.append(" ")
        else:
            self._formula.append(token)
        self._end_step(terminated or truncated)
        return self.picture(), reward, terminated, truncated, self._info()

    def _is_spent(self, number: str) -> bool:
        return self._formula.count(number) >= self._numbers.count(int(number))

    def _is_solved(self) -> bool:
        used = sum(element.isdecimal() for element in self._formula)
        return used == self.hand_size and evaluate(self._formula) == self.target_points

    def _info(self) -> dict[str, Any]:
        return {"Cards": list(self._cards), "Numbers": list(self._numbers), "Formula": list(self._formula)}

    def picture(self) -> Picture:
        table = _table().copy()
        width, height = self.card_box
        column = SIZE // self.hand_size
        for index, card in enumerate(self._cards):
            put(table, card_face(card, width, height), index * column + (column - width) // 2, (146 - height) // 2)
        rows, columns = self.formula_grid
        cell_width, cell_height = (SIZE - 6) // columns, (SIZE - FORMULA_TOP - 4) // rows
        for index, element in enumerate(self._formula):
            row, place = divmod(index, columns)
            cell = formula_cell(element, cell_width, cell_height)
            put(table, cell, 4 + place * cell_width, FORMULA_TOP + 2 + row * cell_height)
        return table


@lru_cache(maxsize=1)
def _table() -> Picture:
    """The table without cards: felt, the word Formula, and the slate for the formula."""
    table = blank(FELT).copy()
    put(table, words("Formula:", 20, CREAM, FELT), 8, 156)
    table[FORMULA_TOP:] = SLATE
    return read_only(table)
