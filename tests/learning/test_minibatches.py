"""How a rollout is cut into mini-batches, on one process and on several."""

from collections import Counter

import numpy as np
import pytest
from rollout_cases import transition

from trl_gtr.learning.minibatches import draw_mini_batches, learned_steps, stack

ENVS, STEPS = 8, 6


def steps_of(rank: int, processes: int, made: int) -> list:
    envs = range(rank * ENVS // processes, (rank + 1) * ENVS // processes)
    return [transition(env, step, tokens=1 + (step * 7 + env) % 5) for step in range(made) for env in envs]


def mini_batches(made: list[int], rank: int, accumulation: int = 2, size: int = 12, dropped: tuple = ()) -> list:
    """Of one process: each mini-batch as (environment, step) pairs by micro-batch, and its size over all."""
    processes = len(made)
    grids = []
    for each in range(processes):
        steps = steps_of(each, processes, made[each])
        kept = [(step.env_index, step.step) not in dropped for step in steps]
        local = ENVS // processes
        grids.append(learned_steps(steps, range(each * local, (each + 1) * local), kept))
    own = steps_of(rank, processes, made[rank])
    found = draw_mini_batches(
        own,
        stack(grids),
        micro_batch_size=size // processes // accumulation,
        accumulation_steps=accumulation,
        rank=rank,
        world_size=processes,
        seed=[0, 1, 2],
    )
    return [([[(own[i].env_index, own[i].step) for i in m] for m in b.micro_batches], b.size) for b in found]


def flat(micro_batches: list) -> list:
    return [place for micro in micro_batches for place in micro]


def test_two_processes_learn_from_the_same_mini_batches_as_one() -> None:
    alone = mini_batches([STEPS], 0)
    first, second = (mini_batches([STEPS, STEPS], rank) for rank in (0, 1))
    assert len(alone) == ENVS * STEPS // 12
    for (whole, size), (one, _), (other, _) in zip(alone, first, second, strict=True):
        assert size == 12
        assert sorted(flat(whole)) == sorted(flat(one) + flat(other))


@pytest.mark.parametrize("made", [[6, 4], [1, 6], [3, 3], [1, 1], [9, 2]])
def test_every_step_that_exists_counts_once(made: list[int]) -> None:
    """Where time ran out, and where a process made more steps than the others."""
    first, second = (mini_batches(made, rank) for rank in (0, 1))
    assert len(first) == len(second)
    seen: Counter = Counter()
    for (one, size), (other, also) in zip(first, second, strict=True):
        assert len(one) == len(other)  # as many passes on both, empty ones included
        assert size == also == len(flat(one)) + len(flat(other)) > 0  # what the losses are divided by
        seen.update(flat(one) + flat(other))
    local = ENVS // 2
    exist = {(rank * local + env, step) for rank in (0, 1) for env in range(local) for step in range(made[rank])}
    assert seen == Counter(exist)


def test_dropped_steps_are_in_no_mini_batch_and_no_divisor() -> None:
    dropped = tuple((env, step) for env in (0, 5) for step in range(STEPS))
    found = mini_batches([STEPS], 0, dropped=dropped)
    places = [place for batch, _ in found for place in flat(batch)]
    assert not set(places) & set(dropped)
    assert len(places) == len(set(places)) == sum(size for _, size in found) == (ENVS - 2) * STEPS


RAGGED = [1, 9, 2, 2, 7, 1, 3, 8]
"""Steps of each environment."""


def ragged(processes: int, size: int, accumulation: int = 1) -> list[list]:
    """The mini-batches of a rollout of whole episodes: those of each process."""
    local = ENVS // processes
    owned = [range(rank * local, (rank + 1) * local) for rank in range(processes)]
    steps = [[transition(env, step) for env in envs for step in range(RAGGED[env])] for envs in owned]
    grid = stack([learned_steps(own, envs) for own, envs in zip(steps, owned, strict=True)])
    micro = size // processes // accumulation
    options = {"micro_batch_size": micro, "accumulation_steps": accumulation, "world_size": processes, "seed": [5]}
    drawn = [list(draw_mini_batches(own, grid, **options, rank=rank)) for rank, own in enumerate(steps)]
    return [
        [([(own[i].env_index, own[i].step) for m in b.micro_batches for i in m], b.size) for b in batches]
        for own, batches in zip(steps, drawn, strict=True)
    ]


@pytest.mark.parametrize(
    ("size", "sizes"), [(4, [4] * 5 + [5] + [4] * 2), (8, [9, 8, 8, 8]), (12, [11] * 3), (64, [33])]
)
def test_mini_batches_of_a_ragged_rollout_are_as_large_as_asked(size: int, sizes: list[int]) -> None:
    (alone,) = ragged(1, size)
    assert sorted(found for _, found in alone) == sorted(sizes)
    assert [len(places) for places, _ in alone] == [found for _, found in alone]
    everything = [(env, step) for env in range(ENVS) for step in range(RAGGED[env])]
    assert sorted(place for places, _ in alone for place in places) == everything


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_a_ragged_rollout_is_cut_alike_on_two_processes_and_into_any_micro_batches(accumulation: int) -> None:
    (alone,) = ragged(1, 8)
    first, second = ragged(2, 8, accumulation)
    assert [sorted(places) for places, _ in alone] == [
        sorted(one + other) for (one, _), (other, _) in zip(first, second, strict=True)
    ]
    assert [size for _, size in alone] == [size for _, size in first] == [size for _, size in second]


def test_where_nothing_is_learned_there_is_no_mini_batch() -> None:
    everything = tuple((env, step) for env in range(ENVS) for step in range(STEPS))
    assert mini_batches([STEPS], 0, dropped=everything) == []


def test_micro_batches_hold_similar_lengths() -> None:
    for micro_batches, _ in mini_batches([STEPS], 0):
        lengths = [1 + (step * 7 + env) % 5 for env, step in flat(micro_batches)]
        assert lengths == sorted(lengths)


def test_the_seed_decides_the_shuffle() -> None:
    steps = steps_of(0, 1, STEPS)
    grid = learned_steps(steps, range(ENVS))
    sizes = {"micro_batch_size": 6, "accumulation_steps": 1, "rank": 0, "world_size": 1}
    draws = [[b.micro_batches[0].tolist() for b in draw_mini_batches(steps, grid, **sizes, seed=s)] for s in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_a_grid_by_hand() -> None:
    steps = [transition(4, 0), transition(5, 0), transition(4, 1)]
    assert learned_steps(steps, range(4, 6)).tolist() == [[True, True], [True, False]]
    assert learned_steps(steps, range(4, 6), [True, False, True]).tolist() == [[True, True], [False, False]]


def test_grids_are_stacked_to_the_widest() -> None:
    grid = stack([np.ones((1, 2), bool), np.ones((2, 3), bool)])
    assert grid.tolist() == [[True, True, False], [True, True, True], [True, True, True]]
