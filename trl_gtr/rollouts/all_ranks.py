"""Collecting on all processes at once: each plays its own environments, then all wait and say how it went."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from accelerate import PartialState

from ..config import GTRConfig
from ..correctors.base import Corrector
from ..distributed.processes import Processes
from ..tasks.base import Task
from ..types import Rollout
from .collector import RolloutCollector

logger = logging.getLogger(__name__)


class Collected(NamedTuple):
    """This process's rollout, and what each process reports, in the order of the ranks."""

    rollout: Rollout
    """Empty where this process can't act."""
    steps: Sequence[int]
    """How many transitions each has."""
    seconds: Sequence[float]
    received: Sequence[int | None]
    """The signal that each has received."""
    faults: Sequence[str | None]
    """Why each can't act."""

    def warn_of_late(self, planned: int) -> None:
        """Name the processes that ran out of time.

        Args:
            planned: Transitions of a whole rollout of one process.
        """
        late = "Process %d ran out of time (rollout_timeout): it hands in %d of %d steps after %.1f s."
        for rank, (steps, spent) in enumerate(zip(self.steps, self.seconds, strict=True)):
            if steps < planned:
                logger.warning(late, rank, steps, planned, spent)


def collect_on_all_ranks(
    collect: Callable[[], Rollout], processes: Processes, received: Callable[[], int | None]
) -> Collected:
    """Call `collect` on every process and wait for all.

    Args:
        collect: Plays this process's environments. Logits that aren't finite raise a `FloatingPointError`, which is
            reported instead: the others would wait.
        processes: All processes of the run.
        received: The signal that this process has received by then.
    """
    start, rollout, fault = time.perf_counter(), Rollout([], [], [], []), None
    try:
        rollout = collect()
    except FloatingPointError as error:
        fault = str(error)
    seconds = time.perf_counter() - start
    rollout.times["wait_for_processes"] = processes.barrier("collection")
    reports = processes.gather((len(rollout), seconds, received(), fault))
    collected = Collected(rollout, *zip(*reports, strict=True))
    if len(reports) > 1:
        rollout.times |= {f"collect_rank_{rank}": spent for rank, spent in enumerate(collected.seconds)}
    return collected


def make_collector(task: Task, corrector: Corrector | None, args: GTRConfig) -> RolloutCollector:
    """A collector of this process's share of the run's environments."""
    num_envs = args.num_envs // PartialState().num_processes
    return RolloutCollector(
        task,
        corrector,
        num_envs=num_envs,
        first_index=PartialState().process_index * num_envs,
        seed=args.seed,
        invalid_action=args.invalid_action,
        pickle_environments=args.pickle_environments,
        exact_resume=not args.allow_changed_config,
    )
