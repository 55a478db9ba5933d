"""Answers on disk: no call twice, nothing torn, replays that fail loudly."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, says
from corrector_cases import no_answer, number_line_request

from trl_gtr.correctors import (
    BudgetExhausted,
    CachedCorrector,
    CacheMiss,
    ExpertCorrector,
    OpenAICorrector,
    RecordedCorrector,
    failed,
    failure_kind,
)
from trl_gtr.correctors.base import request_digest
from trl_gtr.types import Correction, CorrectionRequest, Usage


class Counting:
    """Answers each call with its number, as a sampling model would never repeat itself."""

    identity = "counting"

    def __init__(self, *answers: Correction) -> None:
        self.answers = list(answers)
        self.calls = 0

    def correct(self, requests: Sequence[CorrectionRequest]) -> list[Correction]:
        corrected = []
        for _ in requests:
            self.calls += 1
            own = Correction("corrected", thought={"thoughts": f"answer {self.calls}"}, usage=Usage(calls=1, usd=0.5))
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
    assert failure_kind(replay[0]) == "timeout"
    retried = CachedCorrector(Counting(), tmp_path, retry_failed=True).correct(REQUESTS[:1])
    assert thoughts(retried) == ["answer 1"]
    assert thoughts(CachedCorrector(Counting(), tmp_path).correct(REQUESTS[:1])) == ["answer 1"]


@pytest.mark.parametrize(
    "answer",
    [
        *map(failed, ("budget", "cancelled", "unavailable", "connection", "server")),
        Correction("right", source="fallback: expert"),
    ],
)
def test_what_the_run_decided_is_not_kept(tmp_path: Path, answer: Correction) -> None:
    CachedCorrector(Counting(answer), tmp_path).correct(REQUESTS[:1])
    assert thoughts(CachedCorrector(Counting(), tmp_path).correct(REQUESTS[:1])) == ["answer 1"]


def test_exception_of_the_corrector_passes_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    class Spent:
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
    assert thoughts(answers) == ["answer 1", "budget: spent"]


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
    assert rerun.store.put(digest, other.answers[0]).thought == {"thoughts": "answer 1"}  # the first one stays
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
        Correction("corrected", thought={"cards": ["A", "10"], "n": 3, "t": "é\n☃"}, action="hit", source="x"),
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


def test_damaged_file_is_named(tmp_path: Path) -> None:
    CachedCorrector(Counting(), tmp_path).correct(REQUESTS[:1])
    (path,) = tmp_path.glob("*/*/*.json")
    path.write_text('{"verdict": "ri')
    with pytest.raises(ValueError, match=f"{path.name} is no recorded correction .*delete it"):
        CachedCorrector(Counting(), tmp_path).correct(REQUESTS[:1])
    path.write_text(json.dumps({"verdict": "perhaps"}))
    with pytest.raises(ValueError, match="no such verdict"):
        RecordedCorrector(tmp_path).correct(REQUESTS[:1])


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
