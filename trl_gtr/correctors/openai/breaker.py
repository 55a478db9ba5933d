"""Rests a server that is down, so that a rollout doesn't wait out the deadline of each of its corrections."""

from __future__ import annotations

import time
from collections.abc import Callable


class Breaker:
    """After `failures` failed corrections in a row nothing is asked for `rest` seconds; then one request is tried.

    If that one fails too, the next rest is twice as long, up to ten minutes.
    """

    LONGEST = 600.0

    def __init__(self, failures: int, rest: float = 30.0, clock: Callable[[], float] = time.monotonic):
        self.failures, self.first_rest, self.clock = failures, rest, clock
        self.rest = rest
        self._in_a_row = 0
        self._closed_until: float | None = None
        self._probing = False

    def allows(self) -> bool:
        """May a request be sent now? The one after a rest is the probe; until it is back the others wait no longer."""
        if self._closed_until is None:
            return True
        if self._probing or self.clock() < self._closed_until:
            return False
        self._probing = True
        return True

    def record(self, reached: bool) -> None:
        """How a request that was allowed has ended: `reached` if the server answered it at all."""
        self._probing = False
        if reached:
            self._in_a_row, self._closed_until, self.rest = 0, None, self.first_rest
            return
        self._in_a_row += 1
        if self._in_a_row >= self.failures:
            if self._closed_until is not None and self.clock() >= self._closed_until:
                self.rest = min(2 * self.rest, self.LONGEST)
            self._closed_until = self.clock() + self.rest

    def abandon(self) -> None:
        """A request that was allowed ended without telling anything of the server."""
        self._probing = False
