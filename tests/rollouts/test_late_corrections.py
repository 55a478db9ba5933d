"""Corrections that come too late: given up, not paid for any further, and never in the way of later ones."""

from __future__ import annotations

import heapq
import itertools
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from chat_server import ChatServer, says, waits_for_hang_up
from corrector_cases import no_answer, number_line_request
from function_engine import make_collector

from trl_gtr.correctors import CachedCorrector, Corrector, ExpertCorrector, OpenAICorrector
from trl_gtr.correctors.background import DaemonPool
from trl_gtr.correctors.base import failed
from trl_gtr.rollouts.pending_corrections import concurrency_needed
from trl_gtr.tasks.number_line import NumberLineTask
from trl_gtr.types import Cancellation, Correction, Generation

pytest.importorskip("openai")

LATE = "late"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    made: list[OpenAICorrector] = []

    def build(server: ChatServer, **options: Any) -> OpenAICorrector:
        made.append(OpenAICorrector("test-model", base_url=server.url, api_key="none", **options))
        return made[-1]

    yield build
    for corrector in made:
        corrector.close()


class Numbered:
    """A policy whose thoughts are numbered, so that no two requests are the same and a server can tell them apart.

    Args:
        before: Called before each vector step with its number.
        silent: Says of a vector step whether its texts are unreadable, so that nobody is asked.
    """

    def __init__(
        self, before: Callable[[int], None] = lambda step: None, silent: Callable[[int], bool] = lambda step: False
    ) -> None:
        self.before, self.silent = before, silent
        self.steps, self.thoughts = itertools.count(), itertools.count()

    def __call__(self, prompts: list[str], images: list[np.ndarray]) -> list[Generation]:
        step = next(self.steps)
        self.before(step)
        return [Generation(np.zeros(1, np.int64), "" if self.silent(step) else self.text()) for _ in prompts]

    def text(self) -> str:
        thought = f"Try {next(self.thoughts)}: +."
        return f'{{"current number": 0, "target number": 2, "thoughts": "{thought}", "action": "+"}}'


def number(seen: Any) -> int:
    found = re.search(r"Try ([0-9]+)", seen.text)
    assert found
    return int(found[1])


def outcomes(rollout: Any) -> list[str]:
    return [c.failure or c.verdict for c in rollout.corrections if c is not None]


def own_threads() -> int:
    """Threads of this process, without the server's and those in which asyncio looks up host names."""
    others = ("process_request", "serve_forever", "asyncio_")
    return sum(not any(name in thread.name for name in others) for thread in threading.enumerate())


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_server_too_slow_for_a_rollout_costs_the_next_one_nothing(make: Any) -> None:
    """Of each update's twelve requests the server answers four and sits on the next four, the other slots' worth.

    The other four are never sent. Those that hold the slots are cut off, so that each update fares like the first.
    """
    answered: Counter[int] = Counter()

    def four_an_update(handler: Any, seen: Any) -> None:
        update = number(seen) // 12
        with handler.chat.changed:
            answered[update] += 1
            in_time = answered[update] <= 4
        (says(no_answer()) if in_time else waits_for_hang_up)(handler, seen)

    with ChatServer(four_an_update) as server:
        # The last vector step begins when the server has eight: four are answered, and four hold all slots.
        def before(step: int) -> None:
            if step % 3 == 2:
                server.wait_for(lambda: len(server.seen) >= 8 * (step // 3 + 1), 20)

        corrector = make(server, concurrency=4, timeout=60.0, deadline=60.0)
        collector = make_collector(NumberLineTask(), Numbered(before), corrector, num_envs=4)
        labels, calls, threads = [], [], own_threads()
        for _ in range(4):
            rollout = collector.collect(3, correction_timeout=0.2)
            labels.append(outcomes(rollout).count("corrected"))
            calls.append(len(server.seen))
            eventually(lambda: own_threads() <= threads + 1)  # the corrector's event loop
            server.wait_for(lambda: server.hung_up == 4 * len(labels), 20)
            assert sum(c.usage.calls for c in rollout.corrections if c) == 8
        assert labels == [4] * 4
        assert calls == [8, 16, 24, 32]
        assert corrector.metrics()["corrector/calls"] == 32


def test_an_answer_in_time_is_kept_beside_a_late_one_of_the_same_step(make: Any) -> None:
    def step(handler: Any, seen: Any) -> None:
        (waits_for_hang_up if number(seen) == 1 else says(no_answer()))(handler, seen)

    with ChatServer(step) as server:
        corrector = make(server, timeout=60.0, deadline=60.0, prices=(1.0, 1.0))

        def before(step: int) -> None:
            if step == 1:  # three of the first step's four are back
                eventually(lambda: len(server.seen) == 4 and len(corrector._open()._flights) == 1)

        policy = Numbered(before, silent=lambda step: step == 1)
        rollout = make_collector(NumberLineTask(), policy, corrector, num_envs=4).collect(2, correction_timeout=0.1)
        assert outcomes(rollout) == ["corrected", LATE, "corrected", "corrected"]
        # It may have been billed, so that it counts with what it may have cost.
        assert rollout.corrections[1].usage.calls == 1
        assert rollout.corrections[1].usage.completion_tokens == 1024
        assert corrector.metrics()["corrector/usd_spent"] == pytest.approx(
            sum(c.usage.usd for c in rollout.corrections if c is not None)
        )


def test_a_request_that_another_still_waits_for_goes_on(make: Any) -> None:
    go = threading.Event()

    def step(handler: Any, seen: Any) -> None:
        assert go.wait(20)
        says(no_answer())(handler, seen)

    wanted = number_line_request(1, 4, said=(2, 4))
    unwanted = replace(wanted, cancellation=Cancellation())
    answers: dict[str, Any] = {}
    with ChatServer(step) as server:
        corrector = make(server)
        threads = [
            threading.Thread(target=lambda n=name, r=request: answers.update({n: corrector.correct([r])[0]}))
            for name, request in (("unwanted", unwanted), ("wanted", wanted))
        ]
        threads[0].start()
        server.wait_for(lambda: server.in_flight == 1)
        threads[1].start()
        eventually(lambda: sum(f.waiting for f in list(corrector._open()._flights.values())) == 2)
        unwanted.cancellation.cancel()
        threads[0].join(20)
        assert answers["unwanted"].failure == LATE
        go.set()
        threads[1].join(20)
        assert answers["wanted"].verdict == "corrected"
        assert len(server.seen) == 1


def test_nothing_is_sent_for_a_request_that_was_given_up_before(make: Any) -> None:
    request = number_line_request(1, 4)
    request.cancellation.cancel()
    with ChatServer(says(no_answer())) as server:
        assert make(server).correct([request])[0].failure == LATE
        assert server.seen == []


def test_a_late_answer_is_not_kept_in_a_cache(make: Any, tmp_path: Any) -> None:
    request = number_line_request(1, 4, said=(2, 4))
    with ChatServer(waits_for_hang_up, says(no_answer())) as server:
        cached = CachedCorrector(make(server, timeout=60.0, deadline=60.0), tmp_path)
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.extend(cached.correct([request])))
        thread.start()
        server.wait_for(lambda: server.in_flight == 1)
        request.cancellation.cancel()
        thread.join(20)
        assert answers[0].failure == LATE
        assert cached.correct([replace(request, cancellation=Cancellation())])[0].verdict == "corrected"


def test_a_new_request_does_not_join_a_call_that_was_given_up(tmp_path: Any) -> None:
    """An earlier rollout's call is given up and not back yet when the next rollout asks the same."""
    asked, go = threading.Event(), threading.Event()

    class Heedful(Corrector):
        identity = "heedful"

        def correct(self, requests: Any) -> list[Correction]:
            if requests[0] is earlier:
                asked.set()
                assert go.wait(20)
                return [failed("late")]
            return [Correction("right") for _ in requests]

    earlier = number_line_request(1, 4)
    later = replace(earlier, cancellation=Cancellation())
    cached = CachedCorrector(Heedful(), tmp_path)
    answers: list[Correction] = []
    first = threading.Thread(target=lambda: answers.extend(cached.correct([earlier])))
    second = threading.Thread(target=lambda: answers.extend(cached.correct([later])))
    try:
        first.start()
        assert asked.wait(20)
        earlier.cancellation.cancel()
        second.start()
        second.join(20)
        assert [answer.verdict for answer in answers] == ["right"]
    finally:
        go.set()
    first.join(20)
    assert answers[1].failure == LATE
    assert cached.metrics()["corrector/cache_misses"] == 2


def test_what_a_corrector_of_ones_own_hands_in_when_given_up_is_kept() -> None:
    class HalfDone(Corrector):
        def correct(self, requests: Any) -> list[Correction]:
            given_up = threading.Event()
            with requests[0].cancellation.calling(given_up.set):
                assert given_up.wait(20)
            return [Correction("right"), *[failed("late") for _ in requests[1:]]]

    rollout = make_collector(NumberLineTask(), Numbered(), HalfDone(), num_envs=2).collect(2, correction_timeout=0.1)
    assert outcomes(rollout) == ["right", LATE] * 2


def test_a_corrector_that_never_answers_holds_a_bounded_number_of_threads(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    class Stuck(Corrector):
        def correct(self, requests: Any) -> list[Correction]:
            release.wait(60)
            return ExpertCorrector().correct(requests)

    collector = make_collector(NumberLineTask(), Numbered(), Stuck(), num_envs=1, correction_workers=3)
    before = own_threads()
    try:
        for _ in range(3):
            assert outcomes(collector.collect(5, correction_timeout=0.05)) == [LATE] * 5
            assert own_threads() <= before + 3
    finally:
        release.set()
    eventually(lambda: own_threads() <= before)
    assert outcomes(collector.collect(5)).count(LATE) == 0
    told = "The corrector can't keep up: 5 of 5 corrections came too late and were dropped."
    assert caplog.text.count(told) == 1
    assert "raise `correction_timeout`" in caplog.text


def test_an_error_in_the_rollout_gives_up_what_is_under_way(make: Any) -> None:
    with ChatServer(waits_for_hang_up) as server:

        def before(step: int) -> None:
            if step == 1:
                server.wait_for(lambda: server.in_flight == 2)
                raise RuntimeError("broken on purpose")

        corrector = make(server, timeout=60.0, deadline=60.0)
        collector = make_collector(NumberLineTask(), Numbered(before), corrector, num_envs=2)
        with pytest.raises(RuntimeError, match="broken on purpose"):
            collector.collect(2)
        server.wait_for(lambda: server.hung_up == 2)


def test_the_warning_names_the_concurrency_that_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    """Eight requests at about the same time, of which those that were answered took 2 s each."""

    class Slow(Corrector):
        def correct(self, requests: Any) -> list[Correction]:
            return [Correction("right", latency=2.0), *[failed("late") for _ in requests[1:]]]

    class NeverBack(Slow):
        def correct(self, requests: Any) -> list[Correction]:
            assert not requests[0].cancellation.cancelled
            given_up = threading.Event()
            with requests[0].cancellation.calling(given_up.set):
                assert given_up.wait(20)
            return super().correct(requests)

    # Given up after a fifth of a second, where the last answer takes two: all eight at once, and 2 s of patience.
    collector = make_collector(NumberLineTask(), Numbered(), NeverBack(), num_envs=8)
    for _ in range(2):
        collector.collect(1, correction_timeout=0.2)
    assert [record.getMessage() for record in caplog.records] == [
        "The corrector can't keep up: 7 of 8 corrections came too late and were dropped. At 2 s each, raise its "
        "`concurrency` to 8 and `correction_timeout` to 2 s."
    ]


def test_the_warning_names_a_concurrency_that_can_be_reached(caplog: pytest.LogCaptureFixture) -> None:
    """All vector steps of a rollout are asked at once; where a bound forbids it no number would help."""
    at_once = threading.Semaphore(0)

    class Waiting(Corrector):
        def correct(self, requests: Any) -> list[Correction]:
            given_up = threading.Event()
            at_once.release()
            with requests[0].cancellation.calling(given_up.set):
                assert given_up.wait(60)
            return [failed("late", latency=1.0) for _ in requests]

    def all_begun(step: int) -> None:
        if step == 47:
            assert all(at_once.acquire(timeout=20) for _ in range(47))

    collector = make_collector(NumberLineTask(), Numbered(all_begun), Waiting(), num_envs=1)
    assert outcomes(collector.collect(48, correction_timeout=0.1)) == [LATE] * 48
    (told,) = [record.getMessage() for record in caplog.records]
    assert re.search(r"raise its `concurrency` to \d+", told)
    caplog.clear()
    bounded = make_collector(NumberLineTask(), Numbered(), Waiting(), num_envs=1, correction_workers=2)
    bounded.collect(8, correction_timeout=0.1)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.endswith(
        "8 of 8 corrections came too late and were dropped. Take a faster one, or raise `correction_timeout`."
    )


def finished(asked_at: list[float], each: float, concurrency: int) -> float:
    """When a server with so many slots has answered everything, slot by slot."""
    slots = [0.0] * concurrency
    for asked in asked_at:
        heapq.heappush(slots, max(asked, heapq.heappop(slots)) + each)
    return max(slots)


@pytest.mark.parametrize(
    ("asked_at", "each", "end", "needed"),
    [
        ([0.0] * 8, 1.0, 1.0, 8),
        ([0.0] * 8, 1.0, 2.0, 4),
        ([0.0] * 8, 1.0, 8.0, 1),
        ([0.0, 1.0, 2.0, 3.0], 3.0, 6.0, 3),
        ([0.0, 1.0, 2.0, 3.0], 3.0, 12.0, 1),
        ([5.0], 1.0, 6.0, 1),
    ],
)
def test_concurrency_needed(asked_at: list[float], each: float, end: float, needed: int) -> None:
    assert concurrency_needed(asked_at, each, end) == needed


def test_concurrency_needed_is_the_least_that_suffices() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        asked_at = np.sort(rng.uniform(0, 10, rng.integers(1, 40))).tolist()
        each = float(rng.uniform(0.1, 5))
        end = asked_at[-1] + each + float(rng.uniform(0, 10))
        enough = concurrency_needed(asked_at, each, end)
        assert finished(asked_at, each, enough) <= end + 1e-5
        assert enough == 1 or finished(asked_at, each, enough - 1) > end


def test_cancellation_calls_once_and_never_after_its_block() -> None:
    cancellation, called = Cancellation(), []
    with cancellation.calling(lambda: called.append("early")):
        pass
    assert not cancellation.cancelled
    with cancellation.calling(lambda: called.append("during")):
        cancellation.cancel()
        cancellation.cancel()
    with cancellation.calling(lambda: called.append("after")):
        pass
    assert called == ["during", "after"]
    assert cancellation.cancelled


def test_pool_reuses_its_threads_and_forgets_what_has_not_begun() -> None:
    go, pool = threading.Event(), DaemonPool(2, "pool")
    futures = [pool.submit(go.wait, 20) for _ in range(6)]
    eventually(lambda: sum(future.running() for future in futures) == 2)
    assert sum(thread.name == "pool" for thread in threading.enumerate()) == 2
    pool.cancel()
    go.set()
    assert [future.cancelled() for future in futures] == [False] * 2 + [True] * 4
    assert [future.result(20) for future in futures[:2]] == [True, True]
    assert pool.submit(int, "7").result(20) == 7
    with pytest.raises(ValueError, match="invalid literal"):
        pool.submit(int, "seven").result(20)
    eventually(lambda: not any(thread.name == "pool" for thread in threading.enumerate()))
