"""Requests from many threads to one vLLM in this process, which only one thread at a time may use."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)


class _Asked(NamedTuple):
    prompt: Any
    parameters: Any
    check: Callable[[], None]
    answer: Future[Any]


class ContinuousBatch:
    """Runs vLLM's engine in a background thread while there are requests. New ones join those under way.

    Args:
        engine: vLLM's `LLMEngine`.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._asked: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        self._under_way: dict[str, Future[Any]] = {}
        self._numbers = count()
        device: dict[str, Any] = {}
        if torch.cuda.is_available():  # the current device is a thread's own
            device = {"initializer": torch.cuda.set_device, "initargs": (torch.cuda.current_device(),)}
        self._pool = ThreadPoolExecutor(1, "vllm", **device)

    def generate(self, prompt: Any, parameters: Any, check: Callable[[], None] = lambda: None) -> Any:
        """The finished output of one request. Thread-safe.

        Args:
            check: Called in the engine's thread before the request begins; may raise.
        """
        asked = _Asked(prompt, parameters, check, Future())
        self._asked.put(asked)
        self._pool.submit(self._run)
        return asked.answer.result()

    def close(self) -> None:
        """End the thread and let go of the engine."""
        self._pool.shutdown()
        self.engine = None

    def _run(self) -> None:
        """Step the engine until nothing is left to do."""
        while not self._asked.empty() or self._under_way:
            try:
                self._begin_new()
                for output in self.engine.step():
                    answer = self._under_way.pop(output.request_id, None) if output.finished else None
                    if answer is not None:  # else one that could not be aborted
                        answer.set_result(output)
            except Exception as error:
                failed, self._under_way = self._under_way, {}
                try:
                    self.engine.abort_request(list(failed))
                except Exception:  # the first error is the one to report
                    logger.exception("vLLM could not abort its requests.")
                for answer in failed.values():
                    answer.set_exception(error)

    def _begin_new(self) -> None:
        while not self._asked.empty():
            asked = self._asked.get()
            try:
                asked.check()
                name = f"gtr-{next(self._numbers)}"
                self.engine.add_request(name, asked.prompt, asked.parameters)
            except Exception as error:  # this request's own
                asked.answer.set_exception(error)
            else:
                self._under_way[name] = asked.answer
