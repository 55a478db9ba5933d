"""How much faster do two processes collect than one? Measured in turns in one run, because machines are noisy.

    accelerate launch --config_file examples/accelerate_configs/cpu_2proc.yaml examples/benchmarks/two_processes.py

1. The same number of environments on one process and on two, with one thread each; with `--two_threads` also on one
   process with two threads, which an idle machine likes and a busy one hates. The other process sleeps meanwhile.
2. The cost model of docs/scaling: a vector step takes a + b · environments. Fitted to the smallest and the largest
   number of environments, it is compared with what lies between.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from accelerate import Accelerator
from rich.console import Console

from trl_gtr import Engine, ExpertCorrector, RolloutCollector, TransformersEngine, load_policy, make_task
from trl_gtr.distributed.processes import Processes
from trl_gtr.policy.scoring import VLMPolicy


def make_collector(num_envs: int, first_index: int = 0) -> RolloutCollector:
    task = make_task("points24", hands="pool")
    return RolloutCollector(task, ExpertCorrector(), num_envs=num_envs, first_index=first_index, seed=0)


def seconds(engine: Engine, collector: RolloutCollector, steps: int, threads: int = 1) -> tuple[float, float]:
    """Of the clock, and of this process's CPU: what the clock would say if nobody else wanted the cores."""
    torch.set_num_threads(threads)
    start, cpu = time.perf_counter(), time.process_time()
    collector.collect(engine, steps)
    return time.perf_counter() - start, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, default=64, help="environments, all processes together")
    parser.add_argument("--steps", type=int, default=4, help="vector steps for each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind, in turns; medians are shown")
    parser.add_argument("--two_threads", action="store_true", help="measure one process with two threads too")
    args = parser.parse_args()
    processes = Processes(Accelerator(cpu=True), timeout=1800)
    if processes.world_size != 2:
        raise SystemExit("error: start it with two processes, as the first lines of this file say.")
    model, processor = load_policy("tiny")
    engine = TransformersEngine(VLMPolicy(model, processor, temperature=0.2, max_completion_length=64), model)
    half = args.envs // 2
    whole, part = make_collector(args.envs), make_collector(half, processes.rank * half)
    for collector in (whole, part):
        collector.collect(engine, 1)  # so that hands and cards are known, as they are in a run

    kinds = {"one process": 1, **({"one, two threads": 2} if args.two_threads else {})}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in (*kinds, "two processes")}
    for _ in range(args.rounds):
        for name, threads in kinds.items():
            processes.barrier("round")
            own = seconds(engine, whole, args.steps, threads) if processes.rank == 0 else (0.0, 0.0)
            times[name].append(slowest(processes.gather(own)))
        processes.barrier("round")
        times["two processes"].append(slowest(processes.gather(seconds(engine, part, args.steps))))
    step = {}
    for size in (args.envs // 4, args.envs // 2, args.envs):
        collector = make_collector(size)
        collector.collect(engine, 1)
        processes.barrier("size")
        step[size] = seconds(engine, collector, args.steps)[1] / args.steps if processes.rank == 0 else 0.0
    if processes.rank == 0:
        report(Console(width=120), times, step)


def slowest(each: list[tuple[float, float]]) -> tuple[float, float]:
    walls, cpus = zip(*each, strict=True)
    return max(walls), max(cpus)


def report(console: Console, times: dict[str, list[tuple[float, float]]], step: dict[int, float]) -> None:
    for name, measured in times.items():
        rounds = list(zip(times["one process"], measured, strict=True))
        wall, cpu = (median(one[i] / other[i] for one, other in rounds) for i in (0, 1))
        shown = ", ".join(f"{clock:.1f} s ({used:.1f} s of CPU)" for clock, used in measured)
        console.print(f"{name}: {shown}")
        console.print(f"    {wall:.2f} times as fast as one process by the clock, {cpu:.2f} by CPU seconds")
    small, middle, large = sorted(step)
    slope = (step[large] - step[small]) / (large - small)
    start = step[small] - slope * small
    predicted = start + slope * middle
    console.print(
        f"A vector step of E environments takes {start:.3f} + {slope:.4f} E seconds of CPU; at E = {middle} that is "
        f"{predicted:.3f} s, measured {step[middle]:.3f} s."
    )


if __name__ == "__main__":
    main()
