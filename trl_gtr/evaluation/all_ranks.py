"""Evaluating on all processes at once: each plays its share of the episodes, then all have the whole report."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import torch

from ..config import GTRConfig
from ..distributed.processes import Processes
from ..distributed.progress import Progress
from ..engines.base import UNABLE, Engine
from ..rollouts.vector_envs import Vectorization
from ..tasks.base import Task
from .agents import PolicyAgent
from .evaluate import evaluate_agent
from .reports import EpisodeResult, EvaluationReport

logger = logging.getLogger(__name__)


def evaluate_on_all_ranks(
    engine: Engine,
    task: Task,
    episodes: int,
    args: GTRConfig,
    processes: Processes,
    received: Callable[[], int | None],
    progress: Progress,
) -> tuple[EvaluationReport, bool]:
    """Play `episodes` episodes, shared out over the processes.

    Args:
        engine: Generates the responses.
        received: The signal that this process has received so far.
        progress: Told of every episode of this process that ends.

    Returns:
        The report of all processes, and whether a signal to any of them has cut it short.
    """
    several = processes.world_size > 1
    end = time.monotonic() + (args.ddp_timeout / 2 if several else math.inf)  # nobody waits longer for a slow one
    # Separate random numbers: evaluating more often must not change what is learned.
    with progress.shown(), engine.ready(), torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(args.seed + processes.rank)
        played: tuple[EpisodeResult, ...] = ()
        fault: Exception | None = None
        try:
            played = evaluate_agent(
                PolicyAgent(engine, greedy=args.eval_greedy),
                task,
                range(processes.rank, episodes, processes.world_size),
                seed=args.seed,
                num_envs=args.per_device_eval_batch_size,
                invalid_action=args.invalid_action,
                stopped=lambda: received() is not None or time.monotonic() > end,
                progress=progress,
                vectorization=Vectorization.from_settings(args),
            ).episodes
        except UNABLE as error:  # raised below on all processes, since the others wait
            fault = error if received() is None else None
        processes.barrier("evaluation")
    processes.raise_first(fault)
    signals, by_process = zip(*processes.gather((received(), played)), strict=True)
    everybody = sorted((episode for each in by_process for episode in each), key=lambda episode: episode.index)
    report = EvaluationReport(task.name, tuple(everybody), planned=episodes)
    stopped = any(signal is not None for signal in signals)
    if not (report.complete or stopped):
        logger.warning("Ran out of time: %d of %d episodes were evaluated.", len(everybody), episodes)
    return report, stopped
