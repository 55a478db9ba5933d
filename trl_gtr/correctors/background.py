"""Daemon threads that don't block interpreter exit: an event loop for async clients, and a pool for blocking calls."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """An event loop in a thread, started on first use and ended for good by `stop`. Thread-safe."""

    def __init__(self, name: str):
        self.name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    def submit(self, function: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> Future[T]:
        """Run a coroutine function in the loop. Cancelling the future cancels the coroutine; after `stop` the future
        is already cancelled."""
        with self._lock:
            if self._stopped:
                ended: Future[T] = Future()
                ended.cancel()
                return ended
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                # A daemon, so that a script that forgets `stop` can still exit.
                self._thread = threading.Thread(target=self._loop.run_forever, name=self.name, daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(function(*arguments), self._loop)

    def stop(self, finally_run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel whatever is running, wait for it, run a final coroutine and end the thread."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop, self._thread, self._stopped = None, None, True
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(finally_run), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class DaemonPool:
    """Runs calls in at most `workers` threads, which end when idle.

    Not `ThreadPoolExecutor`: Python joins an executor's threads at exit, and a corrector may never answer.
    """

    def __init__(self, workers: int, name: str):
        self.workers, self.name = workers, name
        self._lock = threading.Lock()
        self._running = 0
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._waiting.append((future, partial(function, *arguments)))
            if self._running < self.workers:
                self._running += 1
                threading.Thread(target=self._work, name=self.name, daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                future, call = self._waiting.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

    def cancel(self) -> None:
        """Cancel every call that hasn't started."""
        with self._lock:
            for future, _ in self._waiting:
                future.cancel()
                future.set_running_or_notify_cancel()  # wakes up its waiters
            self._waiting.clear()


async def _cancel_all(finally_run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await finally_run()
