"""The corrections of one rollout: asked for while it is played, joined when it ends, given up when they are late."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass

from ..correctors.background import DaemonPool
from ..correctors.base import BudgetExhausted, Corrector, failed
from ..types import Cancellation, Correction, CorrectionRequest, FailureKind

GRACE = 5.0
"""Seconds in which a corrector that heeds its requests' cancellation hands in what it has."""
NOT_WORKED_ON: tuple[FailureKind, ...] = ("late", "unavailable", "budget", "cancelled")
"""Kinds of failures whose seconds say nothing of how long an answer takes."""


class PendingCorrections:
    """Asks for one vector step after the other and keeps what comes back in time, request by request.

    Args:
        corrector: `None` asks nobody.
        pool: Where it is called.
        num_envs: Requests of a vector step at most.
    """

    def __init__(self, corrector: Corrector | None, pool: DaemonPool, num_envs: int) -> None:
        self.corrector, self.pool, self.num_envs = corrector, pool, num_envs
        self.cancellation = Cancellation()
        """Belongs into every request."""
        self._steps: list[tuple[Future[list[Correction]] | None, list[int]]] = []
        self._asked_at: list[float] = []
        self._out_of_time_at: float | None = None

    def ask(self, requests: dict[int, CorrectionRequest]) -> None:
        """Send a vector step's requests off; the keys say which environments they belong to."""
        if self.corrector is None or not requests:
            self._steps.append((None, []))
            return
        self._asked_at += [time.perf_counter()] * len(requests)
        self._steps.append((self.pool.submit(self.corrector.correct, list(requests.values())), list(requests)))

    def wait(self, seconds: float, stopped: Callable[[], bool]) -> None:
        """Until every correction is in, time is up, or the run is to stop; what is late is given up."""
        end = time.monotonic() + seconds
        missing = {future for future, _ in self._steps if future is not None}
        while missing and not stopped() and time.monotonic() < end:
            missing = wait(missing, timeout=min(0.5, end - time.monotonic())).not_done
        if not missing:
            return
        self.give_up()
        if not stopped():
            self._out_of_time_at = time.perf_counter()
            wait(missing, timeout=GRACE if self.cancellation.heeded else 0)

    def give_up(self) -> None:
        """Nobody waits any more: what hasn't begun never will, what is under way may end."""
        self.pool.cancel()
        self.cancellation.cancel()

    def join(self) -> tuple[list[Correction | None], str | None]:
        """One correction per environment and step, `None` where nothing was asked. Errors surface here.

        An answer that isn't in yet comes too late. A spent budget is no error: what was paid for is kept, the rest
        counts as failed, and the reason is handed on.
        """
        corrections: list[Correction | None] = []
        stop_reason = None
        for future, indices in self._steps:
            row: list[Correction | None] = [None] * self.num_envs
            if future is not None:
                try:
                    answers = future.result() if future.done() else [failed("late", "not back in time")] * len(indices)
                except CancelledError:
                    answers = [failed("late", "given up before its turn came")] * len(indices)
                except BudgetExhausted as spent:
                    stop_reason = str(spent)
                    answers = [failed("budget", stop_reason)] * len(indices)
                for i, correction in zip(indices, answers, strict=True):
                    row[i] = correction
            corrections += row
        return corrections, stop_reason

    def shortfall(self, corrections: Sequence[Correction | None]) -> Shortfall | None:
        """How far behind the corrector was; `None` if nothing was given up for being late."""
        asked = [correction for correction in corrections if correction is not None]
        late = [correction for correction in asked if correction.failure == "late"]
        if not late or self._out_of_time_at is None:
            return None
        # What was given up after its turn had come takes at least so long.
        each = max(_seconds(late), _seconds([c for c in asked if c.failure not in NOT_WORKED_ON]))
        if each == 0:
            return Shortfall(len(late), len(asked))
        last = self._asked_at[-1]
        # Where even an answer that is begun at once comes too late to the last step, patience is needed, too.
        timeout = None if last + each <= self._out_of_time_at else math.ceil(each)
        end = self._out_of_time_at if timeout is None else last + timeout
        concurrency = concurrency_needed(self._asked_at, each, end)
        if concurrency > self.pool.workers * self.num_envs:  # so many are never asked at once
            return Shortfall(len(late), len(asked))
        return Shortfall(len(late), len(asked), each, concurrency, timeout)


@dataclass(frozen=True)
class Shortfall:
    """A corrector that couldn't keep up, and what it would need."""

    late: int
    """Corrections that weren't in when the rollout waited no longer, of …"""
    asked: int
    each: float | None = None
    """Seconds that one takes (at least, if none was in time); `None` where the corrector doesn't say so or where no
    concurrency that can be reached would be enough."""
    concurrency: int = 0
    """Corrections that would have to be under way at once."""
    timeout: float | None = None
    """The `correction_timeout` that it takes beside that, where the present one is too short for any corrector."""

    def __str__(self) -> str:
        words = f"The corrector can't keep up: {self.late} of {self.asked} corrections came too late and were dropped."
        if self.each is None:
            return f"{words} Take a faster one, or raise `correction_timeout`."
        longer = "" if self.timeout is None else f" and `correction_timeout` to {self.timeout:g} s"
        return f"{words} At {self.each:.2g} s each, raise its `concurrency` to {self.concurrency}{longer}."


def _seconds(corrections: Sequence[Correction]) -> float:
    """What the corrector took for one of these; 0 if it says nothing of that."""
    seconds = [correction.latency for correction in corrections if correction.latency > 0]
    return sum(seconds) / len(seconds) if seconds else 0.0


def concurrency_needed(asked_at: Sequence[float], each: float, end: float) -> int:
    """The least number under way at once with which all are answered by `end`, in their order, `each` seconds apiece.

    There must be such a number: the last one is asked `each` seconds before `end` or earlier.
    """

    def in_time(concurrency: int) -> bool:
        answered: list[float] = []
        for i, asked in enumerate(asked_at):
            turn = answered[i - concurrency] if i >= concurrency else asked
            answered.append(max(asked, turn) + each)
        return answered[-1] <= end + 1e-6

    low, high = 1, len(asked_at)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if in_time(middle) else (middle + 1, high)
    return low
