"""Stops a run early but resumably: on a signal, a spent budget, or non-finite values."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from ..distributed.processes import Processes
from ..distributed.random_states import random_states, set_random_states
from ..learning.update import Updater
from ..rollouts.collector import RolloutCollector
from .checkpointer import RunCheckpointer

logger = logging.getLogger(__name__)


class HopelessRun(RuntimeError):
    """Nothing can be learned from this run's updates; its message says why, and what to do."""


class Snapshot(NamedTuple):
    """State before a rollout, for everything that collecting one changes."""

    collector: dict[str, Any]
    random: dict[str, Any]


class RunStopper:
    """Saves a checkpoint and ends the run. Every method must be called by all processes.

    Args:
        processes: All processes of the run.
        checkpointer: Knows what has been saved.
        collector: Rewound to the start of an abandoned rollout.
        save: Writes a checkpoint; `None` if saving is off.
        end: Called before an exception ends the run, so callbacks can close their files.
        received: The signal that this process has received, if any.
        needs_corrector: Without corrections no thought is taught, so a spent budget ends the run.
    """

    def __init__(
        self,
        processes: Processes,
        checkpointer: RunCheckpointer,
        collector: RolloutCollector,
        *,
        save: Callable[[], None] | None,
        end: Callable[[], None],
        received: Callable[[], int | None] = lambda: None,
        needs_corrector: bool = True,
    ) -> None:
        self.processes, self.checkpointer, self.collector = processes, checkpointer, collector
        self._save, self._end, self._received, self.needs_corrector = save, end, received, needs_corrector
        self._told_of_spent_budget = False

    def snapshot(self, step: int) -> Snapshot | None:
        """Take a snapshot before a rollout, in case this state has to be saved later."""
        if self._save is None or self.checkpointer.is_saved(step):
            return None
        return Snapshot(self.collector.state_dict(), random_states())

    def stop_on_signal(
        self,
        step: int,
        received: Sequence[int | None],
        faults: Sequence[Exception | None] = (),
        before: Snapshot | None = None,
    ) -> None:
        """If any process has received a signal or can't act, save the state after update `step` and exit.

        Args:
            step: Updates so far.
            received: The signal each process received, if any.
            faults: Why each process can't act, if it can't.
            before: The state before the abandoned rollout.
        """
        number = next((each for each in received if each is not None), None)
        fault = next((type(each)(f"{each} (process {rank})") for rank, each in enumerate(faults) if each), None)
        if number is None and fault is None:
            return
        self._rewind(before)
        self._save_and_log(step, str(fault or f"{signal.Signals(number or 0).name} received"))
        self._end()
        if fault is not None:
            raise fault
        raise SystemExit(128 + (number or 0))  # the exit code schedulers expect

    def abandon_rollout(self, step: int, error: Exception, before: Snapshot | None) -> NoReturn:
        """Save the state before a rollout that can't be learned from, and raise the error.

        Args:
            step: Updates so far.
            error: Why not.
            before: The state before the rollout.
        """
        self._rewind(before)
        self.end_run(step, error)

    def end_run(self, step: int, error: Exception) -> NoReturn:
        """Save the state after update `step`, and raise the error, unless a signal ends the run anyway."""
        received = self.processes.gather(self._received())
        if any(each is not None for each in received) and self.processes.rank == 0:
            logger.error("%s", error)  # the exit code is the signal's
        self.stop_on_signal(step, received)
        self._save_and_log(step, str(error).rstrip("."))
        self._end()
        raise error

    def _rewind(self, before: Snapshot | None) -> None:
        if before is not None:
            self.collector.rewind(before.collector)
            set_random_states(before.random)

    def stop_if_spent(self, step: int, reason: str | None) -> bool:
        """After an update: save and return `True` if any process's corrector has spent its budget.

        If the run can do without one, only say so, once.

        Args:
            step: Updates so far.
            reason: Why this process can't go on; `None` if it can.
        """
        found = next((each for each in self.processes.gather(reason) if each), None)
        if found is not None and self.needs_corrector:
            self._save_and_log(step, found)
        elif found is not None and not self._told_of_spent_budget:
            self._told_of_spent_budget = True
            if self.processes.rank == 0:
                logger.warning("Update %d: %s. The run goes on with its other teacher alone.", step, found)
        return found is not None and self.needs_corrector

    def raise_if_diverged(self, step: int, updater: Updater) -> None:
        """After an update: save and raise if too many optimizer steps in a row were skipped."""
        if not updater.gave_up:
            return
        faults = self.processes.gather(updater.not_finite)
        fault = next((f"{name} (process {rank})" for rank, name in enumerate(faults) if name), "a gradient")
        reason = f"{updater.skipped_in_a_row} optimizer steps in a row were skipped: {fault} is not finite"
        self._save_and_log(step, reason)
        self._end()
        raise FloatingPointError(
            f"{reason}. Look for rewards that aren't finite, lower the learning rate, or train in float32 or "
            "bfloat16: float16 overflows."
        )

    def raise_if_hopeless(self, step: int, reason: str | None) -> None:
        """After an update: save and raise if nothing can be learned.

        Args:
            step: Updates so far.
            reason: What is wrong, as found by this process; `None` if nothing is.
        """
        found = next((each for each in self.processes.gather(reason) if each), None)
        if found is None:
            return
        self._save_and_log(step, "nothing can be learned")
        self._end()
        raise HopelessRun(f"{found} To train nevertheless, set `on_hopeless='warn'`.")

    def _save_and_log(self, step: int, reason: str) -> None:
        """Save a checkpoint, unless saving is off or there is one already."""
        if self._save is not None and not self.checkpointer.is_saved(step):
            self._save()
        if self.processes.rank == 0:
            saved = self.checkpointer.is_saved(step)
            folder = self.checkpointer.folder(step)
            where = (
                f"Resume from {folder} (--resume_from_checkpoint true)."
                if saved
                else "Nothing was saved (save_strategy='no')."
            )
            logger.warning("The run stops after update %d: %s. %s", step, reason, where)
