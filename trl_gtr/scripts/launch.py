"""Train a vision-language agent with GTR: `trl-gtr train`, through accelerate's launcher.

    trl-gtr train --task points24
    trl-gtr train --task ezpoints --corrector openai --corrector_model gpt-4o --corrector_max_usd 20
    trl-gtr train --task my_module:MyTask --config my_settings.yaml --num_processes 2

Without --config, points24, ezpoints, number_line, blackjack, alfworld, frozen_lake and minigrid train an embedded
model with their default settings, in minutes on a CPU; any other task needs settings. Task options can be given by
name (--hands pool) or as JSON (--task_options '{"hands": "pool"}'). Options of `accelerate launch` are passed on:
--num_processes, --config_file FILE, or --accelerate_config NAME for one of TRL's own files.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..tasks import task_options
from .options import Option, UnknownSource, imported_options, launcher_options, train_options
from .settings import (
    command_line,
    find_own_modules,
    given_options,
    preset_of,
    settings_of,
    task_of,
    value_of,
    with_defaults,
)
from .usage import check_names, format_help, one_line_errors, options_of_task

# Field headings in the sources → groups in the help, in this order.
_GROUPS = {
    "task": "task",
    "model": "model",
    "sizes": "sizes",
    "the response": "response",
    "what a step is worth": "what a step is worth",
    "defaults that differ from PPOConfig's": "PPO",
    "PPO": "PPO",
    "thought cloning": "thought cloning",
    "guide": "guide",
    "corrector": "corrector",
    "several processes, faults, resuming": "processes, faults, resuming",
    "logging": "output",
}
# Fields shown in a different group than their heading's, and the inherited ones every user needs.
_PLACED = {
    "per_device_train_batch_size": "sizes",
    "temperature": "response",
    "num_ppo_epochs": "PPO",
    "lr_scheduler_type": "PPO",
    "resume_from_checkpoint": "processes, faults, resuming",
    "output_dir": "output",
    "seed": "output",
    "save_strategy": "output",
    "save_steps": "output",
    "eval_strategy": "output",
    "logging_steps": "output",
    "report_to": "output",
    "bf16": "model",
    "model_init_kwargs": "model",
    "use_cpu": "model",
}
_MODEL = ("model_name_or_path", "dtype", "use_peft", "lora_r", "lora_alpha")


def main(argv: Sequence[str] | None = None) -> int:
    """`trl-gtr train`: check the arguments, then start `trl_gtr.scripts.train` through accelerate's launcher."""
    words = command_line(argv)
    with one_line_errors():
        check_words(words, description=__doc__, launcher=True)
        for_launcher, for_script = divide(words)
    return _launch(for_launcher, for_script)


def train(argv: Sequence[str] | None = None, *, task: str | None = None, description: str | None = None) -> None:
    """Train in this process, as the example scripts do under `accelerate launch`.

    Args:
        argv: The command line; `sys.argv` by default.
        task: The default task.
        description: First lines of `--help`.
    """
    words = command_line(argv)
    with one_line_errors():
        check_words(words, task=task, description=description, prog=Path(sys.argv[0]).name)
    from .train import train as train_here  # imports torch, which would slow down error messages

    train_here(words, task=task)


def _options() -> dict[str, Option]:
    try:
        return train_options()
    except UnknownSource:
        from .train import ARGUMENTS  # imports torch: slow, but right for any version

        return imported_options(ARGUMENTS)


def check_words(
    words: Sequence[str],
    *,
    task: str | None = None,
    description: str | None = None,
    prog: str = "trl-gtr train",
    launcher: bool = False,
) -> None:
    """Handle `--help` and raise a `ValueError` for an unknown option, without importing torch."""
    find_own_modules()
    known = _options()
    words = with_defaults(words, task or known["task"].default)
    task, values = task_of(words, known["task"].default), settings_of(words)
    preset_of(words)  # an unknown one is an error
    show_help(words, task, prog, description)
    theirs = set(launcher_options()) - set(known) if launcher else set()
    if misplaced := theirs & set(values):
        file = value_of(words, "config")
        raise ValueError(
            f"{file}: {misplaced.pop()} is an option of accelerate's launcher: give it on the command line."
        )
    check_names(words, {*known, *task_options(task), *theirs})


def show_help(
    words: Sequence[str], task: str, prog: str, description: str | None, first: Sequence[Option] = ()
) -> None:
    """Handle `--help` and `--help-all`: print the options, beginning with `first`, and exit."""
    asked = {"-h", "--help", "--help-all", "--help_all"} & set(words)
    if not asked:
        return
    full = not {"-h", "--help"} & asked
    usage = f"{prog} [--task TASK] [--config FILE.yaml] [--OPTION VALUE ...]   (--help-all: every option)"
    values = settings_of(words)
    values = preset_of(words) | values | (values.get("task_options") or {})
    print(format_help(usage, description, [*first, *help_options(task, full)], values, full=full), end="")
    raise SystemExit(0)


def help_options(task: str, full: bool) -> list[Option]:
    """Options shown by `--help`: ours, the task's and a few inherited ones; with `full`, all of them."""
    known = {name: each for name, each in _options().items() if not each.refused}
    ours = [each for each in known.values() if each.group in _GROUPS or each.name in _PLACED]
    if not full:
        ours = [each for each in ours if each.group != "model" or each.name in _MODEL]
    grouped = [replace(each, group=_PLACED.get(each.name) or _GROUPS[each.group]) for each in ours]
    order = list(dict.fromkeys(["task", f"options of {task}", *_GROUPS.values()]))
    listed = sorted([*grouped, *options_of_task(task)], key=lambda each: order.index(each.group))
    if not full:
        return listed
    hidden = {each.name for each in listed}
    return [
        *listed,
        *(replace(each, group="TRL and transformers") for each in known.values() if each.name not in hidden),
    ]


def divide(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments between accelerate's launcher and the training script; the script gets those that both have."""
    known, theirs = _options(), launcher_options()
    ours = {*known, *task_options(task_of(words, known["task"].default)), "config"}
    for_launcher: list[str] = []
    for_script: list[str] = []
    for given in given_options(words):
        if given.name in ours or given.name not in theirs:
            for_script += given.words
        elif theirs[given.name] and not given.values:
            raise ValueError(f"--{given.name} needs a value.")
        elif len(given.values) > theirs[given.name]:
            raise ValueError(f"--{given.name} of accelerate's launcher doesn't take {' '.join(given.values[-1:])}.")
        else:
            for_launcher += [f"--{given.name}", *given.values]
    return for_launcher, for_script


def _launch(for_launcher: list[str], for_script: list[str]) -> int:
    """Run the training script through accelerate and return its exit status. The script reports usage errors."""
    import torch
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    with one_line_errors():
        launcher = resolve_accelerate_config_argument(for_launcher)
    args = launch_command_parser().parse_args([*launcher, "--module", "trl_gtr.scripts.train", *for_script])
    if torch.cuda.device_count() < 2:  # then accelerate's list of the defaults that it used has no surprise
        logging.getLogger("accelerate.commands.launch").setLevel(logging.ERROR)
    # torch logs how its processes ended; the exception below says the same
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C also reaches the script, which saves a checkpoint and exits
    try:
        launch_command(args)
    except subprocess.CalledProcessError as failed:
        return failed.returncode if failed.returncode >= 0 else 128 - failed.returncode
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        status = failure.exitcode
        if status == 1 or status < 0:  # otherwise the script has reported the reason in one line
            how = "failed with exit status 1" if status == 1 else f"was killed by signal {-status}"
            print(f"error: Process {rank} {how}; any error of its own is above.", file=sys.stderr)
        return status if status >= 0 else 128 - status
    return 0
