"""Points24: four cards, make 24."""

from __future__ import annotations

from typing import ClassVar

from .arithmetic import reachable
from .cards import RANKS, SUITS, card_name
from .formula_env import FormulaEnv

# A target that hardly any hand reaches would otherwise make `solvable_only` search for ever.
MAX_DEALS = 2_000


class Points24Env(FormulaEnv):
    """Four cards are on the table: build a formula that uses each number once and makes 24.

    ## Description
    Ranks 1 to 13 and the four suits are drawn uniformly, with replacement. An ace counts 1, the face cards count 10.
    The formula is built element by element. 73.1 % of all deals have a solution.

    ## Observation
    `Box(0, 255, (300, 300, 3), uint8)`: green felt, the four cards in a row, and below them the formula so far.

    ## Actions
    `Discrete(17)`: 0–9 play the numbers 1–10; 10–16 play `+`, `-`, `*`, `/`, `(`, `)` and `=`. With
    `treat_face_cards_as_10=False` it is `Discrete(20)`: 0–12 play 1–13, then the signs.

    - A number that isn't on the table, or has been used up, adds a space to the formula.
    - Signs aren't checked. `=` isn't added to the formula.

    ## Rewards
    - `=` with a formula that equals the target exactly and uses all four numbers: +10
    - `=` otherwise, including when the formula doesn't parse: −1
    - a number that isn't available: −1
    - any action when the formula has more than 20 elements: −1
    - everything else: 0

    Values are compared as fractions: 8/(3-8/3) is 24. Formulas have the binary `+ - * /` and parentheses; numbers
    side by side (1, 2 as twelve), `**`, `//` and signs before a number don't parse. Spaces mean nothing.

    ## Episode end
    Terminated by `=`. Truncated by the step after the formula has grown to more than 20 elements, spaces included; so
    `=` must come while it has 20 at most.

    ## Information
    `Cards` (names: suit H S D C and rank A 2–9 T J Q K), `Numbers` (what they count for), `Formula` (its elements as
    text). All are copies.

    ## Arguments
    - `treat_face_cards_as_10=True`: otherwise jack, queen and king count 11, 12 and 13.
    - `target_points=24`: the value to make.
    - `solvable_only=False`: deal only hands that have a solution.
    - `render_mode=None`: or `"rgb_array"`, or `"human"` (printed to a colour terminal).

    `reset(options={"cards": ["H4", "SK", "D7", "CA"]})` sets the deal.
    """

    hand_size: ClassVar[int] = 4
    signs: ClassVar[str] = "+-*/()="
    max_elements: ClassVar[int] = 20
    card_box: ClassVar[tuple[int, int]] = (69, 108)
    formula_grid: ClassVar[tuple[int, int]] = (2, 11)

    def __init__(
        self,
        treat_face_cards_as_10: bool = True,
        target_points: int = 24,
        solvable_only: bool = False,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(target_points, 10 if treat_face_cards_as_10 else 13, render_mode)
        self.solvable_only = solvable_only

    def deal(self) -> tuple[str, ...]:
        for _ in range(MAX_DEALS):
            ranks = self.np_random.integers(1, len(RANKS) + 1, size=self.hand_size)
            suits = self.np_random.integers(len(SUITS), size=self.hand_size)
            cards = tuple(card_name("HSDC"[suit], rank) for suit, rank in zip(suits, ranks, strict=True))
            if not self.solvable_only or self._is_solvable(cards):
                return cards
        raise ValueError(
            f"no hand that makes {self.target_points} in {MAX_DEALS} deals: choose another target_points or "
            "solvable_only=False"
        )

    def check_deal(self, cards: tuple[str, ...]) -> None:
        if self.solvable_only and not self._is_solvable(cards):
            raise ValueError(
                f"{list(cards)} has no solution: choose other cards or make the environment with solvable_only=False"
            )

    def _is_solvable(self, cards: tuple[str, ...]) -> bool:
        return reachable([], self.numbers_of(cards), self.target_points, max_elements=self.max_elements)
