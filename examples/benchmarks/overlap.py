"""When does overlapped collection (`GTRConfig.overlap`) pay?

    python examples/benchmarks/overlap.py

Both collectors play the same task with the embedded model, in turn, in one process. Every environment step waits for
as long as a simulator would take, without using the CPU. In this process, environments wait one after another; with
`--workers` each has a process of its own, and they wait at the same time. Of `--rounds` rollouts the median counts,
because machines are noisy. A ratio above 1 means that overlapping is faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import gymnasium as gym
import torch
from rich.console import Console
from rich.table import Table

from trl_gtr import Engine, RolloutCollector, TransformersEngine, load_policy, make_task
from trl_gtr.policy.scoring import VLMPolicy
from trl_gtr.rollouts.overlapped_collector import OverlappedCollector
from trl_gtr.tasks.base import Task


class Waiting(gym.Wrapper):
    """Takes `seconds` longer for each step."""

    def __init__(self, env: gym.Env, seconds: float) -> None:
        super().__init__(env)
        self.seconds = seconds

    def step(self, action: Any) -> Any:
        time.sleep(self.seconds)
        return self.env.step(action)


def slow_task(seconds: float, workers: bool) -> Task:
    task = make_task("points24")
    make_env = task.make_env
    task.make_env = lambda **options: Waiting(make_env(**options), seconds)  # type: ignore[method-assign]
    task.vectorization = "processes" if workers else "sync"
    return task


def compare(engine: Engine, num_envs: int, milliseconds: float, args: argparse.Namespace) -> list[float]:
    """Median seconds of a vector step, in lock-step and overlapped."""
    collectors = [
        kind(slow_task(milliseconds / 1000, args.workers), num_envs=num_envs, seed=0)
        for kind in (RolloutCollector, OverlappedCollector)
    ]
    seconds: list[list[float]] = [[], []]
    with closing(collectors[0]), closing(collectors[1]):
        for _ in range(args.rounds):
            for collector, walls in zip(collectors, seconds, strict=True):
                start = time.perf_counter()
                collector.collect(engine, args.steps)
                walls.append((time.perf_counter() - start) / args.steps)
    return [statistics.median(walls) for walls in seconds]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[0, 10, 30], help="each step waits this long")
    parser.add_argument("--workers", action="store_true", help="each environment in a process of its own")
    parser.add_argument("--steps", type=int, default=8, help="vector steps in a rollout")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    model, processor = load_policy("tiny")
    engine = TransformersEngine(VLMPolicy(model, processor, temperature=0.2, max_completion_length=64), model)
    table = Table("environments", "step", "lock-step", "overlapped", "lock-step / overlapped")
    for num_envs in args.envs:
        for milliseconds in args.milliseconds:
            lock_step, overlapped = compare(engine, num_envs, milliseconds, args)
            times = f"{lock_step:.2f} s", f"{overlapped:.2f} s", f"{lock_step / overlapped:.2f}"
            table.add_row(str(num_envs), f"{milliseconds:g} ms", *times)
    Console().print(table)


if __name__ == "__main__":
    main()
