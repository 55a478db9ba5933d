"""When does asynchronous collection (`GTRConfig.asynchronous`) pay?

    python examples/benchmarks/asynchronous.py

Both collectors play Points24 with the embedded model on vLLM, in turn, in one process. At a high temperature responses
differ in length: in lock-step all environments wait for the longest. Of `--rounds` rollouts the median counts. A ratio
above 1 means that asynchronous collection is faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import closing

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from trl_gtr import GTRConfig, RolloutCollector, load_policy, make_task
from trl_gtr.engines.vllm import VLLMEngine
from trl_gtr.engines.vllm_colocated import ColocatedVLLM
from trl_gtr.policy.scoring import VLMPolicy
from trl_gtr.rollouts.asynchronous_collector import AsynchronousCollector


def compare(engine: VLLMEngine, num_envs: int, args: argparse.Namespace) -> tuple[list[float], np.ndarray]:
    """Median milliseconds per token in lock-step and asynchronously, and the lengths of all responses."""
    collectors = [
        kind(make_task("points24"), num_envs=num_envs, seed=0) for kind in (RolloutCollector, AsynchronousCollector)
    ]
    costs: list[list[float]] = [[], []]
    lengths: list[int] = []
    with closing(collectors[0]), closing(collectors[1]), engine.ready():
        for _ in range(args.rounds):
            for collector, spent in zip(collectors, costs, strict=True):
                start = time.perf_counter()
                rollout = collector.collect(engine, args.steps)
                seconds, tokens = time.perf_counter() - start, [len(step.response_ids) for step in rollout.transitions]
                spent.append(1000 * seconds / sum(tokens))
                lengths += tokens
    return [statistics.median(spent) for spent in costs], np.array(lengths)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.2, 2.0])
    parser.add_argument("--tokens", type=int, default=128, help="longest response")
    parser.add_argument("--steps", type=int, default=8, help="of every environment in a rollout")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    model, processor = load_policy("tiny")
    config = GTRConfig(output_dir="unused", use_cpu=True, report_to="none")
    backend = ColocatedVLLM(model, processor, config, max(args.envs))
    columns = ("environments", "temperature", "tokens a response", "lock-step", "asynchronous")
    table = Table(*columns, "lock-step / asynchronous")
    for temperature in args.temperature:
        policy = VLMPolicy(model, processor, temperature=temperature, max_completion_length=args.tokens)
        engine = VLLMEngine(policy, model, backend)
        for num_envs in args.envs:
            (lock_step, alone), lengths = compare(engine, num_envs, args)
            spread = f"{lengths.mean():.0f}, {lengths.min()} to {lengths.max()}"
            times = f"{lock_step:.2f} ms a token", f"{alone:.2f} ms a token"
            table.add_row(str(num_envs), f"{temperature:g}", spread, *times, f"{lock_step / alone:.2f}")
    Console(width=120).print(table)
    backend.close()


if __name__ == "__main__":
    main()
