"""Named sets of Points24's hands."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest

from trl_gtr import make_task
from trl_gtr.tasks.points.hands import named_hands, points24_pool


def numbers(hand: list[str]) -> tuple[int, ...]:
    return tuple(sorted({"A": 1, "J": 10, "Q": 10, "K": 10}.get(rank) or int(rank) for rank in hand))


def makes_24(hand: tuple[float, ...]) -> bool:
    """Brute force in floating point, apart from the package's own solver."""
    if len(hand) == 1:
        return abs(hand[0] - 24) < 1e-6
    for i, a in enumerate(hand):
        for j, b in enumerate(hand):
            if i == j:
                continue
            rest = tuple(x for k, x in enumerate(hand) if k not in (i, j))
            results = [a + b, a - b, a * b] + ([a / b] if b else [])
            if any(makes_24((*rest, result)) for result in results):
                return True
    return False


def test_pool_unseen_and_reading_hands_part_the_solvable_ones() -> None:
    parts = [{numbers(hand) for hand in named_hands(name) or []} for name in ("pool", "unseen", "reading")]
    assert [len(part) for part in parts] == [64, 120, 382]
    assert len(set.union(*parts)) == 566
    assert all(makes_24(hand) for hand in parts[0] | parts[1])
    unsolvable = [hand for hand in combinations_with_replacement(range(1, 4), 4) if not makes_24(hand)]
    assert not set(unsolvable) & set.union(*parts)


def test_the_pool_is_always_the_same_and_playable() -> None:
    pool = points24_pool()
    assert pool == points24_pool() == make_task("points24", hands="pool").hands
    _, info = make_task("points24", hands="pool").make_env().reset(seed=0)
    assert numbers(["10" if card[1] == "T" else card[1] for card in info["Cards"]]) in map(numbers, pool)


def test_all_hands_are_random_deals_and_another_name_is_refused() -> None:
    assert make_task("points24", hands="all").hands is None
    with pytest.raises(ValueError, match="no hands 'many': choose all, pool, unseen, solvable"):
        make_task("points24", hands="many")
    with pytest.raises(ValueError, match="only Points24 has named sets"):
        make_task("ezpoints", hands="pool")
