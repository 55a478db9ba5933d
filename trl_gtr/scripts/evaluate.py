"""Play a task with one or more agents on the same deals and compare them.

    trl-gtr evaluate --task points24 --hands pool --agents expert random tiny runs/points24
    trl-gtr evaluate --task ezpoints --agents openai:gpt-4o --episodes 50
    trl-gtr evaluate --task alfworld --split valid_unseen --episodes all

An agent is `expert`, `random`, `tiny`, a folder or hub name of a vision-language model, or `openai:MODEL` for one
behind an OpenAI-compatible server (`--base_url`). Greedy unless `--temperature` says otherwise. Success is shown with
its 95 % interval, over all deals, over those that can be won, and by the task's own kinds of deals. ALFWorld's games
and a set of Points24's hands are each played once before any comes again; `--episodes all` ends there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..evaluation.agents import Agent, NoAnswer, load_agent
from ..evaluation.evaluate import count_episodes, evaluate_agent
from ..evaluation.tables import difficulty_table, report_table
from ..runs.manifest import saved_task
from ..tasks import Task
from . import train as launch
from .arguments import one_line_errors, parse_arguments


@dataclass
class Arguments:
    task: str = field(default="points24", metadata={"help": "What is played."})
    hands: str = field(
        default="all",
        metadata={"help": "Points24: all (random deals), pool, unseen (outside the pool), or solvable (all 566)."},
    )
    split: str | None = field(default=None, metadata={"help": "ALFWorld: train, valid_seen or valid_unseen."})
    task_options: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "More options of `make_task`; JSON on the command line."}
    )
    agents: list[str] | None = field(
        default=None, metadata={"help": "Who plays; the expert, chance and the embedded model if left out."}
    )
    episodes: str = field(
        default="200", metadata={"help": "Episodes for each agent, or 'all': each game or hand of a set once."}
    )
    seed: int = field(default=0, metadata={"help": "Decides the deals."})
    temperature: float = field(default=0.0, metadata={"help": "Sampling temperature; 0 is greedy."})
    max_completion_length: int = field(default=256, metadata={"help": "Most new tokens of a response."})
    batch_size: int = field(default=32, metadata={"help": "Episodes side by side."})
    device: str = field(default="cuda" if torch.cuda.is_available() else "cpu", metadata={"help": "Where models run."})
    dtype: str = field(default="float32", metadata={"help": "Precision of models, e.g. bfloat16."})
    base_url: str | None = field(default=None, metadata={"help": "Server of openai:MODEL agents."})
    any_task: bool = field(default=False, metadata={"help": "Let agents play that were trained on another task."})
    output: str | None = field(default=None, metadata={"help": "Write every episode's result to this JSON file."})


def make_agent(name: str, task: Task, args: Arguments) -> Agent:
    is_model = name not in ("expert", "random") and not name.startswith("openai:")
    if is_model and not args.any_task and saved_task(name) not in (None, task.name):
        raise ValueError(f"{name} was trained on {saved_task(name)}: set --task to that, or --any_task to play on.")
    return load_agent(
        name,
        task,
        temperature=args.temperature,
        max_completion_length=args.max_completion_length,
        device=args.device,
        dtype=args.dtype,
        base_url=args.base_url,
    )


def _check(args: Arguments) -> None:
    """What would otherwise be found out when everything has been played."""
    for name in ("batch_size", "max_completion_length"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(args, name)}.")
    if args.temperature < 0:
        raise ValueError("--temperature must not be negative; 0 is greedy.")
    if not isinstance(getattr(torch, args.dtype, None), torch.dtype):
        raise ValueError(f"--dtype {args.dtype}: there is float32, bfloat16 and float16.")
    if args.output and not Path(args.output).absolute().parent.is_dir():
        raise ValueError(f"--output {args.output}: there is no such folder. Make it first.")


def main(argv: Sequence[str] | None = None, description: str | None = __doc__) -> None:
    with one_line_errors():
        (args,) = parse_arguments([Arguments], argv, description=description)
        _check(args)
        options = launch.task_options(args.task_options) | ({"evaluation_split": args.split} if args.split else {})
        task = launch.task_with_hands(args.task, args.hands, **options)
        task.make_env(evaluation=True).close()  # what it lacks is told now
        episodes = count_episodes(task, args.episodes, "--episodes")
        embedded = "tiny-alfworld" if args.task == "alfworld" else "tiny"
        agents = {name: make_agent(name, task, args) for name in args.agents or ("expert", "random", embedded)}
    reports = {}
    with one_line_errors(NoAnswer):
        for name, agent in agents.items():
            torch.manual_seed(args.seed)
            reports[name] = evaluate_agent(agent, task, episodes, seed=args.seed, num_envs=args.batch_size)
    console = Console()
    deals = f"split: {args.split}" if args.split else f"hands: {args.hands}"
    console.print(report_table(reports, f"{args.task}, {deals}, {episodes} episodes each"))
    if any(report.by_difficulty() for report in reports.values()):
        console.print(difficulty_table(reports, "success by kind of deal"))
    if args.output:
        written = {name: report.to_json() for name, report in reports.items()}
        Path(args.output).write_text(json.dumps(written, indent=1))
