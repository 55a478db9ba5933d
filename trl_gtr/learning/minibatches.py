"""Which steps are learned together: drawing mini-batches from all processes' rollouts. Pure functions on numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..types import Transition


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step's samples, over all processes."""

    micro_batches: list[np.ndarray]
    """This process's share, as indices into its transitions. Empty ones keep it in step with the others."""
    size: int
    """Samples of all processes together."""


def learned_steps(
    transitions: Sequence[Transition], envs: range, num_steps: int, kept: Sequence[bool] | None = None
) -> np.ndarray:
    """Where one process has a step to learn from: bool, (environments, at least `num_steps`).

    Args:
        transitions: The process's rollout.
        envs: Global indices of its environments.
        num_steps: Steps of a whole rollout. Where time ran out, places are left empty.
        kept: Whether to learn from each transition; `None` keeps all.
    """
    width = max([num_steps, *(step.step + 1 for step in transitions)])
    learned = np.zeros((len(envs), width), bool)
    for i, step in enumerate(transitions):
        learned[step.env_index - envs.start, step.step] = kept is None or kept[i]
    return learned


def stack(grids: Sequence[np.ndarray]) -> np.ndarray:
    """The processes' [`learned_steps`] as one grid of all environments, as wide as the widest."""
    width = max(grid.shape[1] for grid in grids)
    return np.concatenate([np.pad(grid, ((0, 0), (0, width - grid.shape[1]))) for grid in grids])


def draw_mini_batches(
    transitions: Sequence[Transition],
    learned: np.ndarray,
    *,
    micro_batch_size: int,
    accumulation_steps: int,
    rank: int,
    world_size: int,
    seed: Sequence[int],
) -> Iterator[MiniBatch]:
    """Shuffled mini-batches of all processes' steps, cut into micro-batches of similar lengths: less padding.

    All places in a row, environment by environment, make as many equal stretches as a mini-batch has samples; each
    mini-batch takes one step of every stretch. So every process holds the same share of each mini-batch, and which
    steps are learned together depends on the seed alone, not on the number of processes.

    Args:
        transitions: This process's rollout.
        learned: (environments of all processes, steps), bool: where there is a step to learn from.
        micro_batch_size: Samples of one forward pass.
        accumulation_steps: Forward passes of each process in one mini-batch of full size.
        rank: Of this process.
        world_size: Number of processes.
        seed: Decides the shuffle; the same on all processes.
    """
    size = micro_batch_size * accumulation_steps * world_size
    learned = _divisible(learned, size)
    num_envs, num_steps = learned.shape
    index = np.full(learned.shape, -1)
    for i, transition in enumerate(transitions):
        index[transition.env_index, transition.step] = i
    lengths = np.array([len(transition.response_ids) for transition in transitions])
    stretches = np.arange(num_envs * num_steps).reshape(size, -1)
    order = np.random.default_rng(seed).permuted(stretches, axis=1).T
    for places in order.reshape(len(order), world_size, -1):
        counts = learned.ravel()[places].sum(axis=1)
        mine = places[rank][learned.ravel()[places[rank]]]
        chosen = index.ravel()[mine]
        chosen = chosen[np.argsort(lengths[chosen], kind="stable")]
        rounds = math.ceil(counts.max() / micro_batch_size)
        if rounds:
            cuts = range(0, rounds * micro_batch_size, micro_batch_size)
            yield MiniBatch([chosen[cut : cut + micro_batch_size] for cut in cuts], int(counts.sum()))


def _divisible(learned: np.ndarray, size: int) -> np.ndarray:
    """With empty places added at the end, so that equal stretches can be made of the whole."""
    num_envs, num_steps = learned.shape
    unit = size // math.gcd(size, num_envs)
    return np.pad(learned, ((0, 0), (0, -num_steps % unit)))
