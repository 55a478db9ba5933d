"""How much faster do two processes collect than one? Measured in turns in one run, because machines are noisy.

    accelerate launch --config_file examples/accelerate_configs/cpu_2proc.yaml examples/benchmarks/two_processes.py

1. The same number of environments on one process with one thread, on one with two threads, and on two processes with
   one thread each; the other process sleeps meanwhile.
2. The cost model of docs/scaling: a vector step takes a + b · environments. Fitted to the smallest and the largest
   number of environments, it is compared with what lies between.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from statistics import median

import torch
from accelerate import Accelerator
from rich.console import Console

from trl_gtr import ExpertCorrector, launch, tiny_llava
from trl_gtr.policy import VLMPolicy
from trl_gtr.processes import Processes
from trl_gtr.rollouts import RolloutCollector


def make_collector(policy: VLMPolicy, model: object, num_envs: int, first_index: int = 0) -> RolloutCollector:
    generate = partial(policy.generate, model)
    task = launch.task_with_hands("points24", "pool")
    return RolloutCollector(task, generate, ExpertCorrector(), num_envs=num_envs, first_index=first_index)


def seconds(collector: RolloutCollector, steps: int, threads: int = 1) -> float:
    torch.set_num_threads(threads)
    start = time.perf_counter()
    collector.collect(steps)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, default=16, help="environments, all processes together")
    parser.add_argument("--steps", type=int, default=4, help="vector steps for each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind, in turns; medians are shown")
    args = parser.parse_args()
    processes = Processes(Accelerator(cpu=True), timeout=1800)
    if processes.count != 2:
        raise SystemExit("error: start it with two processes, as the first lines of this file say.")
    model, processor = tiny_llava.load()
    policy = VLMPolicy(model, processor, temperature=0.2, max_completion_length=64)
    half = args.envs // 2
    whole, part = make_collector(policy, model, args.envs), make_collector(policy, model, half, processes.rank * half)
    for collector in (whole, part):
        collector.collect(1)  # so that hands and cards are known, as they are in a run

    walls: dict[str, list[float]] = {"one process": [], "one, two threads": [], "two processes": []}
    for _ in range(args.rounds):
        for name, threads in (("one process", 1), ("one, two threads", 2)):
            processes.meet("round")
            walls[name].append(max(processes.gather(seconds(whole, args.steps, threads) if not processes.rank else 0)))
        processes.meet("round")
        walls["two processes"].append(max(processes.gather(seconds(part, args.steps))))
    sizes = (args.envs // 4, args.envs // 2, args.envs)
    step = {}
    for size in sizes:
        collector = make_collector(policy, model, size)
        collector.collect(1)
        processes.meet("size")
        step[size] = processes.gather(seconds(collector, args.steps) / args.steps if not processes.rank else 0)[0]
    if processes.rank == 0:
        report(Console(), args, walls, step)


def report(console: Console, args: argparse.Namespace, walls: dict[str, list[float]], step: dict[int, float]) -> None:
    base = median(walls["one process"])
    for name, times in walls.items():
        console.print(
            f"{name:>16}: {args.envs * args.steps / median(times):5.1f} steps/s, {base / median(times):.2f} × one "
            f"process (rounds: {', '.join(f'{t:.1f} s' for t in times)})"
        )
    small, middle, large = sorted(step)
    slope = (step[large] - step[small]) / (large - small)
    start = step[small] - slope * small
    predicted = start + slope * middle
    console.print(
        f"A vector step of E environments takes {start:.3f} + {slope:.4f} E seconds; at E = {middle} that is "
        f"{predicted:.3f} s, measured {step[middle]:.3f} s."
    )


if __name__ == "__main__":
    main()
