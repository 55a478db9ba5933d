"""Requests from many threads to one engine that only one thread may use."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from trl_gtr.engines.vllm_batch import ContinuousBatch


class FakeEngine:
    """Takes as many steps for a request as its prompt says; fails at a negative one."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.threads: set[str] = set()
        self.largest_batch = 0
        self.aborted: list[str] = []
        self.breaks = False

    def add_request(self, name: str, prompt: int, parameters: Any) -> None:
        if prompt < 0:
            raise ValueError("prompt too long")
        self.left[name] = prompt

    def step(self) -> list[Any]:
        self.threads.add(threading.current_thread().name)
        self.largest_batch = max(self.largest_batch, len(self.left))
        if self.breaks:
            raise RuntimeError("out of memory")
        self.left = {name: left - 1 for name, left in self.left.items()}
        finished = [name for name, left in self.left.items() if left <= 0]
        return [SimpleNamespace(request_id=name, finished=self.left.pop(name) <= 0) for name in finished]

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        self.left.clear()


def test_requests_join_those_under_way_in_one_thread() -> None:
    engine = FakeEngine()
    batch = ContinuousBatch(engine)
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda i: batch.generate(50 + i, None), range(24)))
    assert len({output.request_id for output in outputs}) == 24
    assert len(engine.threads) == 1
    assert engine.largest_batch > 1
    assert batch.generate(1, None).finished  # it goes on after a rest


def test_a_bad_request_fails_alone() -> None:
    batch = ContinuousBatch(FakeEngine())
    with pytest.raises(ValueError, match="prompt too long"):
        batch.generate(-1, None)

    def stale() -> None:
        raise RuntimeError("vLLM has other weights")

    with pytest.raises(RuntimeError, match="other weights"):
        batch.generate(1, None, stale)
    assert batch.generate(1, None).finished


@pytest.mark.parametrize("aborts", [True, False])
def test_an_engine_that_breaks_fails_all_requests(aborts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    if not aborts:
        monkeypatch.setattr(engine, "abort_request", lambda names: (engine.aborted.extend(names), 1 / 0))
    batch, engine.breaks = ContinuousBatch(engine), True
    with pytest.raises(RuntimeError, match="out of memory"):
        batch.generate(3, None)
    assert len(engine.aborted) == 1
    engine.breaks = False
    assert batch.generate(3, None).finished
