"""Recognises a run that can't learn anything, and says what is probably wrong."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from .. import tiny_llava
from ..config import GTRConfig
from ..tasks import name_of
from ..tasks.base import Task
from ..types import Rollout

logger = logging.getLogger(__name__)

ALMOST_NONE = 0.02
ALMOST_ALL = 0.95
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes."""
PATIENCE = 2
"""Consecutive hopeless logs that stop a run."""


class HopelessRunCallback(TrainerCallback, ExportableState):
    """Warns about the first hopeless update; `why_stop` says why with the second in a row. Only logged updates count.

    A policy is hopeless if (almost) no response is valid or legal, if no gradient flows, or if its weights don't
    change. Only the start of a run is checked for this: a policy that has learned something and loses it again is the
    business of [`ThoughtCollapseCallback`]. A corrector is hopeless, at any time, if (almost) all its answers fail.

    Args:
        args: The settings.
        task: The task being trained on.
        model: The model being trained.
        needs_corrector: Without corrections no thought is taught.
    """

    def __init__(self, args: GTRConfig, task: Task, model: Any, needs_corrector: bool = True) -> None:
        self.args, self.task, self.model, self.needs_corrector = args, task, model, needs_corrector
        self.signs: list[str] = []
        """What is wrong with the last update, with likely cause and remedy."""
        self.bad_logs = 0
        self.learns = False
        self._weights: list[int] = []
        self._failure = ""
        self._budget_spent = False

    @property
    def why_stop(self) -> str | None:
        """Why the run should stop; `None` if it should go on."""
        stops = self.bad_logs >= PATIENCE and self.args.on_hopeless == "stop"
        return " ".join(self.signs) if stops else None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._weights = fingerprint(self.model)

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, rollout: Rollout | None = None, **kwargs: Any
    ) -> None:
        if rollout is not None:
            self._failure = common_failure(rollout)
            self._budget_spent = rollout.stop_reason is not None

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if "response/valid" not in (logs or {}):
            return  # an evaluation
        about_policy = [] if self.learns else list(self._policy_signs(logs, state.global_step))
        self.learns = self.learns or (not about_policy and self._should_move(logs, state.global_step))
        self.signs = [*about_policy, *self._corrector_signs(logs)]
        self.bad_logs = self.bad_logs + 1 if self.signs else 0
        if self.bad_logs == 1 and state.is_world_process_zero:
            may_stop = self.args.on_hopeless == "stop" and state.global_step < state.max_steps
            then = " The run stops if the next logged update is no better (`on_hopeless='warn'`: it goes on)."
            logger.warning("Update %d: %s%s", state.global_step, " ".join(self.signs), then if may_stop else "")

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Otherwise the run was stopped, and `HopelessRun` says why.
        is_over = state.global_step >= state.max_steps or control.should_training_stop
        if is_over and self.bad_logs >= PATIENCE and state.is_world_process_zero:
            logger.warning("Nothing was learned in the last updates: %s", " ".join(self.signs))

    def state(self) -> dict[str, Any]:
        """Progress, for checkpoints."""
        return {"args": {}, "attributes": {"signs": self.signs, "bad_logs": self.bad_logs, "learns": self.learns}}

    def _policy_signs(self, logs: Mapping[str, float], update: int) -> Iterator[str]:
        if logs["response/valid"] < ALMOST_NONE:
            yield (
                f"{logs['response/valid']:.0%} of the responses have the task's format, so nothing can be corrected. "
                f"{self._remedy()}"
            )
            return  # the cause of everything else
        if logs["response/legal"] < ALMOST_NONE:
            yield (
                f"{logs['response/legal']:.0%} of the responses have a legal action. Check that `to_env_action` "
                f"understands the actions that the prompt asks for (`trl-gtr check --task {name_of(self.task)}`). "
                f"{self._remedy()}"
            )
        weights = fingerprint(self.model)
        moved, self._weights = weights != self._weights, weights
        if not self._should_move(logs, update):
            return
        if logs.get("groups/dead") == 1 and not logs.get("loss/cloning_coef"):
            yield (
                "In every whole group all episodes have the same return, so there is nothing to compare. Start from a "
                "model that sometimes succeeds, or raise `group_size`, `temperature` or `refill_groups`."
            )
        elif logs.get("optim/grad_norm") == 0:
            yield (
                "No gradient flows: every loss is 0. Rewards that never differ are the usual cause: look at `reward` "
                "and `corrector/corrected` in the log."
            )
        elif weights and not moved:
            yield (
                "The policy's weights did not change. The learning rate is too small for their precision, or no loss "
                "reaches them: load the model in float32 (`dtype`), raise `learning_rate`, or look at `loss/policy` "
                "and `loss/cloning` in the log."
            )

    def _should_move(self, logs: Mapping[str, float], update: int) -> bool:
        if logs["lr"] == 0 or logs.get("episode/success", 0.0) > ALMOST_ALL:
            return False
        ppo = self.args.ppo_coef > 0 and update > self.args.value_warmup_updates
        return ppo or logs.get("loss/cloning_coef", 0.0) > 0

    def _corrector_signs(self, logs: Mapping[str, float]) -> Iterator[str]:
        failed = logs.get("corrector/failed", 0.0)
        if failed > ALMOST_ALL and self.needs_corrector and not self._budget_spent:
            reason = f", most often with: {self._failure}" if self._failure else ""
            yield f"{failed:.0%} of the corrections failed{reason}. Without corrections no thought is taught."

    def _remedy(self) -> str:
        """How to get a model that knows the task."""
        model, name = tiny_llava.name_of(self.model.name_or_path), name_of(self.task)
        embedded = tiny_llava.for_task(name)
        if model in tiny_llava.VARIANTS and embedded is not None and model != embedded:
            return f"The embedded model `{model}` doesn't know this task: use --model_name_or_path {embedded}."
        if not self.task.defines("expert"):
            return "The model has probably not been fine-tuned on this task: fine-tune it on demonstrations first."
        return (
            "The model has probably not been fine-tuned on this task. Do that first: python examples/sft.py "
            f"--model_name_or_path {model or 'MODEL'} --tasks {name}=10000 --output_dir runs/sft, then train with "
            "--model_name_or_path runs/sft."
        )


def fingerprint(model: nn.Module) -> list[int]:
    """A number for each trained weight that changes with it; empty if this process holds none (ZeRO-3)."""
    trained = (weight.detach() for weight in model.parameters() if weight.requires_grad and weight.numel())
    # Sums of the bits as integers: no change is too small for them, and Apple GPUs have no float64.
    return [int(weight.view(_INTEGERS[weight.element_size()]).sum()) for weight in trained]


def common_failure(rollout: Rollout) -> str:
    """The most common reason of failed corrections."""
    failed = [each for each in rollout.corrections if each is not None and each.failure is not None]
    reasons = Counter(each.reason or each.failure for each in failed)
    return str(reasons.most_common(1)[0][0]) if reasons else ""
