"""The hands of Points24 and the games of ALFWorld on which the tiny models are trained and evaluated.

A million parameters can read any hand but can't search for a formula, so the default game deals from a stated pool of
solvable hands: `make_task("points24", hands=POINTS24_POOL)`. The suits are new in every deal.

By what their cards count, 566 different hands make 24. A fixed shuffle parts them into three sets that have no hand in
common: the pool, the unseen hands that no training of the shipped weights has ever shown, and the rest, from which the
model has learned to read.

ALFWorld's model has learned from generated games that are in no split, in the room layouts of training.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations_with_replacement

from ..environments.alfworld.generator import SEEDS
from ..environments.alfworld.rooms import LAYOUTS, UNSEEN_LAYOUTS
from ..environments.cards import arithmetic

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


def alfworld_practice(count: int = 320) -> list[str]:
    """Names of generated games that are in no split, in the room layouts of training only."""
    seeds = [seed for seed in range(SEEDS, SEEDS + 10 * count) if seed % LAYOUTS not in UNSEEN_LAYOUTS]
    return [f"bundled:{ALFWORLD_TASK_TYPE}/{seed}" for seed in seeds[:count]]


ALFWORLD_TASK_TYPE = "pick_and_place_simple"
POINTS24_POOL = points24_pool()
