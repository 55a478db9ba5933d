"""Requests from many threads to one vLLM in this process, which only one thread at a time may use."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any, NamedTuple


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
        self._pool = ThreadPoolExecutor(1, "vllm")

    def generate(self, prompt: Any, parameters: Any, check: Callable[[], None] = lambda: None) -> Any:
        """The finished output of one request. Thread-safe.

        Args:
            check: Called in the engine's thread before the request begins; may raise.
        """
        asked = _Asked(prompt, parameters, check, Future())
        self._asked.put(asked)
        self._pool.submit(self._run)
        return asked.answer.result()

    def _run(self) -> None:
        """Step the engine until nothing is left to do."""
        while not self._asked.empty() or self._under_way:
            try:
                self._begin_new()
                for output in self.engine.step():
                    if output.finished:
                        self._under_way.pop(output.request_id).set_result(output)
            except Exception as error:
                for answer in self._under_way.values():
                    answer.set_exception(error)
                self.engine.abort_request(list(self._under_way))
                self._under_way.clear()

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
