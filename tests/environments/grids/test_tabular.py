"""Optimal actions from listed transitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from trl_gtr.environments.grids.frozen_lake import FrozenLakeMapsEnv
from trl_gtr.environments.grids.tabular import action_values, best_actions

SMALL = ["SFF", "FHF", "FFG"]


def value_iteration(transitions: Any, gamma: float) -> np.ndarray:
    """Another algorithm for the same values, as in Sutton and Barto's book."""
    values = np.zeros(len(transitions))
    for _ in range(3000):
        q = np.array(
            [
                [
                    sum(p * (r + gamma * values[s] * (not over)) for p, s, r, over in outcomes)
                    for outcomes in by.values()
                ]
                for by in transitions.values()
            ]
        )
        if np.abs(q.max(axis=1) - values).max() < 1e-14:
            break
        values = q.max(axis=1)
    return q


def test_values_by_hand() -> None:
    """Three states in a row; action 1 goes right and pays 1 at the end, action 0 pays 0.5 at once and ends."""
    transitions = {
        0: {0: [(1.0, 0, 0.5, True)], 1: [(1.0, 1, 0.0, False)]},
        1: {0: [(1.0, 0, 0.5, True)], 1: [(0.5, 2, 1.0, True), (0.5, 1, 0.0, False)]},
        2: {0: [(1.0, 2, 0.0, True)], 1: [(1.0, 2, 0.0, True)]},
    }
    at_1 = 0.5 / (1 - 0.5 * 0.9)  # v = 0.5 + 0.9 · 0.5 · v
    expected = [[0.5, 0.9 * at_1], [0.5, at_1], [0.0, 0.0]]
    assert action_values(transitions, gamma=0.9) == pytest.approx(np.array(expected))


@pytest.mark.parametrize("slippery", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_policy_iteration_agrees_with_value_iteration(slippery: bool, seed: int) -> None:
    env = FrozenLakeMapsEnv()
    _, info = env.reset(seed=seed)
    transitions = FrozenLakeEnv(desc=info["map"], is_slippery=slippery).P
    assert action_values(transitions, 0.95) == pytest.approx(value_iteration(transitions, 0.95), abs=1e-10)


def test_equally_good_actions_are_all_found() -> None:
    values = action_values(FrozenLakeEnv(desc=SMALL, is_slippery=False).P)
    assert best_actions(values[0]) == [1, 2]  # both ways around the hole
    assert best_actions(values[1]) == [2]
    assert best_actions(values[5]) == [1]
