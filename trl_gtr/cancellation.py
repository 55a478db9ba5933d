"""How one thread tells others that their answers are no longer wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Cancellation:
    """Handed to everybody who works on something; whoever wants the results may call it off. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[object, Callable[[], None]] = {}
        self._cancelled = False
        self.heeded = False
        """Somebody has looked or listened: after `cancel` it is worth waiting for what they have so far."""

    def __repr__(self) -> str:
        return f"Cancellation({'cancelled' if self._cancelled else 'not cancelled'})"

    @property
    def cancelled(self) -> bool:
        self.heeded = True
        return self._cancelled

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            callbacks, self._callbacks = self._callbacks, {}
            for callback in callbacks.values():  # under the lock: nothing is called any more once `calling` has ended
                callback()

    @contextmanager
    def calling(self, callback: Callable[[], None]) -> Iterator[None]:
        """While the block runs, `cancel` calls `callback`, in its own thread; at once if it came before.

        The callback must be short and leave this object alone.
        """
        key = object()
        self.heeded = True
        with self._lock:
            if self._cancelled:
                callback()
            else:
                self._callbacks[key] = callback
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.pop(key, None)
