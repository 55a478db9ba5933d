"""Limits on what a corrector may spend: in arithmetic, and over HTTP."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chat_server import ChatServer, Handler, floods, hangs, raw, redirects, says, status, waits
from corrector_cases import no_answer, number_line_request, yes_answer
from function_engine import make_collector

from trl_gtr.correctors import BudgetExhausted, Corrector, ExpertCorrector, OpenAICorrector
from trl_gtr.correctors.openai.budget import Budget, CallSizes, Limits, price_of, words
from trl_gtr.tasks.number_line import NumberLineTask
from trl_gtr.types import Generation, Usage

pytest.importorskip("openai")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    made: list[OpenAICorrector] = []

    def build(server: ChatServer, **options: Any) -> OpenAICorrector:
        options = {"max_retries": 0, "model": "test-model"} | options
        made.append(OpenAICorrector(base_url=server.url, api_key="sk-budget-tests", **options))
        return made[-1]

    yield build
    for corrector in made:
        corrector.close()


def requests(count: int, first: int = 0) -> list[Any]:
    return [number_line_request(1, 4, shade=shade) for shade in range(first, first + count)]


def kinds(answers: list[Any]) -> list[Any]:
    return [answer.failure or answer.verdict for answer in answers]


def test_prices() -> None:
    assert price_of("gpt-4o") == price_of("gpt-4o-2024-08-06") == (2.5, 10.0)
    assert price_of("gpt-4o-2024-05-13") == (5.0, 15.0)
    assert price_of("gpt-4o-mini") == (0.15, 0.6)
    assert price_of("llava") is None
    assert Budget(Limits(), (2.5, 10.0)).cost(1000, 100) == Usage(1, 1000, 100, pytest.approx(0.0035))


def test_reservations_of_calls_in_flight_count() -> None:
    budget = Budget(Limits(usd=0.010), (10.0, 10.0))
    estimate = budget.cost(300, 100)  # 0.004
    assert budget.reserve(estimate) is True
    assert budget.reserve(estimate) is True
    assert budget.reserve(estimate) is None  # wait: the first two may turn out cheaper
    budget.settle(estimate, budget.cost(100, 100))
    assert budget.reserve(estimate) is True
    budget.settle(estimate, estimate)
    budget.settle(estimate, estimate)
    assert budget.spent.usd == pytest.approx(0.010)
    assert budget.reserve(estimate) is False


@pytest.mark.parametrize("limits", [{"calls": 0}, {"tokens": -1}, {"usd": 0.0}])
def test_limits_must_be_positive(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Limits(**limits)


def test_limits_are_split_over_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert Limits(10, 1000, 2.0).per_process() == Limits(2, 250, 0.5)
    assert Limits().per_process() == Limits()


def test_usd_limit_needs_a_price(make: Any) -> None:
    with ChatServer(says(yes_answer())) as server:
        with pytest.raises(ValueError, match="max_usd needs the price of 'test-model'"):
            make(server, max_usd=1.0)
        with pytest.raises(ValueError, match="when_spent must be"):
            make(server, when_spent="explode")


def test_stop_returns_what_was_paid_for_and_then_raises(make: Any) -> None:
    with ChatServer(says(yes_answer())) as server:
        corrector = make(server, max_calls=3)
        assert not corrector.exhausted
        answers = corrector.correct(requests(5))
        assert sorted(kinds(answers)) == ["budget", "budget", "right", "right", "right"]
        assert corrector.exhausted
        with pytest.raises(BudgetExhausted, match="3 calls"):
            corrector.correct(requests(1))
        assert len(server.seen) == 3
    metrics = corrector.metrics()
    assert metrics["corrector/calls"] == 3
    assert metrics["corrector/calls_remaining"] == 0
    assert metrics["corrector/failed_budget"] == 2


def test_continue_warns_once_and_asks_nobody(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    with ChatServer(says(yes_answer())) as server:
        corrector = make(server, max_calls=1, when_spent="continue")
        answers = [corrector.correct(requests(1, shade))[0] for shade in range(4)]
        assert len(server.seen) == 1
    assert kinds(answers) == ["right", "budget", "budget", "budget"]
    assert caplog.text.count("budget is spent") == 1
    assert "going on without corrections" in caplog.text


def test_another_corrector_takes_over(make: Any) -> None:
    with ChatServer(says(yes_answer())) as server:
        corrector = make(server, max_calls=1, when_spent=ExpertCorrector())
        wrong = number_line_request(1, 4, said=(2, 4))
        answers = corrector.correct(requests(1)) + corrector.correct([wrong, *requests(1)])
    assert kinds(answers) == ["right", "corrected", "right"]
    assert answers[1].thought["current number"] == 1
    assert (answers[1].source, answers[1].fallback) == ("expert", True)


def test_fallback_is_connected_in_full(make: Any) -> None:
    """Its key is checked, its calls are logged and kept, it is closed, and it has a budget of its own."""
    with ChatServer(says(yes_answer())) as server, ChatServer(says(yes_answer()), key="another") as locked:
        with pytest.raises(ValueError, match="rejects the key"):
            make(server, max_calls=1, when_spent=make(locked)).check(NumberLineTask())
        second = make(server, max_calls=2)
        corrector = make(server, max_calls=1, when_spent=second)
        answers = corrector.correct(requests(5))
        assert sorted(kinds(answers)) == ["budget", "budget", "right", "right", "right"]
        metrics = corrector.metrics()
        assert (metrics["corrector/calls"], metrics["corrector/fallback_calls"]) == (1, 2)
        assert "corrector/failed_budget" not in metrics  # the first one's four were handed on …
        assert metrics["corrector/fallback_failed_budget"] == 2  # … and two of them not paid by the other
        assert corrector.exhausted
        with pytest.raises(BudgetExhausted):
            corrector.correct(requests(1))
        state = json.loads(json.dumps(corrector.state_dict()))
        resumed = make(server, max_calls=1, when_spent=make(server, max_calls=2))
        resumed.load_state_dict(state)
        assert resumed.exhausted
        assert resumed.metrics()["corrector/fallback_calls"] == 2
        corrector.close()
        assert second._open() is None
        corrector.reopen()
        assert second._open() is not None


def test_spent_fallback_keeps_the_answers_of_the_first(make: Any) -> None:
    class Spent(Corrector):
        def correct(self, requests: Any) -> Any:
            raise BudgetExhausted("nothing left")

    with ChatServer(says(yes_answer())) as server:
        corrector = make(server, max_calls=1, when_spent=Spent())
        assert sorted(kinds(corrector.correct(requests(2)))) == ["budget", "right"]
    assert corrector.metrics()["corrector/failed_budget"] == 1


def test_usd_limit_is_never_exceeded_with_many_in_flight(make: Any) -> None:
    """A call costs 0.0012 USD (100 × 2 + 20 × 50 per million); 0.02 pay for 16 of them, estimates included."""
    with ChatServer(says(yes_answer())) as server:
        corrector = make(server, prices=(2.0, 50.0), max_usd=0.02, max_completion_length=100, when_spent="continue")
        answers = corrector.correct(requests(40))
        paid = kinds(answers).count("right")
        assert len(server.seen) == paid
    metrics = corrector.metrics()
    assert metrics["corrector/usd_spent"] == pytest.approx(0.0012 * paid)
    assert metrics["corrector/usd_spent"] + metrics["corrector/usd_remaining"] == pytest.approx(0.02)
    assert metrics["corrector/usd_spent"] <= 0.02
    assert 8 <= paid <= 16


@pytest.mark.parametrize("model", ["test-model", "gpt-4o-mini"])
def test_limit_holds_where_pictures_cost_more_than_was_guessed(make: Any, model: str) -> None:
    """gpt-4o-mini counts about 8500 tokens a picture; 50,000 pay for five such calls, many of which want to start."""

    def slow(handler: Any, seen: Any) -> None:
        time.sleep(0.1)
        says(yes_answer(), usage=(8700, 60))(handler, seen)

    with ChatServer(slow) as server:
        corrector = make(server, model=model, max_tokens=50_000, when_spent="continue")
        answers = corrector.correct(requests(12))
    assert corrector.metrics()["corrector/tokens"] <= 50_000
    assert 3 <= kinds(answers).count("right") <= 5


def release_once(server: ChatServer, in_flight: int, go: threading.Event) -> None:
    """Let the server answer when so many calls are under way together."""

    def release() -> None:
        server.wait_for(lambda: server.in_flight >= in_flight)
        go.set()

    threading.Thread(target=release, daemon=True).start()


def test_limit_holds_where_the_server_ignores_the_length_limit(make: Any) -> None:
    """An answer is to have 1024 tokens, 0.01 USD, and has 25,000: 0.25 USD, of which a dollar pays for four."""
    go = threading.Event()
    with ChatServer(
        says(yes_answer(), usage=(300, 25_000)), waits(go, says(yes_answer(), usage=(300, 25_000)))
    ) as server:
        corrector = make(server, prices=(2.5, 10.0), max_usd=1.0, when_spent="continue")
        release_once(server, 2, go)
        answers = corrector.correct(requests(64))
        assert len(server.seen) == kinds(answers).count("right") >= 3
    assert corrector.metrics()["corrector/usd_spent"] <= 1.0


def test_answers_that_grow_exceed_the_limit_by_the_calls_under_way_at_most(make: Any) -> None:
    """The first answer is short. The next four, sent on the strength of that, are not, and nothing follows them."""
    go = threading.Event()
    short, long = says(yes_answer(), usage=(300, 20)), says(yes_answer(), usage=(300, 50_000))
    with ChatServer(short, waits(go, long)) as server:
        corrector = make(server, prices=(2.5, 10.0), max_usd=1.0, concurrency=4, when_spent="continue")
        release_once(server, 4, go)
        answers = corrector.correct(requests(64))
        assert len(server.seen) == 1 + 4
    assert sorted(set(kinds(answers))) == ["budget", "right"]
    assert corrector.metrics()["corrector/usd_spent"] == pytest.approx(0.0009 + 0.00001 * 5 + 4 * 0.50075, abs=1e-3)


def test_answer_without_end_is_charged_for_what_came(make: Any) -> None:
    with ChatServer(floods) as server:
        flooded = make(server, prices=(1.0, 1.0)).correct(requests(1))[0]
    assert flooded.failure == "unusable"
    assert 300_000 < flooded.usage.completion_tokens < 400_000  # a megabyte
    with ChatServer(says("x" * 300_000, usage=None)) as server:
        uncounted = make(server, prices=(1.0, 1.0)).correct(requests(1))[0]
    assert uncounted.usage.completion_tokens >= 100_000


def test_learned_sizes_never_shrink() -> None:
    sizes = CallSizes(Budget(Limits(), None), 100, 0)
    body = {"messages": [{"role": "user", "content": "a" * 30}]}
    early = sizes.estimate(body)
    sizes.counted(body, 50, 40_000)
    assert sizes.estimate(body).completion_tokens == 50_000
    sizes.uncounted(early, 3 * 1000)  # longer than was guessed when it was sent, shorter than what is known by now
    assert sizes.estimate(body).completion_tokens == 50_000


def test_learned_sizes_outlive_the_connection_and_the_run(make: Any) -> None:
    """An answer is to have 1024 tokens and has 25,000. Whoever knows that doesn't send what 30,000 can't pay for."""
    with ChatServer(says(yes_answer(), usage=(300, 25_000))) as server:
        corrector = make(server, when_spent="continue")
        assert kinds(corrector.correct(requests(1))) == ["right"]
        corrector.close()
        corrector.reopen()
        corrector.budget.limits = Limits(tokens=25_300 + 30_000)
        assert kinds(corrector.correct(requests(1, first=1))) == ["budget"]
        state = json.loads(json.dumps(corrector.state_dict()))
        resumed = make(server, max_tokens=25_300 + 30_000, when_spent="continue")
        resumed.load_state_dict(state)
        assert kinds(resumed.correct(requests(1, first=1))) == ["budget"]
        assert len(server.seen) == 1
        del state["sizes"]  # of a checkpoint that has none
        older = make(server, max_tokens=25_300 + 30_000, when_spent="continue")
        older.load_state_dict(state)
        assert kinds(older.correct(requests(1, first=1))) == ["right"]


def test_nothing_is_learned_from_what_is_no_chat_completion(make: Any) -> None:
    """A page of 300,000 bytes is charged for, but is no measure of later answers."""
    with ChatServer(raw(b"<html>" + b"x" * 300_000), says(yes_answer())) as server:
        corrector = make(server, max_tokens=130_000, when_spent="continue")
        answer = corrector.correct(requests(1))[0]
    assert answer.usage.calls == 2  # the page and, on the complaint about it, an answer
    assert answer.usage.completion_tokens >= 100_000
    assert answer.verdict == "right"


def test_redirects_are_counted_one_by_one_and_cost_nothing(make: Any) -> None:
    with ChatServer(redirects) as server:
        corrector = make(server, prices=(1.0, 1.0), max_retries=2, retry_delay=0.01)
        answer = corrector.correct(requests(1))[0]
        assert len(server.seen) == answer.usage.calls == corrector.metrics()["corrector/calls"] == 1
    assert answer.failure == "rejected"
    assert "redirect" in answer.reason
    assert "base_url" in answer.reason
    assert answer.usage.usd == 0


def test_server_that_redirects_is_told_at_the_start(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "do_GET", lambda handler: handler.send(301, b"", {"Location": "https://elsewhere"}))
    with ChatServer(says(yes_answer())) as server:
        with pytest.raises(ValueError, match="redirects to another address: make base_url the final one"):
            make(server).check(NumberLineTask())
        assert server.seen == []


def test_time_out_before_there_is_a_connection_costs_nothing(make: Any) -> None:
    """A listener whose queue is full: further connections hang."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            other = stack.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(listener.getsockname())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server: Any = SimpleNamespace(url=url)
        corrector = make(server, prices=(1.0, 1.0), max_retries=1, retry_delay=0.01, timeout=1.0)
        answer = corrector.correct(requests(1))[0]
    assert answer.failure == "timeout"
    assert (answer.usage.calls, answer.usage.usd) == (2, 0)


def test_first_call_that_can_not_be_paid_is_not_made(make: Any) -> None:
    with ChatServer(says(yes_answer(), usage=(8700, 60))) as server:
        answers = make(server, model="gpt-4o-mini", max_tokens=9_000, when_spent="continue").correct(requests(2))
        assert server.seen == []
    assert kinds(answers) == ["budget", "budget"]


def test_estimate_counts_schema_tools_and_calls() -> None:
    body = {"messages": [{"role": "user", "content": "a" * 300}]}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10**6}}
    for more in (
        {"tools": [{"description": "a" * 3000}]},
        {"response_format": {"json_schema": {"schema": {"required": ["a" * 3000]}}}},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "a" * 3300}}]}]},
    ):
        assert 1000 <= words(body | more) - words(body) < 1050
    assert words({"content": [picture]}) < 30


def test_token_limit(make: Any) -> None:
    with ChatServer(says(yes_answer(), usage=(5000, 500))) as server:
        corrector = make(server, max_tokens=12_000, when_spent="continue", concurrency=1)
        answers = corrector.correct(requests(5))
    assert kinds(answers).count("right") == 1  # a second one might have taken 1.25 × 5000 + 1024 more
    assert corrector.metrics()["corrector/tokens"] == 5500
    assert corrector.metrics()["corrector/tokens_remaining"] == 6500


def test_call_that_breaks_off_is_counted_at_its_estimate_and_an_error_at_nothing(make: Any) -> None:
    with ChatServer(hangs) as server:
        corrector = make(server, prices=(1.0, 1.0), timeout=0.1)
        lost = corrector.correct(requests(1))[0]
    assert lost.failure == "timeout"
    assert lost.usage.completion_tokens == 1024
    assert lost.usage.usd > 0
    with ChatServer(status(500)) as server:
        refused = make(server, prices=(1.0, 1.0)).correct(requests(1))[0]
    assert (refused.usage.calls, refused.usage.usd) == (1, 0)


def test_server_that_counts_no_tokens_is_charged_the_estimate(make: Any) -> None:
    with ChatServer(says(yes_answer(), usage=None)) as server:
        answer = make(server, prices=(1.0, 1.0)).correct(requests(1))[0]
    assert answer.verdict == "right"
    assert answer.usage.completion_tokens == 1024


def test_rollout_in_which_the_budget_ends_says_so(make: Any) -> None:
    """All calls are under way when it ends, so that none of them raises."""
    numbers = itertools.count()

    def generate(prompts: list[str], images: list[Any]) -> list[Generation]:
        texts = [
            f'{{"current number": 0, "target number": 2, "thoughts": "Try {next(numbers)}: +.", "action": "+"}}'
            for _ in prompts
        ]
        return [Generation(np.zeros(1, np.int64), text) for text in texts]

    go = threading.Event()
    with ChatServer(waits(go, says(no_answer()))) as server:
        corrector = make(server, max_calls=20)
        collector = make_collector(NumberLineTask(), generate, corrector, num_envs=8)
        threading.Timer(0.5, go.set).start()
        rollout = collector.collect(4)
        answers = [answer for answer in rollout.corrections if answer is not None]
        assert kinds(answers).count("budget") == 12
        assert rollout.stop_reason == "the corrector's budget is spent"
        state = json.loads(json.dumps(corrector.state_dict()))
        for limits, exhausted in (({"max_calls": 20}, True), ({"max_calls": 40}, False), ({}, False)):
            resumed = make(server, **limits)
            resumed.load_state_dict(state)
            assert resumed.exhausted is exhausted
            assert resumed.metrics()["corrector/calls"] == 20


@pytest.mark.parametrize(
    "state", [{}, {"counts": {}}, {"spent": 3, "counts": []}, {"spent": {}, "counts": {"a": "b"}}]
)
def test_state_of_another_corrector_is_no_obstacle(make: Any, caplog: pytest.LogCaptureFixture, state: Any) -> None:
    with ChatServer(says(yes_answer())) as server:
        corrector = make(server, max_calls=3)
        corrector.load_state_dict(state)
        assert "of a run with another corrector" in caplog.text
        assert corrector.correct(requests(1))[0].verdict == "right"
    assert corrector.metrics()["corrector/calls_remaining"] == 2


def test_what_was_spent_survives_a_resume(make: Any) -> None:
    with ChatServer(says(yes_answer())) as server:
        before = make(server, max_calls=3, prices=(2.0, 50.0))
        before.correct(requests(2))
        state = json.loads(json.dumps(before.state_dict()))
        after = make(server, max_calls=3, prices=(2.0, 50.0))
        after.load_state_dict(state)
        assert after.metrics()["corrector/usd_spent"] == pytest.approx(0.0024)
        assert sorted(kinds(after.correct(requests(2, first=2)))) == ["budget", "right"]
        assert len(server.seen) == 3


def test_waiting_for_a_reservation_ends_when_the_other_call_settles(make: Any) -> None:
    go = threading.Event()
    with ChatServer(waits(go, says(yes_answer()))) as server:
        # Room for one estimate (about 2200 + 100 tokens) at a time, and for both calls as they turn out.
        corrector = make(server, max_tokens=3000, max_completion_length=100)
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.extend(corrector.correct(requests(2))))
        thread.start()
        server.wait_for(lambda: server.in_flight == 1)
        assert len(server.seen) == 1
        go.set()
        thread.join()
        assert len(server.seen) == 2
    assert kinds(answers) == ["right", "right"]
