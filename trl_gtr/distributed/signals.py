"""Defers SIGTERM and SIGINT until the run can stop cleanly."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

_ECHO = 5.0
"""Seconds during which a second signal is ignored as a duplicate: launchers forward signals that the terminal or
scheduler has already sent to every process."""


class StopSignals:
    """While active, the first SIGTERM or SIGINT is only recorded in `received`. A later second one has its usual
    effect, so a run that hangs can still be killed."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        self._noted_at = 0.0

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
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
