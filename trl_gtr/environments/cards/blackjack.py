"""Blackjack against a dealer who shows one card."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from .canvas import CREAM, FELT, SIZE, Picture, blank, put, words
from .cards import CARD_HEIGHT, CARD_WIDTH, card_back, card_face
from .picture_env import PictureEnv

Card = tuple[int, str, str]
"""(value, face, suit), such as (1, "A", "H"), (7, "7", "S"), (10, "Q", "D")."""
Hand = list[Card]

DECK = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10)
SUIT_ORDER = "CDHS"
TEN_FACES = "JQK"


def usable_ace(hand: Sequence[Card]) -> bool:
    """Whether an ace of the hand counts 11."""
    return any(card[0] == 1 for card in hand) and sum(card[0] for card in hand) + 10 <= 21


def total(hand: Sequence[Card]) -> int:
    """The hand's points; an ace counts 11 where that is not too much."""
    return sum(card[0] for card in hand) + 10 * usable_ace(hand)


def is_natural(hand: Sequence[Card]) -> bool:
    """An ace and a ten, dealt."""
    return sorted(card[0] for card in hand) == [1, 10]


def score(hand: Sequence[Card]) -> int:
    """What the hand is worth in the comparison: nothing when it is over 21."""
    return total(hand) if total(hand) <= 21 else 0


def draw_suit(rng: np.random.Generator) -> str:
    return SUIT_ORDER[rng.integers(len(SUIT_ORDER))]


def draw_card(rng: np.random.Generator) -> Card:
    """One card from an endless deck.

    The draws and their order are the original's, so that its seeds give its hands. (It calls `choice`, which draws
    just as `integers` does and is slower.)
    """
    value = DECK[rng.integers(len(DECK))]
    suit = draw_suit(rng)
    if value == 10:
        return value, TEN_FACES[rng.integers(len(TEN_FACES))], suit
    return value, ("A" if value == 1 else str(value)), suit


class BlackjackEnv(PictureEnv):
    """Get closer to 21 than the dealer without going over.

    ## Description
    Dealer and player get two cards each, drawn with replacement; the dealer's first is face up. Ace counts 1, or 11
    where that doesn't go over 21; J, Q and K count 10 (no card shows a 10). After the player stands, the
    dealer draws up to 17. With the same seed the hands are those of the original game.

    ## Observation
    `Box(0, 255, (300, 300, 3), uint8)`: green felt, the dealer's open card, a face-down card, and below them
    the player's cards. The dealer's other cards are never shown. With `is_pixel=False`: `(player's total, dealer's
    open card 1–10, usable ace 0/1)`, a `Tuple` of `Discrete(32)`, `Discrete(11)` and `Discrete(2)`.

    ## Actions
    `Discrete(2)`: 0 stand, 1 hit.

    ## Rewards
    Win +1, draw 0, loss −1. Going over 21 loses.

    ## Episode end
    Terminated by standing, or by going over 21.

    ## Information
    `Dealer Card` and `Player Card`: both hands, as lists of (value, face, suit). The dealer's hidden card is in it:
    don't show this to the player.

    ## Arguments
    - `natural=False`: a win with an ace and a ten as dealt pays 1.5.
    - `sab=False`: the rules of Sutton and Barto's book, which ignore `natural`: the player's natural wins unless the
      dealer has one too.
    - `is_pixel=True`: see Observation.
    - `render_mode=None`: or `"rgb_array"`, or `"human"` (printed to a colour terminal).

    `reset(options={"dealer": [[10, "K", "H"], [7, "7", "S"]], "player": [[1, "A", "C"], [6, "6", "D"]]})` sets the
    deal (one of the two is enough); the dealer's first card is the open one.
    """

    actions = ("stand", "hit")

    def __init__(
        self, natural: bool = False, sab: bool = False, is_pixel: bool = True, render_mode: str | None = None
    ) -> None:
        self.natural, self.sab, self.is_pixel = natural, sab, is_pixel
        super().__init__(render_mode)
        self.action_space = spaces.Discrete(2)
        self._dealer: Hand = []
        self._player: Hand = []

    def _space(self) -> spaces.Space[Any]:
        if self.is_pixel:
            return super()._space()
        return spaces.Tuple((spaces.Discrete(32), spaces.Discrete(11), spaces.Discrete(2)))

    @property
    def step_limit(self) -> int:
        return 20  # after two aces, 19 more count 21, and whatever comes next is too much

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        wishes = self._check_options(options, ("dealer", "player"))
        wished = {who: _wished_hand(who, hand) for who, hand in wishes.items()}
        rng = self.np_random
        dealer, player = ([draw_card(rng), draw_card(rng)] for _ in range(2))
        # The original draws the open card's looks once more; without these draws later cards would differ from its.
        draw_suit(rng)
        if dealer[0][0] == 10:
            rng.integers(len(TEN_FACES))
        self._dealer, self._player = wished.get("dealer", dealer), wished.get("player", player)
        self._begin()
        return self._observation(), self._info()

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._check_step(action) == 1:
            self._player.append(draw_card(self.np_random))
            terminated = total(self._player) > 21
            reward = -1.0 if terminated else 0.0
        else:
            while total(self._dealer) < 17:
                self._dealer.append(draw_card(self.np_random))
            terminated, reward = True, self._outcome()
        self._end_step(terminated)
        return self._observation(), reward, terminated, False, self._info()

    def _outcome(self) -> float:
        if self.sab and is_natural(self._player) and not is_natural(self._dealer):
            return 1.0
        mine, theirs = score(self._player), score(self._dealer)
        if mine > theirs:
            return 1.5 if self.natural and not self.sab and is_natural(self._player) else 1.0
        return -1.0 if mine < theirs else 0.0

    def _observation(self) -> Any:
        if self.is_pixel:
            return self.picture()
        return total(self._player), self._dealer[0][0], int(usable_ace(self._player))

    def _info(self) -> dict[str, Any]:
        return {"Dealer Card": list(self._dealer), "Player Card": list(self._player)}

    def picture(self) -> Picture:
        table = blank(FELT).copy()
        put(table, words("Dealer", 20, CREAM, FELT), 8, 8)
        put(table, words("Player", 20, CREAM, FELT), 8, 158)
        _, face, suit = self._dealer[0]
        put(table, card_face(suit + face), 3, 36)
        put(table, card_back(), 78, 36)
        columns = _columns(len(self._player))
        cell_width, cell_height = SIZE // columns, CARD_HEIGHT * 4 // columns
        for index, (_, face, suit) in enumerate(self._player):
            row, column = divmod(index, columns)
            card = card_face(suit + face, CARD_WIDTH * 4 // columns, cell_height)
            put(table, card, 3 + column * cell_width, 186 + row * cell_height)
        return table


def _columns(cards: int) -> int:
    """The fewest cards a row, four at least, with which all fit: smaller cards also make room for more rows."""
    columns = 4
    while columns * (columns // 4) < cards:
        columns += 1
    return columns


def _wished_hand(who: str, wish: Any) -> Hand:
    faces = {1: "A", **{value: str(value) for value in range(2, 10)}}
    hand: Hand = []
    if not isinstance(wish, (list, tuple)) or len(wish) != 2:
        raise ValueError(f"options[{who!r}] must be two cards such as [[10, 'K', 'H'], [7, '7', 'S']], not {wish!r}")
    for card in wish:
        valid = (
            isinstance(card, (list, tuple))
            and len(card) == 3
            and isinstance(card[0], int)
            and not isinstance(card[0], bool)
            and (card[1] in tuple(TEN_FACES) if card[0] == 10 else card[1] == faces.get(card[0], ""))
            and card[2] in tuple(SUIT_ORDER)
        )
        if not valid:
            raise ValueError(
                f"no such card: {card!r}. A card is [value, face, suit]: [1, 'A', suit], [2, '2', suit] … "
                "[9, '9', suit] or [10, 'J' or 'Q' or 'K', suit], with suit C, D, H or S"
            )
        hand.append((card[0], card[1], card[2]))
    return hand
