"""Optimal actions of environments that list their own transitions, as gymnasium's toy texts do in `env.P`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

Transitions: TypeAlias = Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]
"""State → action → outcomes: probability, next state, reward, terminated."""

GAMMA = 0.99
"""Below 1, so that a shorter way is better even where steps cost nothing."""
_EQUAL = 1e-9


def action_values(transitions: Transitions, gamma: float = GAMMA) -> np.ndarray:
    """The optimal value of each action in each state, float64, (states, actions), by policy iteration."""
    states, actions = len(transitions), len(transitions[0])
    chances = np.zeros((states, actions, states))
    rewards = np.zeros((states, actions))
    for state, by_action in transitions.items():
        for action, outcomes in by_action.items():
            for probability, after, reward, terminated in outcomes:
                rewards[state, action] += probability * reward
                chances[state, action, after] += probability * (not terminated)
    everywhere = np.arange(states)
    policy = np.zeros(states, np.int64)
    while True:
        followed = np.eye(states) - gamma * chances[everywhere, policy]
        values = rewards + gamma * chances @ np.linalg.solve(followed, rewards[everywhere, policy])
        better = values.max(axis=1) > values[everywhere, policy] + _EQUAL
        if not better.any():
            return values
        policy = np.where(better, values.argmax(axis=1), policy)


def best_actions(values: np.ndarray) -> list[int]:
    """The actions of one state that are equally best, given its action values."""
    return [int(action) for action in np.flatnonzero(values >= values.max() - _EQUAL)]
