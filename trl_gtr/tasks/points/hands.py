"""Named sets of Points24's hands.

By what their cards count, 566 different hands make 24. A fixed shuffle parts them into three sets that have no hand in
common: the pool, from which the embedded model plays (a million parameters can read any hand but can't search for a
formula), the unseen hands that no training of its weights has ever shown, and the rest, from which it has learned to
read. The suits are new in every deal.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import combinations_with_replacement

from ...environments.cards import arithmetic

POOL_SIZE, UNSEEN_SIZE, SEED = 64, 120, 24
Hands = list[list[str]]


def _parted_hands() -> tuple[list[tuple[int, ...]], ...]:
    """Pool, unseen hands, and the rest, as the numbers of their cards."""
    every: Iterator[tuple[int, ...]] = combinations_with_replacement(range(1, 11), 4)
    hands = [hand for hand in every if arithmetic.reachable((), hand)]
    random.Random(SEED).shuffle(hands)
    end = POOL_SIZE + UNSEEN_SIZE
    return hands[:POOL_SIZE], hands[POOL_SIZE:end], hands[end:]


def _cards(numbers: tuple[int, ...], rng: random.Random) -> list[str]:
    """Ranks that count these numbers, in any order."""
    ranks = [{1: "A", 10: rng.choice(("10", "J", "Q", "K"))}.get(number, str(number)) for number in numbers]
    return rng.sample(ranks, len(ranks))


def points24_pool() -> Hands:
    """The default hands; always the same."""
    rng = random.Random(SEED)
    return [_cards(hand, rng) for hand in _parted_hands()[0]]


def unseen_hands() -> Hands:
    """Hands for evaluation only."""
    rng = random.Random(SEED + 1)
    return [_cards(hand, rng) for hand in _parted_hands()[1]]


def solvable_hands() -> Hands:
    """Every hand that makes 24, by what its cards count: the pool, the unseen hands and the rest, each once."""
    rng = random.Random(SEED + 3)
    return [*points24_pool(), *unseen_hands(), *(_cards(hand, rng) for hand in _parted_hands()[2])]


def reading_hands(orders: int = 8) -> Hands:
    """Hands that are neither in the pool nor unseen, each with its cards in several orders."""
    rng = random.Random(SEED + 2)
    return [_cards(hand, rng) for hand in _parted_hands()[2] for _ in range(orders)]


_NAMED: dict[str, Callable[[], Hands]] = {
    "pool": points24_pool,
    "unseen": unseen_hands,
    "solvable": solvable_hands,
    "reading": reading_hands,
}


def named_hands(name: str) -> Hands | None:
    """The hands of a set; `None` for "all", which deals at random."""
    if name == "all":
        return None
    if name not in _NAMED:
        raise ValueError(f"There are no hands {name!r}: choose all, {', '.join(_NAMED)}, or list the hands.")
    return _NAMED[name]()
