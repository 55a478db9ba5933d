"""Check what a trainer was given, and say what to pass instead."""

from __future__ import annotations

from transformers import TrainingArguments

from ..config import GTRConfig
from ..engines.choice import check_engine
from ..policy.scoring import VLMPolicy
from ..rollouts.collector import RolloutCollector
from ..tasks.base import Task
from ..tasks.memory import check_history, fullest_prompt


def check_given(args: object, task: object, model: object) -> tuple[GTRConfig, Task]:
    """The given settings and task; raises if they are something else, or can't go together or with the model."""
    settings, given = check_args(args), check_task_given(task)
    check_memory(given, settings)
    check_engine(settings, model)  # last: it may wait for a server
    return settings, given


def check_args(args: object) -> GTRConfig:
    """The given settings, or the default ones; raises a helpful `TypeError` for anything else."""
    if args is None or isinstance(args, GTRConfig):
        return args or GTRConfig()
    kind = type(args).__name__
    if isinstance(args, Task):
        raise TypeError(f"`args` is a {kind}: pass it as `task`, and as `args` a GTRConfig.")
    if isinstance(args, TrainingArguments):
        raise TypeError(f"`args` is a {kind}: write GTRConfig(...) instead. It has the same fields, and those of GTR.")
    raise TypeError(f"`args` must be a GTRConfig, not {kind}: write args=GTRConfig(output_dir='runs/mine', ...).")


def check_task_given(task: object) -> Task:
    """The given task; raises if there is none, or something else."""
    if task is None:
        raise ValueError("GTRTrainer needs a `task`, e.g. task=make_task('points24').")
    return Task.ensure(task)


def check_memory(task: Task, args: GTRConfig) -> None:
    """Raise a `ValueError` if the agent can't be shown so much of the past with these settings."""
    check_history(task)
    if args.one_batch_shape and task.history_images:
        raise ValueError(
            "`one_batch_shape` doesn't work with `history_images`: a prompt has one picture when an episode begins "
            "and more later, so batches differ in the number of pictures. Leave one of them out."
        )


def check_history_fits(policy: VLMPolicy, collector: RolloutCollector, eval_task: Task) -> None:
    """Raise a `ValueError` if the model can't be shown as much of the past as the tasks ask for.

    The length of prompts is estimated from the training task's first states.
    """
    if collector.task.history_turns:
        firsts = list(zip(collector.images, collector.infos, strict=True))
        image, info = max(firsts, key=lambda first: len(collector.task.prompt(*first)))
        policy.check_history(fullest_prompt(collector.task, image, info), image)
    if eval_task.history_turns:
        check_history(eval_task)
        policy.encoder.check_history(with_images=eval_task.history_images > 0)
