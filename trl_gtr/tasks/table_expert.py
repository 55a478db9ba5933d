"""The expert of an environment that lists its own transitions, as gymnasium's toy texts do in `env.P`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
from gymnasium import spaces

from ..environments.grids.tabular import Transitions, action_values, best_actions


class TableExpert:
    """Names a best action in every state; `None` where none is better than another, as at the end.

    Args:
        transitions: What each action leads to, by state and index.
        actions: The index of each action that may be chosen, by name.
        keys: The parts of a thought that are asked for.
    """

    def __init__(self, transitions: Transitions, actions: Mapping[str, int], keys: Sequence[str]) -> None:
        allowed = {
            state: {place: by_action[index] for place, index in enumerate(actions.values())}
            for state, by_action in transitions.items()
        }
        self.names, self.keys, self.values = list(actions), list(keys), action_values(allowed)

    def __call__(self, info: Mapping[str, Any]) -> tuple[dict[str, str], str] | None:
        state = int(info["observation"])
        best = best_actions(self.values[state])
        if len(best) == len(self.names):
            return None
        action = self.names[best[0]]
        thought = {"observation": f"This is state {state}.", "thoughts": f"The best action is {action}."}
        return {key: thought[key] for key in self.keys}, action


def transitions_of(make_env: Callable[[], gym.Env]) -> Transitions | None:
    """The transitions that an environment lists for its states, if they are the same in every episode."""
    tables = [_table(make_env(), seed) for seed in (0, 1)]
    return tables[0] if tables[0] == tables[1] else None


def _table(env: gym.Env, seed: int) -> Transitions | None:
    space = env.observation_space
    try:
        if not env.has_wrapper_attr("P") or not isinstance(space, spaces.Discrete):
            return None
        env.reset(seed=seed)
        table = env.get_wrapper_attr("P")
    finally:
        env.close()
    return table if isinstance(table, Mapping) and set(table) == set(range(int(space.n))) else None
