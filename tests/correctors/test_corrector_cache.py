"""Answers on disk: no call twice, nothing torn, replays that fail loudly."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, says
from corrector_cases import no_answer, number_line_request
from hypothesis import given, settings, strategies as st

from trl_gtr.correctors import (
    BudgetExhausted,
    CachedCorrector,
    CacheMiss,
    Corrector,
    ExpertCorrector,
    OpenAICorrector,
    RecordedCorrector,
    failed,
)
from trl_gtr.correctors.base import request_digest
from trl_gtr.types import Correction, CorrectionRequest, Usage


def thought(words: str) -> dict[str, Any]:
    """One that fits the task."""
    return {"current number": 1, "target number": 4, "thoughts": words}


class Counting(Corrector):
    """Answers each call with its number, as a sampling model would never repeat itself."""

    identity = "counting"

    def __init__(self, *answers: Correction) -> None:
        self.answers = list(answers)
        self.calls = 0

    def correct(self, requests: Sequence[CorrectionRequest]) -> list[Correction]:
        corrected = []
        for _ in requests:
            self.calls += 1
            own = Correction("corrected", thought=thought(f"answer {self.calls}"), usage=Usage(calls=1, usd=0.5))
            corrected.append(self.answers.pop(0) if self.answers else own)
        return corrected


REQUESTS = [number_line_request(1, 4, shade=shade) for shade in range(5)]


def thoughts(answers: list[Correction]) -> list[Any]:
    return [answer.thought["thoughts"] if answer.thought else answer.reason for answer in answers]


def test_rerun_makes_no_call_and_gets_the_same(tmp_path: Path) -> None:
    first = CachedCorrector(Counting(), tmp_path)
    paid = first.correct(REQUESTS)
    rerun = CachedCorrector(Counting(), tmp_path)
    free = rerun.correct(REQUESTS[::-1])[::-1]
    assert rerun.corrector.calls == 0  # type: ignore[attr-defined]
    assert thoughts(free) == thoughts(paid)
    assert [answer.usage.usd for answer in paid] == [0.5] * 5
    assert [answer.usage.usd for answer in free] == [0.0] * 5
    assert rerun.metrics() == {"corrector/cache_hits": 5.0, "corrector/cache_misses": 0.0}


def test_answers_belong_to_a_corrector(tmp_path: Path) -> None:
    CachedCorrector(Counting(), tmp_path).correct(REQUESTS[:1])
    other = Counting()
    other.identity = "another model"
    CachedCorrector(other, tmp_path).correct(REQUESTS[:1])
    assert other.calls == 1


def test_identical_requests_in_a_batch_are_asked_once(tmp_path: Path) -> None:
    cached = CachedCorrector(Counting(), tmp_path)
    answers = cached.correct([REQUESTS[0], REQUESTS[1], REQUESTS[0]])
    assert thoughts(answers) == ["answer 1", "answer 2", "answer 1"]
    assert [answer.usage.calls for answer in answers] == [1, 1, 0]


def test_identical_requests_of_several_threads_are_asked_once(tmp_path: Path) -> None:
    asked, go = threading.Event(), threading.Event()

    class Slow(Counting):
        def correct(self, requests: Sequence[CorrectionRequest]) -> list[Correction]:
            asked.set()
            assert go.wait(10)
            return super().correct(requests)

    cached = CachedCorrector(Slow(), tmp_path)
    answers: list[Correction] = []
    threads = [threading.Thread(target=lambda: answers.extend(cached.correct(REQUESTS[:1]))) for _ in range(4)]
    threads[0].start()
    assert asked.wait(10)
    for thread in threads[1:]:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    assert cached.corrector.calls == 1  # type: ignore[attr-defined]
    assert thoughts(answers) == ["answer 1"] * 4


def test_failures_are_replayed_unless_a_retry_is_wanted(tmp_path: Path) -> None:
    late = failed("timeout", "late")
    CachedCorrector(Counting(late), tmp_path).correct(REQUESTS[:1])
    replay = CachedCorrector(Counting(), tmp_path).correct(REQUESTS[:1])
    assert (replay[0].failure, replay[0].reason) == ("timeout", "late")
    retried = CachedCorrector(Counting(), tmp_path, retry_failed=True).correct(REQUESTS[:1])
    assert thoughts(retried) == ["answer 1"]
    assert thoughts(CachedCorrector(Counting(), tmp_path).correct(REQUESTS[:1])) == ["answer 1"]


def test_answers_of_earlier_versions_are_still_read(tmp_path: Path) -> None:
    """They were paid for. Which kind of failure one was nobody knows any more."""
    answers = Correction("right", action="+"), failed("timeout", "late")
    cached = CachedCorrector(Counting(*answers), tmp_path)
    cached.correct(REQUESTS[:2])
    for path in cached.store.folder.glob("*/*.json"):
        values = json.loads(path.read_text())
        del values["failure"], values["fallback"]
        path.write_text(json.dumps(values))
    replay = CachedCorrector(Counting(), tmp_path).correct(REQUESTS[:2])
    assert [(answer.verdict, answer.failure) for answer in replay] == [("right", None), ("failed", "other")]


@pytest.mark.parametrize("damage", [{"failure": "moon phase"}, {"failure": None, "fallback": "no"}])
def test_a_kind_of_failure_that_is_none_is_not_read(tmp_path: Path, damage: dict[str, Any]) -> None:
    cached = CachedCorrector(Counting(failed("timeout")), tmp_path)
    cached.correct(REQUESTS[:1])
    (path,) = cached.store.folder.glob("*/*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    assert thoughts(CachedCorrector(Counting(), tmp_path).correct(REQUESTS[:1])) == ["answer 1"]


@pytest.mark.parametrize(
    "answer",
    [
        *map(failed, ("budget", "cancelled", "unavailable", "connection", "server")),
        Correction("right", source="expert", fallback=True),
    ],
)
def test_what_the_run_decided_is_not_kept(tmp_path: Path, answer: Correction) -> None:
    CachedCorrector(Counting(answer), tmp_path).correct(REQUESTS[:1])
    assert thoughts(CachedCorrector(Counting(), tmp_path).correct(REQUESTS[:1])) == ["answer 1"]


def test_exception_of_the_corrector_passes_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    class Spent(Corrector):
        identity = "spent"

        def correct(self, requests: Sequence[CorrectionRequest]) -> list[Correction]:
            raise BudgetExhausted("spent")

    cached = CachedCorrector(Spent(), tmp_path)
    for _ in range(2):
        with pytest.raises(BudgetExhausted):
            cached.correct(REQUESTS[:1])


def test_spent_budget_leaves_what_is_known(tmp_path: Path) -> None:
    CachedCorrector(Counting(), tmp_path).correct(REQUESTS[:1])

    class Spent(Counting):
        def correct(self, requests: Sequence[CorrectionRequest]) -> list[Correction]:
            raise BudgetExhausted("spent")

    answers = CachedCorrector(Spent(), tmp_path).correct(REQUESTS[:2])
    assert thoughts(answers) == ["answer 1", "spent"]


def test_file_systems_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", no_link)
    CachedCorrector(Counting(), tmp_path).correct(REQUESTS)
    rerun = CachedCorrector(Counting(), tmp_path)
    assert thoughts(rerun.correct(REQUESTS)) == [f"answer {i}" for i in range(1, 6)]
    assert rerun.corrector.calls == 0  # type: ignore[attr-defined]
    other = Counting(Correction("unsolvable", reason="later"))
    digest = request_digest(REQUESTS[0])
    kept = rerun.store.put(digest, other.answers[0], REQUESTS[0])
    assert kept.thought == thought("answer 1")  # the first one stays
    assert list(tmp_path.rglob("*.tmp")) == []


def test_full_disk_costs_the_cache_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkstemp", full)
    assert thoughts(CachedCorrector(Counting(), tmp_path).correct(REQUESTS[:3])) == [
        "answer 1",
        "answer 2",
        "answer 3",
    ]
    assert caplog.text.count("No space left on device") == 1


def test_every_verdict_comes_back_as_it_was(tmp_path: Path) -> None:
    said = [
        Correction("right", action="+", target="1+1", usage=Usage(1, 2, 3, 0.5), latency=1.5, source="x"),
        Correction("corrected", thought=thought("é\n☃\ud800") | {"target number": 4.5}, action="-", source="x"),
        Correction("unsolvable", reason="none", source="x"),
    ]
    CachedCorrector(Counting(*said), tmp_path).correct(REQUESTS[:3])
    replayed = RecordedCorrector(tmp_path).correct(REQUESTS[:3])
    for before, after in zip(said, replayed, strict=True):
        assert (after.verdict, after.thought, after.action) == (before.verdict, before.thought, before.action)
        assert (after.target, after.reason, after.source) == (before.target, before.reason, before.source)
        assert after.usage == Usage()


def test_replay_fails_loudly_on_a_miss(tmp_path: Path) -> None:
    CachedCorrector(Counting(), tmp_path).correct(REQUESTS[:1])
    recorded = RecordedCorrector(tmp_path)
    assert recorded.identity == "counting"
    with pytest.raises(CacheMiss, match="seed, task, model or settings differ"):
        recorded.correct(REQUESTS[:2])


def test_replay_must_know_whose_answers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"choose identity= from .*: none"):
        RecordedCorrector(tmp_path)
    for name in ("one", "two"):
        corrector = Counting()
        corrector.identity = name
        CachedCorrector(corrector, tmp_path).correct(REQUESTS[:1])
    with pytest.raises(ValueError, match=r"\['one', 'two'\]"):
        RecordedCorrector(tmp_path)
    assert thoughts(RecordedCorrector(tmp_path, "two").correct(REQUESTS[:1])) == ["answer 1"]
    with pytest.raises(ValueError, match="'three' is not recorded"):
        RecordedCorrector(tmp_path, "three")


# --- damaged files ------------------------------------------------------------------------------------------------

ENTRY: dict[str, Any] = {
    "verdict": "corrected",
    "thought": thought("From 1 to 4 I go up."),
    "action": "+",
    "target": None,
    "reason": None,
    "usage": {"calls": 1, "prompt_tokens": 2, "completion_tokens": 3, "usd": 0.5},
    "latency": 1.5,
    "source": "counting",
}
DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "torn": b'{"verdict": "ri',
    "binary": bytes(range(256)) * 4,
    "nested": b"[" * 200_000,
    "longer than any answer": b" " * (2 << 20) + json.dumps(ENTRY).encode(),
    "another shape": b"[1, 2]",
    "no such verdict": json.dumps(ENTRY | {"verdict": "perhaps"}).encode(),
    "verdict of another type": json.dumps(ENTRY | {"verdict": ["corrected"]}).encode(),
    "missing keys": b'{"verdict": "right"}',
    "unknown keys": json.dumps(ENTRY | {"more": 1}).encode(),
    "usage of another shape": json.dumps(ENTRY | {"usage": 3}).encode(),
    "amount below 0": json.dumps(ENTRY | {"latency": -1}).encode(),
    "no number": json.dumps(ENTRY | {"latency": float("nan")}).encode(),
    "thought of another shape": json.dumps(ENTRY | {"thought": ["up"]}).encode(),
    "thought of another task": json.dumps(ENTRY | {"thought": {"cards": ["A"]}}).encode(),
    "thought of nested parts": json.dumps(ENTRY | {"thought": thought("up") | {"thoughts": {"a": 1}}}).encode(),
    "thought longer than any": json.dumps(ENTRY | {"thought": thought("up " * 2000)}).encode(),
    "thought that says nothing": json.dumps(ENTRY | {"thought": thought(" ")}).encode(),
    "thought that is missing": json.dumps(ENTRY | {"thought": None}).encode(),
    "thought beside another verdict": json.dumps(ENTRY | {"verdict": "right"}).encode(),
    "illegal action": json.dumps(ENTRY | {"action": "jump"}).encode(),
    "action of another type": json.dumps(ENTRY | {"action": 7}).encode(),
    "reason of another type": json.dumps(ENTRY | {"reason": {}}).encode(),
}


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    """The file of one recorded answer."""
    CachedCorrector(Counting(), tmp_path).correct(REQUESTS[:1])
    (path,) = tmp_path.glob("*/*/*.json")
    return path


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_answer_is_asked_for_again(
    tmp_path: Path, entry: Path, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    entry.write_bytes(data)
    with pytest.raises(CacheMiss, match="or the file is damaged"):
        RecordedCorrector(tmp_path).correct(REQUESTS[:1])
    again = CachedCorrector(Counting(Correction("unsolvable", reason="asked again")), tmp_path)
    assert thoughts(again.correct(REQUESTS[:1])) == ["asked again"]
    assert f"{entry.name} is no recorded answer (" in caplog.text
    assert again.metrics()["corrector/cache_misses"] == 1
    assert thoughts(RecordedCorrector(tmp_path).correct(REQUESTS[:1])) == ["asked again"]  # the file is mended


def test_damaged_file_is_told_of_once(tmp_path: Path, entry: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry.write_bytes(b"{")
    cached = CachedCorrector(Counting(failed("server"), failed("server")), tmp_path)
    for _ in range(3):  # failures of the server aren't kept: the file stays as it is at first
        cached.correct(REQUESTS[:1])
    assert caplog.text.count("is no recorded answer (") == 1
    caplog.clear()
    entry.write_bytes(b"{")
    recorded = RecordedCorrector(tmp_path)
    for _ in range(2):
        with pytest.raises(CacheMiss):
            recorded.correct(REQUESTS[:1])
    assert caplog.text.count("is no recorded answer (") == 1
    assert "again" not in caplog.text  # a replay asks nobody


def test_whole_answer_is_no_damaged_one(tmp_path: Path, entry: Path) -> None:
    entry.write_text(json.dumps(ENTRY))
    assert thoughts(RecordedCorrector(tmp_path).correct(REQUESTS[:1])) == ["From 1 to 4 I go up."]


def test_folder_in_place_of_an_answer(tmp_path: Path, entry: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry.unlink()
    entry.mkdir()
    assert thoughts(CachedCorrector(Counting(), tmp_path).correct(REQUESTS[:1])) == ["answer 1"]
    assert "is no recorded answer" in caplog.text
    assert "can't be kept" in caplog.text


def test_answer_that_does_not_fit_the_task_is_used_but_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd = [Correction("corrected", thought={"odd": "thought"}), Correction("right", latency=float("inf"))]
    cached = CachedCorrector(Counting(*odd), tmp_path)
    assert cached.correct(REQUESTS[:2]) == odd
    assert caplog.text.count("can't be kept") == 1
    assert list(tmp_path.glob("*/*/*.json")) == []


def test_lone_surrogates_that_the_expert_keeps_are_kept(tmp_path: Path) -> None:
    """The agent's own words stay where they are right, and JSON can spell half a character."""
    request = number_line_request(1, 4)
    words = "I am at 1 \ud83d and want 4, so I go up with +."
    response = request.task.format.parse(
        json.dumps(dict(request.response.fields) | {"thoughts": words, "action": "-"})
    )
    request = replace(request, response=response)
    said = CachedCorrector(ExpertCorrector(), tmp_path).correct([request])
    kept = Correction("corrected", thought=thought(words), action="+")
    CachedCorrector(Counting(kept), tmp_path).correct([request])
    (replayed,) = RecordedCorrector(tmp_path, "counting").correct([request])
    assert replayed.thought == kept.thought
    assert RecordedCorrector(tmp_path, "expert").correct([request])[0].thought == said[0].thought


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=8), parts, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_file_ends_a_run(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Any bytes, any JSON, a record with any part changed: an answer that fits the task, old or new."""
    request = REQUESTS[0]
    parts = st.dictionaries(st.sampled_from(list(ENTRY)), json_values, min_size=1, max_size=2)
    changed = parts.map(lambda some: json.dumps(ENTRY | some).encode())
    flipped = st.tuples(st.integers(0, 300), st.integers(0, 255)).map(
        lambda at: (text := bytearray(json.dumps(ENTRY).encode())).__setitem__(at[0] % len(text), at[1]) or bytes(text)
    )
    directory = tmp_path_factory.mktemp("cache")
    cached = CachedCorrector(Counting(), directory)
    path = cached.store._path(request_digest(request))
    path.parent.mkdir(parents=True)
    path.write_bytes(
        data.draw(st.binary(max_size=50) | json_values.map(lambda v: json.dumps(v).encode()) | changed | flipped)
    )
    (answer,) = cached.correct([request])
    assert answer.verdict in ("right", "corrected", "unsolvable", "failed")
    if answer.verdict == "corrected":
        request.task.format.render(answer.thought, answer.action or "+")
    assert answer.action in (None, "+", "-")
    assert cached.correct([request])[0] == replace(answer, usage=Usage(), latency=0.0)  # now it is known


def _write_many(directory: str, worker: int, barrier: Any, results: Any) -> None:
    corrector = Counting()
    corrector.calls = worker * 1000  # every process would answer differently
    cached = CachedCorrector(corrector, directory)
    barrier.wait(30)
    results.put([thoughts(cached.correct([number_line_request(1, 4, shade=shade)]))[0] for shade in range(30)])


def test_several_processes_share_one_answer_a_step(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    workers = [context.Process(target=_write_many, args=(str(tmp_path), i, barrier, results)) for i in range(3)]
    for worker in workers:
        worker.start()
    seen = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert seen[0] == seen[1] == seen[2]
    assert len(list(tmp_path.glob("*/*/*.json"))) == 30
    assert list(tmp_path.rglob("*.tmp")) == []
    assert [worker.exitcode for worker in workers] == [0, 0, 0]


def test_around_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    wrong = number_line_request(1, 4, said=(2, 4))
    with ChatServer(says(no_answer())) as server:
        for expected in (1, 1):
            corrector = OpenAICorrector("test-model", base_url=server.url, api_key="sk-cache-tests")
            cached = CachedCorrector(corrector, tmp_path)
            assert cached.correct([wrong])[0].verdict == "corrected"
            cached.close()
            assert len(server.seen) == expected
    recorded = RecordedCorrector(tmp_path)  # the server is gone
    assert recorded.correct([wrong])[0].thought == no_answer()["correction"]


def test_around_the_expert(tmp_path: Path) -> None:
    cached = CachedCorrector(ExpertCorrector(), tmp_path)
    cached.check(REQUESTS[0].task)
    assert cached.correct(REQUESTS[:1])[0].verdict == "right"
    assert cached.state_dict() == {}
    cached.load_state_dict({})
    cached.close()
