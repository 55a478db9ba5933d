"""Training from the command line: what `trl-gtr train` and the example scripts run in every process.

parse → task → check the output folder → guide → load the model → trainer → train, evaluate, report
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from transformers.integrations import is_tensorboard_available
from trl import ModelConfig, get_peft_config, get_quantization_config

from .. import tiny_llava
from ..config import MODEL_INIT_KWARGS, GTRConfig, refused_fields
from ..correctors import CorrectorArguments
from ..distributed.signals import StopSignals
from ..engines.base import EngineLost, EngineRefused
from ..evaluation.evaluate import count_episodes
from ..evaluation.reports import EvaluationReport, read_evaluations, write_evaluations
from ..evaluation.tables import report_table
from ..guides.arguments import GuideArguments, make_guide
from ..guides.teacher_model import QUANTIZED
from ..learning.advantages import choose_estimator
from ..learning.experience import check_shaping
from ..learning.mismatch import SamplerMismatch
from ..policy.loading import load_policy, lora_target_modules
from ..report import write_report
from ..responses.safe_text import printable
from ..rollouts.all_ranks import make_collector
from ..rollouts.group_collector import check_restarts
from ..rollouts.vector_envs import Vectorization
from ..runs import output_folder
from ..runs.given import check_given
from ..runs.manifest import Manifest, find_checkpoint
from ..runs.stopping import HopelessRun
from ..storage.plain_data import json_options
from ..tasks import Task
from ..trainer import GTRTrainer
from .arguments import TaskArguments, parse_arguments
from .settings import command_line, settings_of, task_options_of, value_of, with_defaults
from .usage import one_line_errors

logger = logging.getLogger(__name__)


@dataclass
class ScriptArguments(TaskArguments):
    """Arguments of a run besides those of the trainer, model, corrector and guide."""

    preset: str | None = field(
        default=None,
        metadata={
            "help": "Published settings of a method: gtr, rl4vlm, vl_dac, grpo, rloo or gigpo. The file and the "
            "command line override them."
        },
    )
    eval_tasks: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": 'Separately reported evaluations: name → task options, e.g. {"seen": {"hands": "pool"}}. '
            "Default: the task as trained on."
        },
    )
    report: bool = field(default=True, metadata={"help": "Write report.html into the output folder at the end."})
    torch_threads: int | None = field(
        default=None,
        metadata={
            "help": "Torch threads on a CPU. Default: OMP_NUM_THREADS, which `accelerate launch` sets to 1, else all "
            "cores. More than one is faster only on an idle machine."
        },
    )

    _argument_group_name = "task"


ARGUMENTS = (ScriptArguments, GTRConfig, ModelConfig, CorrectorArguments, GuideArguments)


def train(argv: Sequence[str] | None = None, *, task: str | None = None) -> dict[str, EvaluationReport]:
    """Train an agent from the command line and return the evaluations before and after.

    Args:
        argv: The command line; `sys.argv` by default.
        task: The default task.
    """
    with one_line_errors():
        words = with_defaults(command_line(argv), task or ScriptArguments.task)
        script, args, model_args, corrector_args, guide_args = parse(argv=words)
        played, eval_tasks = make_tasks(script)
        args.output_dir = args.output_dir.replace("{task}", played.name)
        Vectorization.from_settings(args)  # connects to Ray, if that is asked for, before loading a model
        check_method(args, played)
        check_teacher(guide_args, model_args, words)
        report_other_game(played, model_args.model_name_or_path)
        check_output_dir(args, played)
        guide = make_guide(guide_args, corrector_args, args)
        guide.check_settings(args)
        check_shaping(guide, choose_estimator(None, args, played))
        check_given(args, played, model_args.model_name_or_path)  # the trainer would do so after the model is loaded
        model, processor, peft_config = load_model(model_args, args.model_init_kwargs)
        trainer = GTRTrainer(
            model=model,
            args=args,
            task=played,
            processing_class=processor,
            peft_config=peft_config,
            guide=guide,
        )
    report_rounding(args)
    return train_and_report(trainer, eval_tasks, report=script.report)


def parse(
    default_config: str | Path | None = None, argv: Sequence[str] | None = None, description: str | None = None
) -> tuple[ScriptArguments, GTRConfig, ModelConfig, CorrectorArguments, GuideArguments]:
    """Arguments of a run; the command line overrides `--config FILE` or the default file."""
    script, *others = parse_arguments(
        ARGUMENTS,
        argv,
        default_config=default_config,
        description=description,
        defaults={"report_to": "tensorboard" if is_tensorboard_available() else "none"},
        hidden=refused_fields(),
    )
    if script.torch_threads:
        torch.set_num_threads(script.torch_threads)
    return script, *others


def make_tasks(script: ScriptArguments) -> tuple[Task, dict[str, Task]]:
    """The task to train on, and the tasks to evaluate on, by name."""
    task = script.make_task()
    variants = json_options(script.eval_tasks, "eval_tasks", '{"seen": {"hands": "pool"}}')
    evaluations = {name: script.make_task(**task_options_of(options)) for name, options in variants.items()}
    evaluations = evaluations or {task.name: task}
    for each in evaluations.values():
        each.make_env(evaluation=True).close()  # fail early, before loading a model
    return task, evaluations


def check_method(args: GTRConfig, task: Task) -> None:
    """Check what the advantage estimator asks of the settings and the task, before loading a model."""
    estimator = choose_estimator(None, args, task)
    if estimator.needs_groups:
        check_restarts(task, args.seed)
        make_collector(task, None, args, estimator.teaches, num_envs=args.group_size).close()


def check_teacher(guide: GuideArguments, model: ModelConfig, words: Sequence[str]) -> None:
    """Refuse what contradicts a merged teacher, before loading a model.

    Args:
        words: The command line, which alone tells a corrector that was asked for from the default.
    """
    if guide.variant is None:
        return
    if model.load_in_4bit or model.load_in_8bit:
        raise ValueError(QUANTIZED)
    corrector = value_of(words, "corrector") or settings_of(words).get("corrector", "none")
    if corrector != "none" and not guide.asks_corrector:
        raise ValueError(
            f"--guide {guide.guide} doesn't ask --corrector {corrector}: add --turbo_with_corrector true to learn "
            "from both, or leave the corrector out."
        )


def report_other_game(task: Task, model: str | None) -> None:
    """Log it if an embedded model starts on another game than the one that it was fine-tuned on."""
    name = tiny_llava.name_of(model or "")
    if name not in tiny_llava.VARIANTS or not PartialState().is_main_process:
        return
    variant = tiny_llava.VARIANTS[name]
    known = variant.options if task.name in variant.tasks else {}
    if any(task.options[key] != value for key, value in known.items()):
        logger.warning(
            "%s was fine-tuned with %s, not with %s: expect it to start badly.",
            name,
            ", ".join(f"{key} {value}" for key, value in known.items()),
            ", ".join(f"{key} {task.options[key]}" for key in known),
        )


def report_rounding(args: GTRConfig) -> None:
    """Log it if the run is longer than requested, since it has only whole updates."""
    update = args.num_envs * args.rollout_steps
    fixed = args.group_size == 1  # a group's episodes are as long as they are
    if fixed and args.total_env_steps % update and PartialState().is_main_process:
        logger.warning(
            "total_env_steps = %d is rounded up to %d: %d updates of num_envs × rollout_steps = %d × %d steps.",
            args.total_env_steps,
            args.num_updates * update,
            args.num_updates,
            args.num_envs,
            args.rollout_steps,
        )


def check_output_dir(args: GTRConfig, task: Task) -> None:
    """Refuse to mix two runs in one folder or two tasks in one run, and check early that it is writable.

    Nothing is removed yet: an error before training starts must not destroy the earlier run.
    """
    if checkpoint := find_checkpoint(resume_from(args), args.output_dir, required=not args.overwrite):
        Manifest.read(checkpoint).check_task(checkpoint, task.name)
    if not PartialState().is_main_process:
        return  # it might see files the main process is already writing
    folder = Path(args.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"Can't create the output folder {folder} ({error.strerror}): set --output_dir.") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"No permission to write into {folder}: set --output_dir to another folder.")
    if checkpoint:
        return
    if problem := output_folder.problem(folder, args.overwrite):
        raise ValueError(problem)


def load_model(model_args: ModelConfig, model_init_kwargs: dict[str, Any] | str | None = None) -> tuple[Any, Any, Any]:
    """Model, processor and adapter config from TRL's `ModelConfig`; `model_init_kwargs` override it."""
    name = model_args.model_name_or_path
    if not name:
        raise ValueError("Which model? Set --model_name_or_path to a name, a folder, or `tiny`.")
    options: dict[str, Any] = {"revision": model_args.model_revision, "dtype": model_args.dtype}
    if model_args.attn_implementation:
        options["attn_implementation"] = model_args.attn_implementation
    quantization = get_quantization_config(model_args)
    if quantization is not None:
        # Quantized weights can't be moved later, so each process loads them onto its own device.
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
        # As in the paper: every linear layer except the LM head, including vision tower and projector.
        peft_config.target_modules = set(lora_target_modules(model))
    return model, processor, peft_config


def resume_from(args: GTRConfig) -> str | bool | None:
    """`--resume_from_checkpoint true` means the newest checkpoint; anything else is a path."""
    given = args.resume_from_checkpoint
    return True if isinstance(given, str) and given.lower() == "true" else given


@contextmanager
def one_line_endings() -> Iterator[None]:
    """Report in one line why a run can't go on, or why its engine can't begin."""
    endings = (HopelessRun, EngineLost, SamplerMismatch)
    with one_line_errors(endings, status=1), one_line_errors(EngineRefused):
        yield


def train_and_report(
    trainer: GTRTrainer, eval_tasks: Mapping[str, Task], report: bool = True
) -> dict[str, EvaluationReport]:
    """Evaluate, train, evaluate again, save, and show the results in a table and, with `report`, on a page.

    A resumed run's evaluations at the start are those of the run that it continues.
    """
    folder = Path(trainer.args.output_dir)
    checkpoint = trainer.checkpointer.find(resume_from(trainer.args))
    if checkpoint is None:
        reports = evaluate(trainer, eval_tasks, "start")
    else:
        earlier = read_evaluations(Path(checkpoint).parent)
        reports = {name: report for name, report in earlier.items() if name.endswith(", start")}
    if trainer.is_world_process_zero():
        write_evaluations(folder, reports)
    with one_line_endings():
        trainer.train(resume_from_checkpoint=resume_from(trainer.args))
    trainer.collector.close()
    trainer.save_model()  # before anything else can go wrong
    reports |= evaluate(trainer, eval_tasks, "end")
    trainer.close()
    trainer.save_state()
    if trainer.args.push_to_hub:
        trainer.push_to_hub()  # saving has pushed the agent, but only now does its card have the last evaluation
    else:
        trainer.create_model_card()
    if trainer.is_world_process_zero():
        write_evaluations(folder, reports)
        title = f"{trainer.task.name} before and after {trainer.state.global_step} updates, "
        played = (
            "each start once" if trainer.args.eval_episodes == "all" else f"{trainer.args.eval_episodes} episodes each"
        )
        Console().print(report_table(reports, title + played))
        print(printable(f"The agent is in {trainer.args.output_dir}."))
        if report:
            print_report_path(trainer.args.output_dir)
    return reports


@one_line_endings()
def evaluate(trainer: GTRTrainer, tasks: Mapping[str, Task], when: str) -> dict[str, EvaluationReport]:
    """Evaluate on every task, at the "start" or "end" of a run. Ctrl-C and SIGTERM end the process with one line."""
    reports = {}
    with StopSignals() as trainer.signals:
        for name, task in tasks.items():
            if trainer.is_world_process_zero():
                episodes = count_episodes(task, trainer.args.eval_episodes)
                print(f"Evaluation at the {when}, {episodes} episodes: {name}", flush=True)
            lost: EngineLost | None = None
            try:
                reports[f"{name}, {when}"] = trainer.evaluate(task, metric_key_prefix=f"{when}_{name}")
            except EngineLost as error:  # which all processes raise together
                lost = error
            received = next((each for each in trainer.processes.gather(trainer.signals.received) if each), None)
            if lost is not None and received is None:
                raise lost
            if received is not None:
                trained = when == "end"
                done = f"The agent is in {trainer.args.output_dir}" if trained else "Nothing has been trained yet"
                if trainer.is_world_process_zero():
                    logger.warning("%s received during an evaluation. %s.", signal.Signals(received).name, done)
                trainer.close()
                raise SystemExit(128 + received)
    return reports


def print_report_path(output_dir: str) -> None:
    """Write a finished run's report and print its path, or a hint if the `report` extra is missing."""
    try:
        print(printable(f"Report: {write_report([output_dir])}"))
    except ImportError as missing:
        print(missing)


if __name__ == "__main__":
    train()
