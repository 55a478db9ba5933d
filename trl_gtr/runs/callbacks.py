"""Trainer callbacks: run logs, a progress bar with the four key metrics, and the thought-collapse alarm."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState, ProgressCallback

from ..config import GTRConfig
from ..correctors.base import Corrector
from ..policy.adapters import REFERENCE
from ..policy.spans import SpanFinder
from ..tasks.base import Task
from .episode_log import EpisodeLog
from .run_log import RunLog
from .trackers import TrackerImages

logger = logging.getLogger(__name__)


class GTRProgressCallback(ProgressCallback):
    """Progress bar that also shows success, true thoughts, corrected share and speed.

    Success is the mean over the latest episodes, at least as many as there are environments, and is not shown before
    that: the first episodes to end are the short ones, which say little about the others.
    """

    SHOWN: Mapping[str, str] = {
        "success": "success",
        "thoughts/true": "true thoughts",
        "corrector/corrected": "corrected",
        "speed/steps_per_second": "steps/s",
    }

    def __init__(self) -> None:
        super().__init__()
        self._episodes = 0
        self._ended: list[tuple[int, float]] = []
        """Number of episodes that ended between two logs, and their success."""

    def on_train_begin(self, args: TrainingArguments, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._episodes, self._ended = state.episode, []

    def on_step_end(self, args: TrainingArguments, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self.training_bar.total = state.max_steps  # with groups, an estimate that changes
        super().on_step_end(args, state, control, **kwargs)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and self.training_bar is not None:
            values = logs | self._success(logs, args.num_envs)
            shown = {name: f"{values[key]:.2f}" for key, name in self.SHOWN.items() if key in values}
            if shown:
                self.training_bar.set_postfix(shown)

    def _success(self, logs: Mapping[str, float], enough: int) -> dict[str, float]:
        """Success over the latest `enough` episodes or more; empty until so many have ended."""
        if "episode/success" in logs:
            self._ended.append((int(logs["episode/count"]) - self._episodes, logs["episode/success"]))
            self._episodes = int(logs["episode/count"])
        counted, successes = 0, 0.0
        for count, success in reversed(self._ended):
            counted, successes = counted + count, successes + count * success
            if counted >= enough:
                return {"success": successes / counted}
        return {}


class ThoughtCollapseCallback(TrainerCallback, ExportableState):
    """Warns, and optionally stops the run, when thoughts no longer depend on what the agent sees.

    The alarm fires when any of these holds for `patience` logs in a row: the share of untrue thoughts repeated word
    for word in another state exceeds `max_identical`, the share of the most common thought exceeds `max_top`, or
    distinct 4-grams fall below `min_distinct` times their initial value.

    Args:
        max_identical: Upper limit for `thoughts/identical_untrue`. (True thoughts may repeat, e.g. for other suits.)
            If the task has no judge, for `thoughts/identical_across_states`.
        max_top: Upper limit for `thoughts/top_share`.
        min_distinct: Lower limit for `thoughts/distinct_4`, relative to the first log.
        patience: Consecutive bad logs before the alarm.
        stop: Save a checkpoint and end the run instead of only warning.
    """

    def __init__(
        self,
        max_identical: float = 0.5,
        max_top: float = 0.5,
        min_distinct: float = 0.3,
        patience: int = 3,
        stop: bool = False,
    ) -> None:
        self.max_identical, self.max_top, self.min_distinct = max_identical, max_top, min_distinct
        self.patience, self.stop = patience, stop
        self.first_distinct: float | None = None
        self.bad_logs = 0
        self.warned = False

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        reasons = self._reasons(logs or {})
        if reasons is None:
            return
        self.bad_logs = self.bad_logs + 1 if reasons else 0
        if self.bad_logs < self.patience:
            return
        if not self.warned and state.is_world_process_zero:
            logger.warning(
                "Thoughts are collapsing at update %d: %s. Lower the learning rate, raise `thought_cloning_coef`, or "
                "look at the episodes.",
                state.global_step,
                "; ".join(reasons),
            )
        self.warned = True
        if self.stop:
            control.should_training_stop = control.should_save = True

    def _reasons(self, logs: Mapping[str, float]) -> list[str] | None:
        """The limits that are exceeded; `None` if the log has no thought metrics."""
        if "thoughts/distinct_4" not in logs:
            return None
        distinct = logs["thoughts/distinct_4"]
        if self.first_distinct is None:
            self.first_distinct = distinct
        found = []
        # Without a judge, every repeated thought counts.
        untrue = logs.get("thoughts/identical_untrue")
        identical = logs["thoughts/identical_across_states"] if untrue is None else untrue
        if identical > self.max_identical:
            what = "repeated" if untrue is None else "untrue and repeated"
            found.append(f"{identical:.0%} of thoughts are {what} in other states")
        if logs["thoughts/top_share"] > self.max_top:
            found.append(f"one thought accounts for {logs['thoughts/top_share']:.0%} of all")
        if distinct < self.min_distinct * self.first_distinct:
            found.append(f"distinct 4-grams fell from {self.first_distinct:.3f} to {distinct:.3f}")
        return found

    def state(self) -> dict[str, Any]:
        """Settings and progress, for checkpoints."""
        return {
            "args": {
                "max_identical": self.max_identical,
                "max_top": self.max_top,
                "min_distinct": self.min_distinct,
                "patience": self.patience,
                "stop": self.stop,
            },
            "attributes": {"first_distinct": self.first_distinct, "bad_logs": self.bad_logs, "warned": self.warned},
        }


def logging_callbacks(
    args: GTRConfig,
    task: Task,
    corrector: Corrector | None,
    model: nn.Module,
    spans: SpanFinder,
    others: Sequence[TrainerCallback],
) -> list[TrainerCallback]:
    """Callbacks that write the data for reports; they get the rollout and experience in `on_step_end`.

    Args:
        corrector: The run's corrector, or `None`.
        model: The model being trained.
        spans: Decodes its tokens.
        others: The trainer's callbacks, including the trackers.
    """
    about = {
        "task": task.name,
        "model": getattr(model, "name_or_path", "") or type(model).__name__,
        "parameters": sum(weight.numel() for name, weight in model.named_parameters() if REFERENCE not in name),
        "trainable": sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
        "corrector": None if corrector is None else corrector.identity,
    }
    callbacks: list[TrainerCallback] = [RunLog(args, about)]
    if args.episode_log_rate > 0:
        callbacks.append(EpisodeLog(args, task, spans))
    if args.report_to:
        callbacks.append(TrackerImages(args, others))
    return callbacks
