"""What can a start do before any reinforcement learning? Success, reading and valid JSON on its games.

python examples/benchmarks/tiny_start.py --model_name_or_path runs/sft_tiny
python examples/benchmarks/tiny_start.py --model_name_or_path tiny-grids --games frozen_lake
python examples/benchmarks/tiny_start.py --output trl_gtr/tiny_llava/figures.json     # what ships is held to it
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import HfArgumentParser

from trl_gtr import Engine, PolicyAgent, Task, TransformersEngine, evaluate_agent, load_policy, make_task
from trl_gtr.evaluation.reports import Rate
from trl_gtr.policy.scoring import VLMPolicy
from trl_gtr.tiny_llava import CARD_GAMES

# task, its starts, and the options that choose them
GAMES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("points24", "pool", {"hands": "pool"}),
    ("points24", "unseen", {"hands": "unseen"}),
    ("ezpoints", "all", {}),
    ("number_line", "all", {}),
    ("blackjack", "all", {}),
    ("frozen_lake", "train", {"split": "train", "env_kwargs": {"max_episode_steps": 20}}),
    ("frozen_lake", "unseen", {"split": "unseen", "env_kwargs": {"max_episode_steps": 20}}),
    ("minigrid", "all", {"env_kwargs": {"max_steps": 24}}),
)


@dataclass
class Arguments:
    model_name_or_path: str = field(default="tiny", metadata={"help": "A name, a folder, or tiny."})
    games: list[str] = field(default_factory=lambda: list(CARD_GAMES), metadata={"help": "Tasks to play."})
    episodes: int = field(default=192, metadata={"help": "Episodes a game."})
    temperature: float = field(default=0.5, metadata={"help": "Of the sampled rows."})
    max_completion_length: int = field(default=96, metadata={"help": "In tokens."})
    seed: int = field(default=1, metadata={"help": "Decides the deals and the samples."})
    output: str | None = field(default=None, metadata={"help": "Update the figures in this JSON file."})


class ReadingAgent(PolicyAgent):
    """A model whose every response is also checked for what it says is in the picture."""

    def __init__(self, engine: Engine, task: Task, greedy: bool) -> None:
        super().__init__(engine, greedy)
        self.task, self.read, self.seconds = task, [], 0.0  # type: ignore[var-annotated]

    def respond(
        self, prompts: list[str], images: list[np.ndarray], infos: Sequence[Mapping[str, Any]]
    ) -> Sequence[str]:
        started = time.perf_counter()
        texts = super().respond(prompts, images, infos)
        self.seconds += time.perf_counter() - started
        for text, info in zip(texts, infos, strict=True):
            judged = self.task.judge(self.task.format.parse(text), info)
            self.read.append(all(judged[part] for part in self.task.reading_parts))  # type: ignore[attr-defined]
        return texts


def main() -> None:
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    model, processor = load_policy(args.model_name_or_path)
    options = {"temperature": args.temperature, "max_completion_length": args.max_completion_length}
    engine = TransformersEngine(VLMPolicy(model, processor, **options), model)
    table = Table("game", "starts", "", "success", "reading", "true thoughts", "valid", "steps/s")
    figures = []
    for name, starts, task_options in (game for game in GAMES if game[0] in args.games):
        task = make_task(name, **task_options)
        for greedy in (True, False):
            torch.manual_seed(args.seed)
            agent = ReadingAgent(engine, task, greedy)
            report = evaluate_agent(agent, task, args.episodes, seed=args.seed, num_envs=64)
            metrics, read = report.metrics(), Rate(sum(agent.read), len(agent.read))
            speed = len(agent.read) / agent.seconds
            shares = [f"{value:.3f}" for value in (read.value, metrics["true_thoughts"], metrics["valid"])]
            mode = "greedy" if greedy else "sampled"
            table.add_row(name, starts, mode, str(report.success), *shares, f"{speed:.0f}")
            measured = {"reading": read.value, **metrics}
            figures.append({"task": name, "starts": starts, "mode": mode, "options": task_options, **measured})
    Console().print(table)
    if args.output:
        file = Path(args.output)
        others = json.loads(file.read_text("utf-8")) if file.exists() else []
        kept = [row for row in others if row["task"] not in args.games]
        file.write_text(json.dumps(kept + figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
