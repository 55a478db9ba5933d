"""A trainer whose run can be ended at any moment and goes on as if nothing had happened.

`checkpoints.py` knows what is in a checkpoint; here is when and how all processes write and read one together.
"""

from __future__ import annotations

import logging
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers.trainer_utils import rotate_checkpoints

from . import checkpoints
from .correctors.base import identity_of
from .processes import Processes
from .rollouts import RolloutCollector
from .tasks.base import Task
from .thought_cloning import CorrectionBuffer
from .trl_bridge import PPOBridge
from .types import Rollout
from .update import Updater

logger = logging.getLogger(__name__)


class ResumableTrainer(PPOBridge):
    """Saves and restores everything that the rest of a run depends on."""

    task: Task
    corrector: Any
    processes: Processes
    collector: RolloutCollector
    buffer: CorrectionBuffer
    updater: Updater
    env_steps: int = 0
    """Steps of all environments since the run began."""
    _saving_to: str | None = None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Policy (or adapter) as an ordinary `from_pretrained` folder, with the value head beside it."""
        super().save_model(output_dir, _internal_call)
        value_head = self.value_head_state()
        if self.args.should_save:
            checkpoints.save_value_head(output_dir or self.args.output_dir, value_head, self.task.name)

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
        with self._failing_together(final, incomplete):
            self._saving_to = str(incomplete)
            try:
                super()._save_checkpoint(model, trial)
                self._save_run_state(incomplete / final.name)
            finally:
                self._saving_to = None
        with self._failing_together(final, incomplete):
            if self.args.should_save:
                checkpoints.publish(incomplete / final.name, final, self._settings())
                rotate_checkpoints(self.args.output_dir, self.args.save_total_limit, use_mtime=True)
                shutil.rmtree(incomplete)

    @contextmanager
    def _failing_together(self, final: Path, incomplete: Path) -> Iterator[None]:
        """What goes wrong here on one process is said by all of them; what was half written is removed."""
        error: Exception | None = None
        try:
            yield
        except Exception as failure:  # a full disk has many names: OSError, SafetensorError, RuntimeError
            error = failure
        faults = self.processes.gather(repr(error) if error else None)
        if any(faults):
            if self.args.should_save:
                shutil.rmtree(incomplete, ignore_errors=True)
            listed = "; ".join(f"process {rank}: {fault}" for rank, fault in enumerate(faults) if fault)
            raise OSError(
                f"{final} could not be written ({listed}). Earlier checkpoints are as they were: mend that and resume."
            ) from error

    def _save_run_state(self, folder: Path) -> None:
        corrector = self.corrector.state_dict() if hasattr(self.corrector, "state_dict") else None
        state = {
            "corrector": corrector,
            "env_steps": self.env_steps,
            "skipped_in_a_row": self.updater.skipped_in_a_row,
        }
        checkpoints.save_run_state(folder, self.processes.rank, self.buffer, self.collector, state)

    def _settings(self) -> dict[str, Any]:
        """What a checkpoint can only be resumed with."""
        corrector = None if self.corrector is None else identity_of(self.corrector)
        return {"corrector": corrector, **self.args.resume_settings()}

    def _resume(self, checkpoint: str) -> None:
        rank, trained = self.processes.rank, self.trained
        checkpoints.check_task(checkpoint, self.task.name)
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
            checkpoints.load_value_head(checkpoint, trained.value_head)
        self._load_optimizer_and_scheduler(checkpoint)
        self._load_scaler(checkpoint)
        if isinstance(self.lr_scheduler, LambdaLR):
            # This run's schedule, which is another one if the run was made longer.
            for group, base, factor in zip(
                self.optimizer.param_groups, self.lr_scheduler.base_lrs, self.lr_scheduler.lr_lambdas, strict=True
            ):
                group["lr"] = base * factor(self.lr_scheduler.last_epoch)
            self.lr_scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]
        self.load_trainer_state(checkpoint)
        checkpoints.load_run_state(checkpoint, rank, self.buffer, self.collector)
        self.env_steps, self.updater.skipped_in_a_row = state["env_steps"], state["skipped_in_a_row"]
        if state["corrector"] is not None and hasattr(self.corrector, "load_state_dict"):
            self.corrector.load_state_dict(state["corrector"])
        self._load_rng_state(checkpoint)  # last: whatever is made above may draw from them

    def _stop_early(self, reason: str) -> None:
        """Leave a checkpoint behind, unless saving is off or there is one already."""
        folder = self._checkpoint_folder()
        exists = self.processes.gather(folder.exists())[0]  # a shared disk may tell each process another thing
        if self.args.save_strategy != "no" and not exists:
            self._save_checkpoint(self.model, trial=None)
        if self.is_world_process_zero():
            where = f"Resume from {folder}." if folder.exists() else "Nothing is saved (save_strategy='no')."
            logger.warning("The run stops after update %d: %s. %s", self.state.global_step, reason, where)

    def _before_collection(self) -> tuple[bytes, dict[str, Any]] | None:
        """What collecting changes, where a checkpoint may have to be written of the state before it."""
        if self.args.save_strategy == "no" or self._checkpoint_folder().exists():
            return None
        return self.collector.state_dict(), checkpoints.random_states()

    def _stop_if_told(
        self, received: Sequence[int | None], before: tuple[bytes, dict[str, Any]] | None = None
    ) -> None:
        """On a signal to any process: save where the last update ended, and leave as a scheduler expects it.

        Args:
            received: The signal of each process.
            before: The state before a rollout that is now abandoned.
        """
        number = next((each for each in received if each is not None), None)
        if number is None:
            return
        if before is not None:
            self.collector.load_state_dict(before[0])
            checkpoints.set_random_states(before[1])
        self._stop_early(f"{signal.Signals(number).name} received")
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        raise SystemExit(128 + number)

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
