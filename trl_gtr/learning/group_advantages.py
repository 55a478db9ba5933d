"""Advantages from comparing episodes that start in the same state. Pure functions, no value head.

A group is G episodes; `rewards` has one tensor per episode, (its steps,). Results have the same shapes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor

Norm = Literal["std", "mean"]
EPSILON = 1e-6


def grpo(rewards: Sequence[Tensor], norm: Norm = "std") -> list[Tensor]:
    """`(R − mean R) / (std R + 1e-6)` for every step of an episode, with its undiscounted return R (GRPO).

    `std` is the sample standard deviation, as in TRL and verl. `norm="mean"` doesn't divide.
    """
    relative = _relative(episode_returns(rewards), norm)
    return [advantage.expand(len(episode)) for advantage, episode in zip(relative, rewards, strict=True)]


def rloo(rewards: Sequence[Tensor]) -> list[Tensor]:
    """`R − mean of the other G − 1 returns` for every step of an episode (RLOO, arXiv 2402.14740)."""
    returns = episode_returns(rewards)
    others = (returns.sum() - returns) / (len(returns) - 1)
    return [advantage.expand(len(episode)) for advantage, episode in zip(returns - others, rewards, strict=True)]


def gigpo(
    rewards: Sequence[Tensor],
    states: Sequence[Sequence[Hashable]],
    gamma: float,
    step_coef: float,
    norm: Norm = "mean",
) -> list[Tensor]:
    """`A_E + ω · A_S` (GiGPO, arXiv 2505.10978): `grpo` plus a comparison of steps in the same state.

    `A_S` compares the discounted return from a step with that of all steps of the group in the same state; it is 0 for
    a state that occurs once.
    """
    following = torch.cat([discounted_returns(episode, gamma) for episode in rewards])
    within = torch.zeros_like(following)
    for steps in same_states(states):
        within[steps] = _relative(following[steps], norm)
    parts = within.split([len(episode) for episode in rewards])
    return [episode + step_coef * step for episode, step in zip(grpo(rewards, norm), parts, strict=True)]


def episode_returns(rewards: Sequence[Tensor]) -> Tensor:
    """Undiscounted returns, (G,)."""
    return torch.stack([episode.sum() for episode in rewards])


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    """`Σ_k γ^k r_{t+k}` of one episode's steps, (steps,)."""
    returns = rewards.clone()
    for t in reversed(range(len(rewards) - 1)):
        returns[t] += gamma * returns[t + 1]
    return returns


def same_states(states: Sequence[Sequence[Hashable]]) -> list[list[int]]:
    """Steps in the same state, for every state that occurs twice or more; steps are counted through the group."""
    found: dict[Hashable, list[int]] = defaultdict(list)
    for step, state in enumerate(state for episode in states for state in episode):
        found[state].append(step)
    return [steps for steps in found.values() if len(steps) > 1]


def _relative(returns: Tensor, norm: Norm) -> Tensor:
    """Returns relative to their mean, divided by their spread unless `norm` is "mean"; at least two of them."""
    relative = returns - returns.mean()
    return relative / (returns.std() + EPSILON) if norm == "std" else relative
