"""SIGTERM and SIGINT as something that a run notices at a good moment."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

_ECHO = 5.0
"""Seconds in which a second signal is the first one's echo: a launcher passes on what a terminal or a scheduler has
already sent to everybody."""


class StopSignals:
    """While open, the first SIGTERM or SIGINT is noted in `received` and the process goes on. A later second one does
    what it always did: a run that doesn't come to its good moment can still be ended."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        self._noted_at = 0.0

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received, self._noted_at = number, time.monotonic()
        elif time.monotonic() - self._noted_at > _ECHO:
            self.__exit__()
            signal.raise_signal(number)
