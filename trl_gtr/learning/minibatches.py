"""Drawing mini-batches from all processes' rollouts. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..types import Transition


@dataclass(frozen=True)
class MiniBatch:
    """The samples for one optimizer step, over all processes."""

    micro_batches: list[np.ndarray]
    """This process's share, as indices into its transitions. Empty ones keep processes in sync."""
    size: int
    """Number of samples over all processes."""


def learned_steps(transitions: Sequence[Transition], envs: range, kept: Sequence[bool] | None = None) -> np.ndarray:
    """Which of one process's steps to learn from: bool, (environments, steps of the longest).

    Args:
        transitions: The process's rollout. Environments may have different numbers of steps.
        envs: Global indices of its environments.
        kept: Whether to learn from each transition; `None` keeps all.
    """
    learned = np.zeros((len(envs), max((step.step + 1 for step in transitions), default=0)), bool)
    for i, step in enumerate(transitions):
        learned[step.env_index - envs.start, step.step] = kept is None or kept[i]
    return learned


def stack(grids: Sequence[np.ndarray]) -> np.ndarray:
    """The processes' [`learned_steps`] as one grid over all environments, padded to the widest."""
    width = max(grid.shape[1] for grid in grids)
    return np.concatenate([np.pad(grid, ((0, 0), (0, width - grid.shape[1]))) for grid in grids])


def count_mini_batches(samples: int, size: int) -> int:
    """Mini-batches of about `size` samples in an epoch; none if there is nothing to learn from."""
    return max(1, round(samples / size)) if samples else 0


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
    """Shuffled mini-batches over all processes, split into micro-batches of similar lengths to reduce padding.

    The steps to learn from, in a row environment by environment, are divided into chunks as long as there are
    mini-batches; each mini-batch takes one step from every chunk. So every process has about the same share of each
    mini-batch, and which steps are learned together depends only on the seed, not on the number of processes. If the
    steps don't divide evenly, the last chunk is shorter, and some mini-batches have one step less.

    Args:
        transitions: This process's rollout.
        learned: (environments of all processes, steps), bool: which steps to learn from.
        micro_batch_size: Samples per forward pass.
        accumulation_steps: Forward passes of each process in one mini-batch of full size.
        rank: Of this process.
        world_size: Number of processes.
        seed: Decides the shuffle; the same on all processes.
    """
    places = np.flatnonzero(learned)
    count = count_mini_batches(len(places), micro_batch_size * accumulation_steps * world_size)
    if not count:
        return
    index = np.full(learned.shape, -1)
    for i, transition in enumerate(transitions):
        index[transition.env_index, transition.step] = i
    lengths = np.array([len(transition.response_ids) for transition in transitions])
    owner = places // (learned.size // world_size)
    chunks = np.arange(-(-len(places) // count) * count).reshape(-1, count)
    for column in np.random.default_rng(seed).permuted(chunks, axis=1).T:
        drawn = column[column < len(places)]
        chosen = index.ravel()[places[drawn[owner[drawn] == rank]]]
        chosen = chosen[np.argsort(lengths[chosen], kind="stable")]
        rounds = math.ceil(np.bincount(owner[drawn]).max() / micro_batch_size)
        cuts = range(0, rounds * micro_batch_size, micro_batch_size)
        yield MiniBatch([chosen[cut : cut + micro_batch_size] for cut in cuts], len(drawn))
