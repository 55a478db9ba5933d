"""The corrections of one rollout: requested while it is played, collected when it ends, dropped when late."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass

from ..correctors.background import DaemonPool
from ..correctors.base import BudgetExhausted, Corrector, failed
from ..distributed.progress import Progress
from ..types import Cancellation, Correction, CorrectionRequest, FailureKind

GRACE = 5.0
"""Seconds that a corrector which honours cancellation gets to return what it has."""
NOT_WORKED_ON: tuple[FailureKind, ...] = ("late", "unavailable", "budget", "cancelled")
"""Failures whose latency says nothing about how long an answer takes."""


class PendingCorrections:
    """Requests corrections one vector step at a time and keeps the answers that come back in time.

    Args:
        corrector: `None` requests nothing.
        pool: Threads that call it.
        num_envs: Maximum requests per vector step.
    """

    def __init__(self, corrector: Corrector | None, pool: DaemonPool, num_envs: int) -> None:
        self.corrector, self.pool, self.num_envs = corrector, pool, num_envs
        self.cancellation = Cancellation()
        """To be put into every request."""
        self._steps: list[tuple[Future[list[Correction]] | None, list[int], int]] = []
        self._asked_at: list[float] = []
        self._out_of_time_at: float | None = None

    def ask(self, requests: dict[int, CorrectionRequest], played: int) -> None:
        """Submit a vector step's requests, keyed by position among the `played` environments."""
        if self.corrector is None or not requests:
            self._steps.append((None, [], played))
            return
        self._asked_at += [time.perf_counter()] * len(requests)
        future = self.pool.submit(self.corrector.correct, list(requests.values()))
        self._steps.append((future, list(requests), played))

    def wait(self, seconds: float, stopped: Callable[[], bool], progress: Progress) -> None:
        """Wait until every correction is in, time is up, or the run stops; late corrections are dropped."""
        end = time.monotonic() + seconds
        missing = {future for future, *_ in self._steps if future is not None}
        progress.begin("corrections", len(missing), "step")
        while missing and not stopped() and time.monotonic() < end:
            done, missing = wait(missing, timeout=min(0.5, end - time.monotonic()))
            progress.advance(len(done))
        if not missing:
            return
        self.give_up()
        if not stopped():
            self._out_of_time_at = time.perf_counter()
            wait(missing, timeout=GRACE if self.cancellation.heeded else 0)

    def give_up(self) -> None:
        """Stop waiting: queued requests are cancelled, running ones are told to stop."""
        self.pool.cancel()
        self.cancellation.cancel()

    def join(self) -> tuple[list[Correction | None], str | None]:
        """One correction per played environment and step, `None` where none was requested. Errors surface here.

        Answers that are still missing count as late. A spent budget is not an error: answers already paid for are
        kept, the rest count as failed, and the reason is returned.
        """
        corrections: list[Correction | None] = []
        stop_reason = None
        for future, indices, played in self._steps:
            row: list[Correction | None] = [None] * played
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
        """How far behind the corrector was; `None` if nothing was late."""
        asked = [correction for correction in corrections if correction is not None]
        late = [correction for correction in asked if correction.failure == "late"]
        if not late or self._out_of_time_at is None:
            return None
        # The latency of a correction dropped while running is a lower bound.
        each = max(_seconds(late), _seconds([c for c in asked if c.failure not in NOT_WORKED_ON]))
        if each == 0:
            return Shortfall(len(late), len(asked))
        last = self._asked_at[-1]
        # If the last step's answer would be late even when started at once, the timeout is too short as well.
        timeout = None if last + each <= self._out_of_time_at else math.ceil(each)
        end = self._out_of_time_at if timeout is None else last + timeout
        concurrency = concurrency_needed(self._asked_at, each, end)
        if concurrency > self.pool.workers * self.num_envs:  # more than can ever be requested at once
            return Shortfall(len(late), len(asked))
        return Shortfall(len(late), len(asked), each, concurrency, timeout)


@dataclass(frozen=True)
class Shortfall:
    """A corrector that couldn't keep up, and what it would need."""

    late: int
    """Corrections that were too late, out of …"""
    asked: int
    each: float | None = None
    """Seconds per correction (a lower bound if none was in time); `None` if the corrector doesn't report it or if no
    achievable concurrency would be enough."""
    concurrency: int = 0
    """Concurrent corrections it would need."""
    timeout: float | None = None
    """The `correction_timeout` it would also need, if the current one is too short at any concurrency."""

    def __str__(self) -> str:
        words = f"The corrector can't keep up: {self.late} of {self.asked} corrections came too late and were dropped."
        if self.each is None:
            return f"{words} Use a faster one, or raise `correction_timeout`."
        longer = "" if self.timeout is None else f" and `correction_timeout` to {self.timeout:g} s"
        return f"{words} At {self.each:.2g} s each, raise its `concurrency` to {self.concurrency}{longer}."


def _seconds(corrections: Sequence[Correction]) -> float:
    """Mean latency of these corrections; 0 if the corrector doesn't report it."""
    seconds = [correction.latency for correction in corrections if correction.latency > 0]
    return sum(seconds) / len(seconds) if seconds else 0.0


def concurrency_needed(asked_at: Sequence[float], each: float, end: float) -> int:
    """The smallest concurrency that answers all requests by `end`, in order, at `each` seconds per request.

    The last request must come at least `each` seconds before `end`, or there is no such number.
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
