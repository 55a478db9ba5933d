"""`Worker`: one environment in another process, wherever that is, and how a run talks to it.

`WorkerVectorEnv` and `WorkerEnv` supervise workers; a subclass knows only how to carry bytes to and fro.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import cloudpickle

PATIENCE = 10.0
"""Seconds a worker gets to close its environment before it is killed."""


class WorkerLost(RuntimeError):
    """A worker crashed or hung, or its environment raised an error."""


class WorkerFailed(WorkerLost):
    """The environment raised an error. The worker is alive and takes further requests."""


class WorkerRefused(WorkerLost, ValueError):
    """The environment can't be created, saved or restored: something it needs is wrong or missing."""


class Worker(ABC):
    """One environment in another process. Requests are sent first and their answers fetched later."""

    def __init__(self) -> None:
        self.episodes = 0
        self._killed = False

    def send(self, request: str, *arguments: Any) -> None:
        """Make a request of `Served`. A dead worker is detected when its answer is fetched."""
        self.post(cloudpickle.dumps((request, arguments)))

    def answer(self, timeout: float | None) -> Any:
        """The answer to the oldest request. Raises `WorkerLost` if it is an error or doesn't come in time."""
        if self._killed:
            raise WorkerLost("the process was killed")  # any answer on its way is to an older request
        kind, value = cloudpickle.loads(self.fetch(timeout))
        if kind == "refusal":
            raise WorkerRefused(value)
        if kind == "error":
            raise WorkerFailed(value)
        if kind == "lost":
            raise WorkerLost(value)
        return value

    @abstractmethod
    def post(self, request: bytes) -> None:
        """Carry a request to the worker, without waiting."""

    @abstractmethod
    def fetch(self, timeout: float | None) -> bytes:
        """Wait for the answer to the oldest request. Raises `WorkerLost` if none comes in time."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process and everything its environment started; the next `answer` raises `WorkerLost`."""

    @abstractmethod
    def release(self) -> None:
        """Let the worker close its environment and end, without waiting for it."""

    @abstractmethod
    def stop(self, patience: float = 0.0) -> None:
        """Release the worker and give it `patience` seconds, then kill it and anything it left behind."""


StartWorker = Callable[[bytes], Worker]
"""Starts a worker that has been asked to `make` the environment of this pickled function."""
