"""A trainer whose run can be ended at any moment and goes on as if nothing had happened.

`checkpoints.py` knows what is in a checkpoint; here is when and how all processes write and read one together.
"""

from __future__ import annotations

import json
import logging
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers.trainer_utils import rotate_checkpoints

from . import checkpoints, output_folder
from ..correctors.base import identity_of
from ..policy.loading import SAVED_BASE
from ..distributed.processes import Processes
from ..rollouts.collector import RolloutCollector
from ..tasks.base import Task
from ..guides.base import Guide
from ..distributed.trl_bridge import PPOBridge
from ..types import Rollout
from ..learning.update import Updater

logger = logging.getLogger(__name__)


class ResumableTrainer(PPOBridge):
    """Saves and restores everything that the rest of a run depends on."""

    task: Task
    corrector: Any
    processes: Processes
    collector: RolloutCollector
    guide: Guide
    updater: Updater
    env_steps: int = 0
    """Steps of all environments since the run began."""
    _saving_to: str | None = None
    _owns_output_dir: bool = False
    """This trainer has begun to write into the folder."""
    _saved_step: int | None = None
    """The update after which this run, or the one that it continues, was last saved."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Policy (or adapter) as an ordinary `from_pretrained` folder, with the value head beside it."""
        value_head, folder = self.value_head_state(), output_dir or self.args.output_dir
        # DeepSpeed's processes save the optimizer together after this: a full disk must be known to all before.
        with self._failing_together(f"The policy could not be written to {folder}"):
            super().save_model(output_dir, _internal_call)
            if self.args.should_save and value_head is not None:
                checkpoints.save_value_head(folder, value_head, self.task.name)

    def _checkpoint_folder(self) -> Path:
        return Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"

    def _get_output_dir(self, trial: Any) -> str:
        return self._saving_to or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """All or nothing: written under another name, which becomes its own once every process is through."""
        final, incomplete = self._checkpoint_folder(), Path(self.args.output_dir) / checkpoints.INCOMPLETE
        if self.args.should_save:
            shutil.rmtree(incomplete, ignore_errors=True)
        self.processes.meet("update")
        with self._failing_together(f"{final} could not be written"):
            self._saving_to = str(incomplete)
            try:
                super()._save_checkpoint(model, trial)
                self._save_run_state(incomplete / final.name)
            finally:
                self._saving_to = None
        with self._failing_together(f"{final} could not be written"):
            if self.args.should_save:
                checkpoints.publish(incomplete / final.name, final, self._settings())
        self._saved_step = self.state.global_step
        with self._failing_together(f"{final} is written, but older ones could not be removed"):
            if self.args.should_save:
                rotate_checkpoints(self.args.output_dir, self.args.save_total_limit, use_mtime=True)
                shutil.rmtree(incomplete)

    @contextmanager
    def _failing_together(self, what: str) -> Iterator[None]:
        """What goes wrong here on one process is said by all of them; what was half written is removed."""
        error: Exception | None = None
        try:
            yield
        except Exception as failure:  # a full disk has many names: OSError, SafetensorError, RuntimeError
            error = failure
        faults = self.processes.gather(repr(error) if error else None)
        if any(faults):
            if self.args.should_save:
                shutil.rmtree(Path(self.args.output_dir) / checkpoints.INCOMPLETE, ignore_errors=True)
            listed = "; ".join(f"process {rank}: {fault}" for rank, fault in enumerate(faults) if fault)
            raise OSError(f"{what} ({listed}). Earlier checkpoints are intact: fix this and resume.") from error

    def _save_run_state(self, folder: Path) -> None:
        state = {
            "env_steps": self.env_steps,
            # A run that was given up begins to count anew, or it would end again at once.
            "skipped_in_a_row": 0 if self.updater.gave_up else self.updater.skipped_in_a_row,
        }
        checkpoints.save_run_state(folder, self.processes.rank, self.guide, self.collector, state)
        if self.args.should_save and not self.processes.deepspeed:
            torch.save(self.updater.state_dict(), folder / checkpoints.CLONING_FILE)

    def _settings(self) -> dict[str, Any]:
        """What a checkpoint can only be resumed with."""
        corrector = None if self.corrector is None else identity_of(self.corrector)
        task = {f"task.{name}": value for name, value in _written(vars(self.task)).items() if name[0] != "_"}
        adapter = self.trained.policy.active_peft_config.to_dict() if self.is_peft_model else {}
        base = Path(adapter.get("base_model_name_or_path") or "").name
        if base.startswith(SAVED_BASE):
            adapter["base_model_name_or_path"] = base  # which is its own wherever the run has moved
        lora = {f"adapter.{name}": value for name, value in _written(adapter).items()}
        lora.pop("adapter.peft_version", None)
        return {"task": self.task.name, "corrector": corrector, **task, **lora, **self.args.resume_settings()}

    def _checkpoint_to_resume(self, given: str | bool | None) -> str | None:
        """With `overwrite` a run that has saved nothing yet begins afresh: what a scheduler that restarts it needs."""
        return checkpoints.resolve_checkpoint(given, self.args.output_dir, required=not self.args.overwrite)

    def _claim_output_dir(self, checkpoint: str | None) -> None:
        """Refuse to mix two runs in one folder, or clear it where that is wanted. A run that resumes from its own
        folder goes on there."""
        folder = Path(self.args.output_dir)
        own = checkpoint is not None and Path(checkpoint).parent.resolve() == folder.resolve()
        if not (own or self._owns_output_dir):
            first = self.is_world_process_zero()
            problem = output_folder.problem(folder, self.args.overwrite) if first else None
            problem = self.processes.gather(problem)[0]
            if problem is not None:
                raise ValueError(problem)
            if first:
                output_folder.remove_earlier_run(folder)
        self._owns_output_dir = True

    def _resume(self, checkpoint: str) -> None:
        rank, trained = self.processes.rank, self.trained
        allowed = self.args.allow_changed_config
        fault = checkpoints.check(checkpoint, self._settings(), allowed) if self.is_world_process_zero() else None
        fault = self.processes.gather(fault)[0]
        if fault is not None:
            raise ValueError(fault)
        state = checkpoints.read_run_state(checkpoint, rank)
        if self.is_deepspeed_enabled:
            self.load_deepspeed_checkpoint(checkpoint)
        else:
            checkpoints.load_policy_weights(checkpoint, trained.policy)
            if trained.value_head is not None:
                checkpoints.load_value_head(checkpoint, trained.value_head)
        self._load_optimizer_and_scheduler(checkpoint)
        self._load_scaler(checkpoint)
        if not self.processes.deepspeed:
            moments = torch.load(Path(checkpoint, checkpoints.CLONING_FILE), map_location="cpu", weights_only=True)
            self.updater.load_state_dict(moments)
        if isinstance(self.lr_scheduler, LambdaLR):
            # This run's schedule, which is another one if the run was made longer.
            for group, base, factor in zip(
                self.optimizer.param_groups, self.lr_scheduler.base_lrs, self.lr_scheduler.lr_lambdas, strict=True
            ):
                group["lr"] = base * factor(self.lr_scheduler.last_epoch)
            self.lr_scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]
        self.load_trainer_state(checkpoint)
        if self._checkpoint_folder().resolve() == Path(checkpoint).resolve():
            self._saved_step = self.state.global_step
        checkpoints.load_run_state(checkpoint, rank, self.guide, self.collector, exact=not allowed)
        self.env_steps, self.updater.skipped_in_a_row = state["env_steps"], state["skipped_in_a_row"]
        self._load_rng_state(checkpoint)  # last: whatever is made above may draw from them

    def _stop_early(self, reason: str) -> None:
        """Leave a checkpoint behind, unless saving is off or there is one already."""
        if self.args.save_strategy != "no" and self._saved_step != self.state.global_step:
            self._save_checkpoint(self.model, trial=None)
        if self.is_world_process_zero():
            saved = self._saved_step == self.state.global_step
            where = f"Resume from {self._checkpoint_folder()}." if saved else "Nothing is saved (save_strategy='no')."
            logger.warning("The run stops after update %d: %s. %s", self.state.global_step, reason, where)

    def _before_collection(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """What collecting changes, where a checkpoint may have to be written of the state before it."""
        if self.args.save_strategy == "no" or self._saved_step == self.state.global_step:
            return None
        return self.collector.state_dict(), checkpoints.random_states()

    def _stop_if_told(
        self,
        received: Sequence[int | None],
        faults: Sequence[str | None] = (),
        before: tuple[dict[str, Any], dict[str, Any]] | None = None,
    ) -> None:
        """On a signal to any process, or where one can't act: save where the last update ended, and leave.

        Args:
            received: The signal of each process.
            faults: Why a process can't act.
            before: The state before a rollout that is now abandoned.
        """
        number = next((each for each in received if each is not None), None)
        fault = next((f"{each} (process {rank})" for rank, each in enumerate(faults) if each), None)
        if number is None and fault is None:
            return
        if before is not None:
            self.collector.rewind(before[0])
            checkpoints.set_random_states(before[1])
        self._stop_early(fault or f"{signal.Signals(number or 0).name} received")
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        if fault is not None:
            raise FloatingPointError(fault)
        raise SystemExit(128 + (number or 0))  # as a scheduler expects it

    def _stop_where_needed(self, rollout: Rollout) -> None:
        """After an update: nothing left to spend, or nothing learned because no number is finite."""
        reasons = self.processes.gather(rollout.stop_reason)
        if any(reasons):
            self._stop_early(next(reason for reason in reasons if reason))
            self.control.should_training_stop = True
        if self.updater.gave_up:
            faults = self.processes.gather(self.updater.not_finite)
            fault = next((f"{name} (process {rank})" for rank, name in enumerate(faults) if name), "a gradient")
            reason = f"{self.updater.skipped_in_a_row} optimizer steps in a row were skipped: {fault} is not finite"
            self._stop_early(reason)
            raise FloatingPointError(
                f"{reason}. Look for rewards that aren't finite, lower the learning rate, or train in float32 or "
                "bfloat16: float16 overflows."
            )


def _written(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those values that can be written down and compared."""
    written: dict[str, Any] = {}
    for name, value in values.items():
        with suppress(TypeError, ValueError):
            written[name] = json.loads(json.dumps(sorted(value) if isinstance(value, set | frozenset) else value))
    return written
