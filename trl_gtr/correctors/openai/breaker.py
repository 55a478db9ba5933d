"""A circuit breaker: if the server is down, a rollout shouldn't wait out the deadline of every correction."""

from __future__ import annotations

import time
from collections.abc import Callable


class Breaker:
    """After `failures` consecutive failed corrections, sends nothing for `rest` seconds, then tries one request.

    If that one fails too, the next rest is twice as long, up to ten minutes.
    """

    LONGEST = 600.0

    def __init__(self, failures: int, rest: float = 30.0, clock: Callable[[], float] = time.monotonic):
        self.failures, self.first_rest, self.clock = failures, rest, clock
        self.rest = rest
        self._consecutive = 0
        self._resting_until: float | None = None
        self._probing = False

    def allows(self) -> bool:
        """Whether a request may be sent. The first after a rest is a probe; others are refused until it returns."""
        if self._resting_until is None:
            return True
        if self._probing or self.clock() < self._resting_until:
            return False
        self._probing = True
        return True

    def record(self, reached: bool) -> None:
        """Record the outcome of an allowed request: `reached` if the server answered at all."""
        self._probing = False
        if reached:
            self._consecutive, self._resting_until, self.rest = 0, None, self.first_rest
            return
        self._consecutive += 1
        if self._consecutive >= self.failures:
            if self._resting_until is not None and self.clock() >= self._resting_until:
                self.rest = min(2 * self.rest, self.LONGEST)
            self._resting_until = self.clock() + self.rest

    def abandon(self) -> None:
        """Record that an allowed request ended without telling us anything about the server."""
        self._probing = False
