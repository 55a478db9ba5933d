"""The part of `trl-gtr evaluate` that needs torch: load the agents, play, and show how they did."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from rich.console import Console

from ..config import episode_count
from ..evaluation.agents import Agent, ExpertAgent, NoAnswer, PolicyAgent, RandomAgent, ServedAgent
from ..evaluation.evaluate import count_episodes, evaluate_agent
from ..evaluation.tables import difficulty_table, report_table
from ..policy.loading import load_policy
from ..policy.scoring import VLMPolicy
from ..runs.manifest import saved_task
from ..tasks import Task
from .evaluate import Arguments
from .settings import default_config, read_yaml, task_options_of
from .usage import one_line_errors


def make_agent(name: str, task: Task, args: Arguments) -> Agent:
    if name == "expert":
        return ExpertAgent(task)
    if name == "random":
        return RandomAgent()
    if name.startswith("openai:"):
        return ServedAgent(
            name.removeprefix("openai:"),
            base_url=args.base_url,
            temperature=args.temperature,
            max_completion_length=args.max_completion_length,
        )
    if not args.any_task and saved_task(name) not in (None, task.name):
        raise ValueError(f"{name} was trained on {saved_task(name)}: set --task to that, or --any_task to play on.")
    model, processor = load_policy(name, dtype=args.dtype)
    model = model.to(args.device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    policy = VLMPolicy(
        model,
        processor,
        temperature=args.temperature or 1.0,
        max_completion_length=args.max_completion_length,
    )
    greedy = args.temperature == 0
    return PolicyAgent(lambda prompts, images: policy.generate(model, prompts, images, greedy=greedy))


def play(args: Arguments) -> None:
    """Every agent plays the same deals; the results go to the terminal and, if asked for, to a file."""
    with one_line_errors():
        episode_count(args.episodes, "--episodes")
        options = task_options_of(args.task_options)
        task = args.make_task()
        task.make_env(evaluation=True).close()  # what it lacks fails now
        episodes = count_episodes(task, args.episodes)
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
    """The expert, chance, and the embedded model that the task's own settings train, if it has any."""
    config = default_config(task)
    return ["expert", "random", *([] if config is None else [read_yaml(config)["model_name_or_path"]])]
