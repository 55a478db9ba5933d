"""EZPoints: two cards, make 12."""

from __future__ import annotations

from typing import ClassVar

from .arithmetic import reachable
from .cards import RANKS, card_name
from .formula_env import FormulaEnv


class EZPointsEnv(FormulaEnv):
    """Two cards are on the table: build a formula that uses both numbers and makes 12.

    ## Description
    Every deal has a solution with `+` or `*`. The first rank is drawn from 2 to 13; face cards count 10. If its number
    is 2, 3, 4 or 6, the second number is with probability ½ the one that makes 12 by multiplication; otherwise it is
    the one that makes 12 by addition. Then the two are swapped with probability ½.

    ## Observation
    `Box(0, 255, (300, 300, 3), uint8)`: green felt, the two cards, and below them the formula so far.

    ## Actions
    `Discrete(13)`: 0–9 play the numbers 1–10; 10–12 play `+`, `*` and `=`.

    - A number that isn't on the table, or has been used up, adds a space to the formula.
    - Signs aren't checked. `=` isn't added to the formula.

    ## Rewards
    - `=` with a formula that equals 12 exactly and uses both numbers: +10
    - `=` otherwise, including when the formula doesn't parse: −1
    - a number that isn't available: −1
    - any action when the formula has more than 5 elements: −1
    - everything else: 0

    ## Episode end
    Terminated by `=`. Truncated by the step after the formula has grown to more than 5 elements, spaces included; so
    `=` must come while it has 5 at most.

    ## Information
    `Cards` (names: suit H S D C and rank A 2–9 T J Q K), `Numbers` (what they count for), `Formula` (its elements as
    text). All are copies.

    ## Arguments
    - `render_mode=None`: or `"rgb_array"`, or `"human"` (printed to a colour terminal).

    `reset(options={"cards": ["H3", "C4"]})` sets the deal.
    """

    hand_size: ClassVar[int] = 2
    signs: ClassVar[str] = "+*="
    max_elements: ClassVar[int] = 5
    card_box: ClassVar[tuple[int, int]] = (86, 134)
    formula_grid: ClassVar[tuple[int, int]] = (1, 6)

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(12, 10, render_mode)

    def deal(self) -> tuple[str, ...]:
        first = int(self.np_random.integers(2, len(RANKS) + 1))
        number = min(first, self.largest_number)
        by_product = number in (2, 3, 4, 6) and self.np_random.random() < 0.5
        second = 12 // number if by_product else 12 - number
        suits = self.np_random.integers(4, size=2)
        cards = (card_name("HSDC"[suits[0]], first), card_name("HSDC"[suits[1]], second))
        return cards[::-1] if self.np_random.random() < 0.5 else cards

    def check_deal(self, cards: tuple[str, ...]) -> None:
        if not reachable([], self.numbers_of(cards), 12, "+*", False, self.max_elements):
            raise ValueError(f"{list(cards)} don't make 12 by + or *, so EZPoints never deals them: choose others")
