"""Precision and recall of correctors, against numbers known by construction."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from chat_server import ChatServer, says
from corrector_cases import no_answer, number_line_request, points_request, yes_answer
from example_scripts import run_here
from toy import BareColourTask, ColourTask

from trl_gtr.correctors import AuditedCorrector, ExpertCorrector, UnreliableCorrector, audit, failed
from trl_gtr.correctors.audit import Grade, grade, is_true, report
from trl_gtr.tasks import make_task
from trl_gtr.types import Correction, CorrectionRequest

RIGHT = number_line_request(1, 4)
WRONG = number_line_request(1, 4, said=(2, 4))


def test_grades() -> None:
    true_thought = no_answer()["correction"]
    false_thought = no_answer(2, 5)["correction"]
    cases = [
        (Correction("right"), RIGHT, Grade(wrong=False, changed=False, true=True, failed=False)),
        (Correction("right"), WRONG, Grade(wrong=True, changed=False, true=False, failed=False)),
        (Correction("corrected", true_thought, "+"), WRONG, Grade(True, True, True, False)),
        (Correction("corrected", true_thought), WRONG, Grade(True, True, True, False)),
        (Correction("corrected", true_thought, "-"), WRONG, Grade(True, True, False, False)),
        (Correction("corrected", false_thought, "+"), WRONG, Grade(True, True, False, False)),
        (Correction("corrected", true_thought, "+"), RIGHT, Grade(False, True, True, False)),
        (Correction("unsolvable"), WRONG, Grade(True, True, False, False)),
        (failed("timeout"), WRONG, Grade(True, False, False, True)),
    ]
    for answer, request, expected in cases:
        assert grade(answer, request) == expected


def test_unsolvable_is_true_where_nothing_can_be_won() -> None:
    hopeless = points_request(("A", "A", "A", "A"), "", aim="1+1+1+1", symbol="1", action="1")
    assert is_true(Correction("unsolvable"), hopeless)
    assert not is_true(Correction("unsolvable"), points_request())


def blackjack_request(thoughts: str, action: str) -> CorrectionRequest:
    """11 against a 6: hit."""
    task = make_task("blackjack")
    info = {"Dealer Card": [[6, "6", "H"], [10, "K", "S"]], "Player Card": [[5, "5", "H"], [6, "6", "S"]]}
    response = task.format.respond({"thoughts": thoughts}, action)
    return replace(RIGHT, task=task, info=info, response=response, public_state=task.public_state(info))


def test_actions_are_graded_where_the_judge_looks_at_the_reading_only() -> None:
    stands = blackjack_request("My total is 11 and the dealer shows 6, so I stand.", "stand")
    hits = blackjack_request("My total is 11 and the dealer shows 6, so I hit.", "hit")
    better = {"thoughts": "My total is 11 and the dealer shows 6, so I hit."}
    missed = Grade(wrong=True, changed=False, true=False, failed=False)
    helped = Grade(wrong=True, changed=True, true=True, failed=False)
    cases = [
        (Correction("right", action="stand"), stands, missed),
        (Correction("right"), stands, missed),
        (Correction("corrected", better, "hit"), stands, helped),
        (Correction("corrected", better), stands, helped),
        (Correction("corrected", better, "stand"), stands, Grade(True, True, False, False)),
        (Correction("right", action="hit"), hits, Grade(False, False, True, False)),
        (Correction("right", action="stand"), hits, Grade(False, True, False, False)),
    ]
    for answer, request, expected in cases:
        assert grade(answer, request) == expected
    assert (audit(ExpertCorrector(), [stands, hits]).recall, audit(ExpertCorrector(), [hits]).false_alarms) == (1, 0)


def test_report_by_hand() -> None:
    grades = [
        Grade(True, True, True, False),  # helped
        Grade(True, True, True, False),  # helped
        Grade(True, True, False, False),  # changed to something false
        Grade(True, False, False, False),  # missed
        Grade(True, False, False, True),  # failed
        Grade(False, True, True, False),  # false alarm
        Grade(False, False, True, False),
        Grade(False, False, True, False),
    ]
    made = report(grades)
    assert made.graded == 8
    assert made.precision == pytest.approx(2 / 4)
    assert made.recall == pytest.approx(2 / 5)
    assert made.false_alarms == pytest.approx(1 / 3)
    assert made.failed == pytest.approx(1 / 8)
    assert made.wrong_thoughts == pytest.approx(5 / 8)
    assert report([]).metrics() == {"corrector/audited": 0.0}


def many(count: int) -> list[CorrectionRequest]:
    """Every second thought is wrong."""
    return [
        number_line_request(target - 1, target, said=(target - 1 + i % 2, target + i % 2), shade=i % 200)
        for i in range(count)
        for target in (2, 3, 4)
    ]


def test_the_expert_is_perfect() -> None:
    made = audit(ExpertCorrector(), many(40))
    assert (made.graded, made.wrong_thoughts) == (120, 0.5)
    assert (made.precision, made.recall, made.false_alarms, made.failed) == (1.0, 1.0, 0.0, 0.0)


def test_wrong_corrector_scores_as_constructed() -> None:
    """Half of the thoughts are wrong; a fifth of the requests fails and of the rest 30 % get the opposite verdict.

    Precision = .5 × .7 / (.5 × .7 + .5 × .3) = .7, recall = .8 × .7 = .56, false alarms = .8 × .3 = .24.
    """
    made = audit(UnreliableCorrector(ExpertCorrector(), wrong=0.3, silent=0.2, seed=1), many(200))
    assert made.graded == 600
    # four standard deviations of shares of about 300 draws
    assert made.precision == pytest.approx(0.70, abs=0.11)
    assert made.recall == pytest.approx(0.56, abs=0.12)
    assert made.false_alarms == pytest.approx(0.24, abs=0.10)
    assert made.failed == pytest.approx(0.20, abs=0.07)


def test_audited_corrector_passes_answers_on_and_logs() -> None:
    requests = many(100)
    inner = UnreliableCorrector(ExpertCorrector(), wrong=0.3, seed=1)
    audited = AuditedCorrector(inner, share=0.5)
    answers = audited.correct(requests)
    assert [answer.verdict for answer in answers] == [answer.verdict for answer in inner.correct(requests)]
    metrics = audited.metrics()
    assert 100 <= metrics["corrector/audited"] <= 200
    assert metrics["corrector/precision"] == pytest.approx(0.7, abs=0.2)
    assert metrics["corrector/recall"] == pytest.approx(0.7, abs=0.2)
    assert audited.identity == inner.identity


def test_audit_looks_at_the_last_answers() -> None:
    audited = AuditedCorrector(UnreliableCorrector(ExpertCorrector(), wrong=1.0), share=1.0, window=20)
    audited.correct(many(40))
    assert audited.metrics()["corrector/recall"] == 0.0
    audited.corrector = ExpertCorrector()
    audited.correct(many(40))
    assert audited.metrics()["corrector/recall"] == 1.0
    assert audited.metrics()["corrector/audited"] == 20


def test_audit_needs_a_task_that_knows_the_truth() -> None:
    with pytest.raises(ValueError, match=r"task 'colours' has no judge\(\)"):
        AuditedCorrector(ExpertCorrector()).check(BareColourTask())
    AuditedCorrector(ExpertCorrector()).check(ColourTask())


def test_nothing_is_graded_where_nobody_knows_the_truth() -> None:
    task = BareColourTask()
    response = task.format.respond({"thoughts": "it is red"}, "red")
    request = replace(RIGHT, task=task, info={"colour": "red"}, response=response)
    corrected = Correction("corrected", {"thoughts": "it is blue"}, "blue")
    for answer in (Correction("right"), corrected, failed("timeout")):
        assert grade(answer, request) is None
    assert is_true(Correction("right"), request) is None
    assert is_true(corrected, request) is None
    assert audit(UnreliableCorrector(ExpertCorrector()), [request]).graded == 0


def test_a_share_is_a_share() -> None:
    with pytest.raises(ValueError, match="share must be"):
        AuditedCorrector(ExpertCorrector(), share=0)


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-audit-tests")


def rows(table: str) -> dict[str, str]:
    return dict(re.findall(r"│ +(.*?) +│ +(.*?) +│", table))


def test_audit_script_over_http() -> None:
    """A model that says YES to everything changes nothing, at 100 × 2 + 20 × 10 USD per million calls."""
    pytest.importorskip("openai")
    with ChatServer(says(yes_answer())) as server:
        line = "--task number_line --states 6 --env_steps 6000 --corrector openai --corrector_model test-model"
        line += f" --corrector_base_url {server.url} --corrector_prices 2 10 --corrector_concurrency 1"
        printed = run_here("audit_corrector", *line.split())
        asked = len(server.seen)
    found = rows(printed)
    assert found["graded thoughts, share wrong"] == "6, 50.0%"
    assert found["precision: changed thoughts that were wrong and are now true"] == "-"
    assert found["recall: wrong thoughts that it made true"] == "0.0%"
    assert found["false alarms: right thoughts that it changed"] == "0.0%"
    assert found["estimate for 6000 steps: calls"] == str(asked * 1000)
    assert found["USD"] == f"{asked * 1000 * 0.0004:.2f}"


def test_audit_script_finds_out_a_wrong_corrector() -> None:
    printed = run_here("audit_corrector", "--task=points24", "--states=30", "--corrector_wrong=1.0")
    assert rows(printed)["recall: wrong thoughts that it made true"] == "0.0%"
    assert rows(printed)["false alarms: right thoughts that it changed"] == "100.0%"


@pytest.mark.slow
def test_latency_benchmark_runs() -> None:
    pytest.importorskip("openai")
    line = "--step 0.05 --latency 0.05 --envs 2 --steps 3 --repeats 1"
    printed = run_here("benchmarks/corrector_latency", *line.split())
    assert re.search(r"hidden share of the latency of 3 vector steps: -?[0-9.]+%", printed)
