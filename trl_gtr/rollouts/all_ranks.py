"""Collecting on all processes: each plays its own environments, then all wait and share a status."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from accelerate import PartialState

from ..config import GTRConfig
from ..correctors.base import Corrector
from ..distributed.processes import Processes
from ..engines.base import UNABLE, Engine, EngineLost
from ..tasks.base import Task
from ..types import Rollout
from .asynchronous_collector import AsynchronousCollector
from .collector import RolloutCollector
from .group_collector import Group, GroupCollector
from .overlapped_collector import OverlappedCollector
from .vector_envs import Vectorization

logger = logging.getLogger(__name__)


class Collected(NamedTuple):
    """This process's rollout, and every process's report, ordered by rank."""

    rollout: Rollout
    """Empty if this process failed to act."""
    steps: Sequence[int]
    """Number of transitions of each process."""
    seconds: Sequence[float]
    received: Sequence[int | None]
    """The signal each process received, if any."""
    faults: Sequence[Exception | None]
    """Why a process failed to act, if it did."""

    def warn_of_late(self, planned: int) -> None:
        """Warn about processes that ran out of time.

        Args:
            planned: Transitions in one process's full rollout.
        """
        late = "Process %d ran out of time (rollout_timeout): it collected %d of %d steps in %.1f s."
        for rank, (steps, spent) in enumerate(zip(self.steps, self.seconds, strict=True)):
            if steps < planned:
                logger.warning(late, rank, steps, planned, spent)


def collect_on_all_ranks(
    collect: Callable[[], Rollout], processes: Processes, received: Callable[[], int | None]
) -> Collected:
    """Call `collect` on every process and wait for all.

    Args:
        collect: Plays this process's environments. A `FloatingPointError` (non-finite logits) or `EngineLost` is
            reported rather than raised, because the other processes would wait.
        processes: All processes of the run.
        received: Returns the signal that this process has received, if any.
    """
    start, rollout = time.perf_counter(), Rollout([], [], [], [])
    fault: Exception | None = None
    try:
        rollout = collect()
    except UNABLE as error:
        fault = error.with_traceback(None)
    seconds = time.perf_counter() - start
    rollout.times["wait_for_processes"] = processes.barrier("collection")
    signal = received()
    if signal is not None and isinstance(fault, EngineLost):
        fault = None  # nobody waits for an engine any more
    reports = processes.gather((len(rollout), seconds, signal, fault))
    collected = Collected(rollout, *zip(*reports, strict=True))
    if len(reports) > 1:
        rollout.times |= {f"collect_rank_{rank}": spent for rank, spent in enumerate(collected.seconds)}
    return collected


def check_on_all_ranks(engine: Engine, collector: RolloutCollector, processes: Processes) -> None:
    """Have the engine check an observation of each process; if it refuses one, raise on all.

    Args:
        collector: Has the observations that come next.
    """
    fault: Exception | None = None
    with engine.ready():
        try:
            engine.check(*collector.first_observation)
        except Exception as error:  # all must learn of it: the others wait
            fault = error
        processes.raise_first(fault)


def make_collector(
    task: Task,
    corrector: Corrector | None,
    args: GTRConfig,
    teaches: Callable[[Group], bool] | None = None,
    num_envs: int | None = None,
) -> RolloutCollector:
    """A collector of this process's share of the run's environments.

    Args:
        teaches: Whether a group has anything to learn from; given if episodes are played in groups.
        num_envs: So many environments instead, to try them.
    """
    num_envs = num_envs or args.num_envs // PartialState().num_processes
    options: dict[str, Any] = {
        "num_envs": num_envs,
        "first_index": PartialState().process_index * num_envs,
        "seed": args.seed,
        "invalid_action": args.invalid_action,
        "pickle_environments": args.pickle_environments,
        "exact_resume": not args.allow_changed_config,
        "vectorization": Vectorization.from_settings(args),
    }
    if teaches is None:
        if args.asynchronous:
            return AsynchronousCollector(task, corrector, **options)
        return (OverlappedCollector if args.overlap else RolloutCollector)(task, corrector, **options)
    if args.overlap or args.asynchronous:
        name = "overlap" if args.overlap else "asynchronous"
        raise ValueError(f"`{name}` doesn't work with groups: leave it out, or use advantage_estimator='gae'.")
    options |= {"group_size": args.group_size, "refills": args.refill_groups, "teaches": teaches}
    collector = GroupCollector(task, corrector, **options)
    collector.check_timeout(args.rollout_deadline)
    return collector
