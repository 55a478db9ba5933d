"""What a step of environments costs in this process, in workers and in Ray actors.

    python examples/benchmarks/vectorization.py

The same environments take the same steps in each, in turn; there is no model. Of all vector steps the median counts,
because machines are noisy. The last columns are what Ray adds to a vector step of the workers, and that divided by the
environments. `--quick` only shows that it works.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing

import gymnasium as gym
import numpy as np
from rich.console import Console
from rich.table import Table

from trl_gtr import make_task
from trl_gtr.rollouts.playing import PlayingRules
from trl_gtr.rollouts.replay import LocalVectorEnv
from trl_gtr.rollouts.vector_envs import Vectorization, make_vector_env
from trl_gtr.rollouts.workers import WorkerVectorEnv


def seconds_of(envs: LocalVectorEnv | WorkerVectorEnv, steps: int, seed: int) -> list[float]:
    """The duration of each of `steps` vector steps with random actions."""
    space, rng, walls = envs.single_action_space, np.random.default_rng(seed), []
    assert isinstance(space, gym.spaces.Discrete)
    for _ in range(steps):
        actions = rng.integers(space.n, size=envs.num_envs)
        start = time.perf_counter()
        envs.step(actions)
        walls.append(time.perf_counter() - start)
    return walls


def compare(task: str, num_envs: int, args: argparse.Namespace) -> list[float]:
    """Median milliseconds of a vector step: local, workers, Ray."""
    rules = PlayingRules(make_task(task))
    kinds = [
        Vectorization("local"),
        Vectorization("workers"),
        Vectorization("ray", args.ray_address, args.ray_envs_per_actor),
    ]
    walls: list[list[float]] = [[] for _ in kinds]
    with ExitStack() as stack:
        vectors = [
            stack.enter_context(closing(make_vector_env(rules, num_envs, vectorization=kind))) for kind in kinds
        ]
        for envs in vectors:
            envs.reset(seed=list(range(num_envs)))
            seconds_of(envs, 3, seed=0)  # to warm up
        for seed in range(args.rounds):
            for envs, each in zip(vectors, walls, strict=True):
                each += seconds_of(envs, args.steps, seed)
    return [1000 * statistics.median(each) for each in walls]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["number_line", "points24"])
    parser.add_argument("--envs", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--steps", type=int, default=50, help="vector steps in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ray_address", help="a running cluster; by default a Ray of its own on this machine")
    parser.add_argument("--ray_envs_per_actor", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="two environments, ten steps")
    args = parser.parse_args(argv)
    if args.quick:
        args.tasks, args.envs, args.steps, args.rounds = args.tasks[:1], [2], 10, 1
    table = Table("task", "envs", "local", "workers", "Ray", "Ray / workers", "added", "per env")
    for task in args.tasks:
        for num_envs in args.envs:
            local, workers, ray = compare(task, num_envs, args)
            added = ray - workers
            times = [f"{each:.2f} ms" for each in (local, workers, ray)]
            table.add_row(
                task, str(num_envs), *times, f"{ray / workers:.1f}", f"{added:.2f} ms", f"{added / num_envs:.2f} ms"
            )
    Console().print(table)


if __name__ == "__main__":
    main()
