"""What watches a run: its logs, the progress bar with the four numbers that matter, the alarm for thought collapse."""

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
    """The progress bar, with success, true thoughts, corrected share and speed beside it."""

    SHOWN: Mapping[str, str] = {
        "episode/success": "success",
        "thoughts/true": "true thoughts",
        "corrector/corrected": "corrected",
        "speed/steps_per_second": "steps/s",
    }

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and self.training_bar is not None:
            shown = {name: f"{logs[key]:.2f}" for key, name in self.SHOWN.items() if key in logs}
            if shown:
                self.training_bar.set_postfix(shown)


class ThoughtCollapseCallback(TrainerCallback, ExportableState):
    """Warns, and on request stops the run, when thoughts stop depending on what the agent sees.

    The alarm goes off when, for `patience` logs in a row, a measure is worse than allowed: the share of thoughts that
    are untrue and said word for word in another state too above `max_identical`, the share of the commonest thought
    above `max_top`, or distinct 4-grams below `min_distinct` times what they were at the start.

    Args:
        max_identical: Bound of `thoughts/identical_untrue`. (True ones may repeat: other suits, the same thought.)
            Where the task has no judge, of `thoughts/identical_across_states`.
        max_top: Bound of `thoughts/top_share`.
        min_distinct: Smallest share of the first log's `thoughts/distinct_4`.
        patience: Logs in a row before the alarm.
        stop: End the run cleanly, with its checkpoint, instead of only warning.
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
        """What is worse than allowed; `None` for a log that says nothing about thoughts."""
        if "thoughts/distinct_4" not in logs:
            return None
        distinct = logs["thoughts/distinct_4"]
        if self.first_distinct is None:
            self.first_distinct = distinct
        found = []
        # Where nobody knows what is true, every thought that is repeated counts.
        untrue = logs.get("thoughts/identical_untrue")
        identical = logs["thoughts/identical_across_states"] if untrue is None else untrue
        if identical > self.max_identical:
            what = "said" if untrue is None else "untrue and said"
            found.append(f"{identical:.0%} of thoughts are {what} in other states too")
        if logs["thoughts/top_share"] > self.max_top:
            found.append(f"one thought makes {logs['thoughts/top_share']:.0%} of all")
        if distinct < self.min_distinct * self.first_distinct:
            found.append(f"distinct 4-grams fell from {self.first_distinct:.3f} to {distinct:.3f}")
        return found

    def state(self) -> dict[str, Any]:
        """For checkpoints: settings and what was seen so far."""
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
    """Callbacks that write what a report is made of; `on_step_end` hands them rollout and experience.

    Args:
        corrector: Of the run, or `None`.
        model: The model that is trained.
        spans: Its tokens as text.
        others: The trainer's callbacks, among them the trackers.
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
