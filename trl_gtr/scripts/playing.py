"""The part of `trl-gtr evaluate` that needs torch: load the agents, play, and show the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from ..evaluation.agents import Agent, NoAnswer, load_agent
from ..evaluation.evaluate import count_episodes, evaluate_agent
from ..evaluation.tables import difficulty_table, report_table
from ..runs.manifest import saved_history, saved_task
from ..tasks import Task
from .settings import default_config, read_options, task_options_of
from .usage import one_line_errors

if TYPE_CHECKING:
    from .arguments import AgentArguments
    from .evaluate import Arguments


def make_agent(name: str, task: Task, args: AgentArguments) -> Agent:
    is_model = name not in ("expert", "random") and not name.startswith("openai:")
    if is_model and not args.any_task and saved_task(name) not in (None, task.name):
        raise ValueError(
            f"{name} was trained on {saved_task(name)}: set --task to that, or --any_task to play anyway."
        )
    history = saved_history(name) if is_model and not args.any_task else None
    if history not in (None, (task.history_turns, task.history_images)):
        raise ValueError(
            f"{name} was trained with {history[0]} earlier turns in its prompts, {history[1]} of them with pictures: "
            f"set --history_turns {history[0]} --history_images {history[1]}, or --any_task to play anyway."
        )
    return load_agent(
        name,
        task,
        temperature=args.temperature,
        max_completion_length=args.max_completion_length,
        device=args.device,
        dtype=args.dtype,
        base_url=args.base_url,
    )


def play(args: Arguments) -> None:
    """Every agent plays the same deals; results go to the terminal and optionally to a file."""
    with one_line_errors():
        options = task_options_of(args.task_options)
        task = args.make_task()
        task.make_env(evaluation=True).close()  # fail early
        episodes = count_episodes(task, args.episodes, "--episodes")
        agents = {name: make_agent(name, task, args) for name in args.agents or default_agents(args.task)}
    reports = {}
    with one_line_errors(NoAnswer):
        for name, agent in agents.items():
            torch.manual_seed(args.seed)
            reports[name] = evaluate_agent(agent, task, episodes, seed=args.seed, num_envs=args.batch_size)
    console = Console()
    played = ", ".join([args.task, *(f"{name}: {value}" for name, value in options.items())])
    console.print(report_table(reports, f"{played}, {episodes} episodes each"))
    if any(report.by_difficulty() for report in reports.values()):
        console.print(difficulty_table(reports, "success by kind of deal"))
    if args.output:
        written = {name: report.to_json() for name, report in reports.items()}
        Path(args.output).write_text(json.dumps(written, indent=1))


def default_agents(task: str) -> list[str]:
    """The expert, random play, and the embedded model for the task, if there is one."""
    config = default_config(task)
    return ["expert", "random", *([] if config is None else [read_options(config)["model_name_or_path"]])]
