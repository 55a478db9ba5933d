"""How a rollout is cut into mini-batches, on one process and on several."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from trl_gtr.learning.update import Updater

ENVS, STEPS = 8, 6


def mini_batches(processes: int, steps: list[int], rank: int, accumulation: int = 2, size: int = 12) -> list:
    """Of one process: each mini-batch as (environment, step) pairs by micro-batch, and its size over all."""
    local = ENVS // processes
    made = steps[rank]
    experience = SimpleNamespace(
        transitions=[SimpleNamespace(response_ids=np.zeros(1 + (i * 7) % 5)) for i in range(local * made)], steps=steps
    )
    args = SimpleNamespace(
        num_envs=ENVS,
        rollout_steps=STEPS,
        per_device_train_batch_size=size // processes // accumulation,
        gradient_accumulation_steps=accumulation,
    )
    updater = SimpleNamespace(args=args, processes=SimpleNamespace(rank=rank, count=processes))

    def places(chosen: np.ndarray) -> list:
        return [(rank * local + i % local, i // local) for i in chosen.tolist()]

    found = Updater._mini_batches(updater, experience, [0, 1, 2])  # type: ignore[arg-type]
    return [([places(micro) for micro in batch.micro_batches], batch.size) for batch in found]


def flat(micro_batches: list) -> list:
    return [place for micro in micro_batches for place in micro]


def test_two_processes_learn_from_the_same_mini_batches_as_one() -> None:
    alone = mini_batches(1, [STEPS], 0)
    first, second = (mini_batches(2, [STEPS, STEPS], rank) for rank in (0, 1))
    assert len(alone) == ENVS * STEPS // 12
    for (whole, size), (one, _), (other, _) in zip(alone, first, second, strict=True):
        assert size == 12
        assert sorted(flat(whole)) == sorted(flat(one) + flat(other))


@pytest.mark.parametrize("made", [[6, 4], [1, 6], [3, 3], [1, 1]])
def test_where_time_ran_out_every_step_that_exists_counts_once(made: list[int]) -> None:
    first, second = (mini_batches(2, made, rank) for rank in (0, 1))
    assert len(first) == len(second)
    seen: Counter = Counter()
    for (one, size), (other, also) in zip(first, second, strict=True):
        assert len(one) == len(other)  # as many passes on both, empty ones included
        assert size == also == len(flat(one)) + len(flat(other)) > 0  # what the losses are divided by
        seen.update(flat(one) + flat(other))
    local = ENVS // 2
    exist = {(rank * local + env, step) for rank in (0, 1) for env in range(local) for step in range(made[rank])}
    assert seen == Counter(exist)
