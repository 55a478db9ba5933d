"""From the command line to a trained agent: what the example scripts share.

parse → task → check the output folder → corrector → load the model → (script: trainer) → train, evaluate, report
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from transformers.integrations import is_tensorboard_available
from trl import ModelConfig, get_peft_config, get_quantization_config

from ..config import MODEL_INIT_KWARGS, GTRConfig, refused_fields
from ..correctors import CorrectorArguments
from ..evaluation.evaluate import count_episodes
from ..evaluation.reports import EvaluationReport
from ..evaluation.tables import report_table
from ..policy.loading import load_policy, lora_target_modules
from ..report import write_report
from ..responses.safe_text import printable
from ..runs import output_folder
from ..runs.manifest import Manifest, find_checkpoint
from ..storage.plain_data import json_options
from ..tasks import Task, make_task
from ..trainer import GTRTrainer
from .arguments import one_line_errors as one_line_errors, parse_arguments


@dataclass
class ScriptArguments:
    """What a script needs beside the trainer's, the model's and the corrector's arguments."""

    task: str = field(default="points24", metadata={"help": "points24, ezpoints, number_line or blackjack."})
    task_options: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "ALFWorld: options of its `make_task`, e.g. env_kwargs; JSON on the command line."},
    )
    hands: str = field(
        default="all",
        metadata={"help": "Points24 only: 'all' deals at random, 'pool' from the hands that the tiny model knows."},
    )
    eval_hands: list[str] = field(
        default_factory=lambda: ["all"],
        metadata={
            "help": "Points24 only: the hands of the evaluations, each reported apart; also 'unseen' and 'solvable'."
        },
    )
    cut: bool = field(default=True, metadata={"help": "End training episodes that can't be won any more."})
    report: bool = field(default=True, metadata={"help": "Write report.html into the output folder at the end."})
    torch_threads: int | None = field(
        default=None,
        metadata={
            "help": "Threads of torch on a CPU. Left out: OMP_NUM_THREADS, which `accelerate launch` sets to 1, else "
            "all cores. More than one is quicker on an idle machine only."
        },
    )

    _argument_group_name = "the script"


def parse(
    default_config: str | Path, argv: Sequence[str] | None = None, description: str | None = None
) -> tuple[ScriptArguments, GTRConfig, ModelConfig, CorrectorArguments]:
    """Arguments of a script: the command line over `--config FILE`, or over the script's own default file."""
    script, args, model_args, corrector_args = parse_arguments(
        (ScriptArguments, GTRConfig, ModelConfig, CorrectorArguments),
        argv,
        default_config=default_config,
        description=description,
        defaults={"report_to": "tensorboard" if is_tensorboard_available() else "none"},
        hidden=refused_fields(),
    )
    if script.torch_threads:
        torch.set_num_threads(script.torch_threads)
    return script, args, model_args, corrector_args


def task_options(given: dict[str, Any] | str | None) -> dict[str, Any]:
    """Options of a task, from a YAML file or, as JSON, from the command line."""
    return json_options(given, "task_options", '{"history": 4}')


def refuse_other_tasks(script: ScriptArguments, plays: str) -> None:
    """For a script that is made for one task."""
    if script.task != plays:
        make_task(script.task)  # a typo is told as such
        raise ValueError(f"This script plays {plays}: for {script.task} take examples/gym_cards.py.")


def refuse_unused(script: ScriptArguments, *names: str) -> None:
    """An option that does nothing is a mistake that nobody notices."""
    defaults = ScriptArguments()
    for name in names:
        if getattr(script, name) != getattr(defaults, name):
            raise ValueError(f"--{name} means nothing to this script: leave it out.")


def check_output_dir(args: GTRConfig, task: Task) -> None:
    """Refuse to mix two runs in one folder or two tasks in one run, and find out now whether it can be written.

    Nothing is removed yet: what fails until training begins must not cost the earlier run.
    """
    if checkpoint := find_checkpoint(resume_from(args), args.output_dir, required=not args.overwrite):
        Manifest.read(checkpoint).check_task(checkpoint, task.name)
    if not PartialState().is_main_process:
        return  # it may see what the main process has begun to write
    folder = Path(args.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"The output folder {folder} can't be made ({error.strerror}): set --output_dir.") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"No permission to write into {folder}: set --output_dir to another folder.")
    if checkpoint:
        return
    if problem := output_folder.problem(folder, args.overwrite):
        raise ValueError(problem)


def task_with_hands(name: str, hands: str = "all", **options: Any) -> Task:
    """A task; for Points24 with the tiny model's hands (`pool`), hands that no training has shown it (`unseen`), all
    that make 24 (`solvable`), or random ones (`all`)."""
    if hands == "all":
        return make_task(name, **options)
    if name != "points24" or hands not in ("pool", "unseen", "solvable"):
        raise ValueError(f"`hands` is all, or for points24 pool, unseen or solvable; not {hands!r} for {name}.")
    from ..tiny_llava import pool

    make_hands = {"pool": pool.points24_pool, "unseen": pool.unseen_hands, "solvable": pool.solvable_hands}
    return make_task(name, hands=make_hands[hands](), **options)


def load_model(model_args: ModelConfig, model_init_kwargs: dict[str, Any] | str | None = None) -> tuple[Any, Any, Any]:
    """Model, processor and adapter configuration, as TRL's `ModelConfig` describes them; `model_init_kwargs` go before
    what it says."""
    name = model_args.model_name_or_path
    if not name:
        raise ValueError("Which model? Set --model_name_or_path to a name, a folder, or `tiny`.")
    options: dict[str, Any] = {"revision": model_args.model_revision, "dtype": model_args.dtype}
    if model_args.attn_implementation:
        options["attn_implementation"] = model_args.attn_implementation
    quantization = get_quantization_config(model_args)
    if quantization is not None:
        # Quantized weights can't be moved afterwards: each process loads them onto its own device.
        options |= {"quantization_config": quantization, "device_map": {"": PartialState().local_process_index}}
    options |= json_options(model_init_kwargs, *MODEL_INIT_KWARGS)
    try:
        model, processor = load_policy(name, **options)
    except TypeError as error:
        if not model_init_kwargs:
            raise
        raise ValueError(f"{name} can't be loaded with these `model_init_kwargs`: {error}.") from error
    peft_config = get_peft_config(model_args)
    if peft_config is not None and options["revision"] != "main":
        peft_config.revision = options["revision"]
    if peft_config is not None and model_args.lora_target_modules is None:
        # As in the paper: every linear layer but the LM head, vision tower and projector included.
        peft_config.target_modules = set(lora_target_modules(model))
    return model, processor, peft_config


def resume_from(args: GTRConfig) -> str | bool | None:
    """`--resume_from_checkpoint true` is the newest one; anything else is a path."""
    given = args.resume_from_checkpoint
    return True if isinstance(given, str) and given.lower() == "true" else given


def train_and_report(
    trainer: GTRTrainer, eval_tasks: Mapping[str, Task], report: bool = True
) -> dict[str, EvaluationReport]:
    """Evaluate, train, evaluate again, save, and show what training did: in a table and, if asked, on a page."""
    reports: dict[str, EvaluationReport] = {}
    episodes = {name: count_episodes(task, trainer.args.eval_episodes) for name, task in eval_tasks.items()}

    def evaluate(when: str) -> None:
        for name, task in eval_tasks.items():
            if trainer.is_world_process_zero():
                print(f"Evaluation at the {when}, {episodes[name]} episodes: {name}", flush=True)
            reports[f"{name}, {when}"] = trainer.evaluate(task, metric_key_prefix=f"{when}_{name}")

    if not trainer.args.resume_from_checkpoint:
        evaluate("start")
    trainer.train(resume_from_checkpoint=resume_from(trainer.args))
    trainer.collector.close()
    trainer.save_model()  # before anything else can go wrong
    evaluate("end")
    trainer.close()
    trainer.save_state()
    if trainer.args.push_to_hub:
        trainer.push_to_hub()  # saving has pushed the agent, but its card knows the last evaluation only now
    else:
        trainer.create_model_card()
    if trainer.is_world_process_zero():
        title = f"{trainer.task.name} before and after {trainer.state.global_step} updates, "
        played = (
            "each start once" if trainer.args.eval_episodes == "all" else f"{trainer.args.eval_episodes} episodes each"
        )
        Console().print(report_table(reports, title + played))
        print(printable(f"The agent is in {trainer.args.output_dir}."))
        if report:
            print_report_path(trainer.args.output_dir)
    return reports


def print_report_path(output_dir: str) -> None:
    """Write the report of a run that is over, and say where it is; what a report needs is an extra."""
    try:
        print(printable(f"Look at it: {write_report([output_dir])}"))
    except ImportError as missing:
        print(missing)
