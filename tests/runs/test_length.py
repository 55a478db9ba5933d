"""The length of runs whose rollouts are all of one size, and of those that vary."""

from __future__ import annotations

from itertools import pairwise

import pytest

from trl_gtr import GTRConfig
from trl_gtr.runs.length import RunLength


@pytest.fixture
def args(tmp_path) -> GTRConfig:
    sizes = {"num_envs": 4, "rollout_steps": 8, "total_env_steps": 320, "per_device_train_batch_size": 4}
    return GTRConfig(str(tmp_path), use_cpu=True, **sizes)


def test_rollouts_of_one_size(args) -> None:
    length = RunLength(args, varies=False)
    assert length.updates(0, 0) == length.updates(3, 96) == 10
    assert length.schedule_steps(0, 32) == 1


def test_short_episodes_take_more_updates(args) -> None:
    length = RunLength(args, varies=True)
    assert length.updates(0, 0) == 10  # as if every episode had `rollout_steps` steps
    assert length.updates(4, 64) == 20
    assert length.updates(20, 320) == 20


def test_a_schedule_ends_with_the_run(args) -> None:
    length = RunLength(args, varies=True)
    ends = [0, 50, 60, 200, 300, 350]
    taken = [length.schedule_steps(before, after) for before, after in pairwise(ends)]
    assert taken == [1, 0, 5, 3, 1]
    assert sum(taken) == args.num_updates
