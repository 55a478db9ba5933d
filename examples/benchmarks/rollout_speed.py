"""How fast is the collector? Everything is measured in one run, because machines are noisy.

    python examples/benchmarks/rollout_speed.py

1. Environment steps per second for 1, 8 and 32 environments, and for the same batches `model.generate` alone.
2. Where the time of a whole update goes.
3. What a corrector that takes a second a call costs, with a scripted policy whose vector step takes a second too
   (`--seconds` scales both down).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
import time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from trl_gtr import (
    Engine,
    ExpertCorrector,
    GTRConfig,
    GTRTrainer,
    RolloutCollector,
    TransformersEngine,
    load_policy,
    make_task,
)
from trl_gtr.policy.scoring import VLMPolicy
from trl_gtr.rollouts.clock import Clock
from trl_gtr.types import Generation

LENGTH = 64


def collection(console: Console, steps: int) -> None:
    """The embedded model on the hands that it plays."""
    model, processor = load_policy("tiny")
    policy = VLMPolicy(model, processor, temperature=0.2, max_completion_length=LENGTH)
    engine = TransformersEngine(policy, model)
    generating = Clock()
    raw = model.generate

    def timed(**inputs):  # type: ignore[no-untyped-def]
        with generating("raw"):
            return raw(**inputs)

    model.generate = timed
    table = Table("environments", "steps/s", "generate alone", "overhead", title="Collecting Points24")
    for num_envs in (1, 8, 32):
        collector = RolloutCollector(
            make_task("points24", hands="pool"),
            ExpertCorrector(),
            num_envs=num_envs,
            seed=0,
        )
        collector.collect(engine, steps)  # so that hands and cards are known, as they are in a run
        generating.seconds.clear()
        start = time.perf_counter()
        collector.collect(engine, steps)
        total, alone = time.perf_counter() - start, generating.seconds["raw"]
        env_steps = steps * num_envs
        table.add_row(
            str(num_envs), f"{env_steps / total:.1f}", f"{env_steps / alone:.1f}", f"{total / alone - 1:.1%}"
        )
    console.print(table)


def update(console: Console) -> None:
    """One whole update of 32 × 8 steps: what the phases cost."""
    with tempfile.TemporaryDirectory() as folder:
        args = GTRConfig(
            output_dir=folder,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            gradient_checkpointing=False,
            num_envs=32,
            rollout_steps=8,
            total_env_steps=512,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=32,
            max_completion_length=LENGTH,
        )
        model, processor = load_policy("tiny")
        trainer = GTRTrainer(model, args, make_task("points24"), ExpertCorrector(), processing_class=processor)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
    times = {k.removeprefix("time/"): v for k, v in trainer.state.log_history[-1].items() if k.startswith("time/")}
    table = Table("phase", "seconds", "share", title="One update of 256 steps, 4 PPO epochs")
    for phase, seconds in times.items():
        table.add_row(phase, f"{seconds:.2f}", f"{seconds / sum(times.values()):.0%}")
    console.print(table)


def latency(console: Console, seconds: float, steps: int) -> None:
    """A scripted policy: only the schedule is measured."""
    task = make_task("points24")

    class ScriptedEngine(Engine):
        def generate(self, prompts, images, greedy=False):  # type: ignore[no-untyped-def]
            time.sleep(seconds)
            text = task.format.render({"cards": [], "formula": "", "thoughts": ""}, "1")
            return [Generation(np.zeros(1, np.int64), text) for _ in prompts]

    class SlowCorrector(ExpertCorrector):
        delay = 0.0

        def correct(self, requests):  # type: ignore[no-untyped-def]
            time.sleep(self.delay)  # all of a vector step's requests at once: concurrency of num_envs
            return super().correct(requests)

    walls = []
    for delay in (0.0, seconds):
        corrector = SlowCorrector()
        corrector.delay = delay
        collector = RolloutCollector(task, corrector, num_envs=32, seed=0)
        start = time.perf_counter()
        collector.collect(ScriptedEngine(), steps)
        walls.append(time.perf_counter() - start)
    console.print(
        f"A corrector of {seconds:g} s a call, {steps} vector steps of {seconds:g} s with 32 environments: "
        f"{walls[1]:.2f} s instead of {walls[0]:.2f} s, {walls[1] / walls[0] - 1:.1%} more."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="vector steps for each measurement")
    parser.add_argument("--seconds", type=float, default=1.0, help="of the scripted policy and the slow corrector")
    args = parser.parse_args()
    torch.manual_seed(0)
    console = Console()
    collection(console, args.steps)
    update(console)
    latency(console, args.seconds, 2 * args.steps)


if __name__ == "__main__":
    main()
