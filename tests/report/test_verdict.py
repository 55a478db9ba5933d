"""The head of the report: what it says about success, thoughts, collapse and the state of a run."""

import pytest

pytest.importorskip("jinja2", reason="needs trl-gtr[report]")
pytest.importorskip("matplotlib", reason="needs trl-gtr[report]")

from report_cases import write_run

from trl_gtr.report import write_report
from trl_gtr.report.runs import Run
from trl_gtr.report.verdict import verdicts


def evaluated(name, value, width=0.05, **more):
    return {name: value, f"{name}_low": value - width, f"{name}_high": value + width} | more


def run(tmp_path, *log, **card):
    return Run(tmp_path, "gtr", list(log), {"state": "finished"} | card)


def verdict(*runs):
    (found,) = verdicts({"gtr": runs})
    return found


def thoughts(step, top=0.01, distinct=0.4, true=0.9):
    return {
        "step": step,
        "thoughts/true": true,
        "thoughts/distinct_4": distinct,
        "thoughts/top_share": top,
        "thoughts/identical_across_states": 0.1,
    }


@pytest.mark.parametrize(
    ("after", "words", "tone"),
    [
        (0.90, "Training helped: success on pool rose from 50% to 90%.", "good"),
        (0.57, "No clear change: success on pool went from 50% to 57%, within the error.", ""),
        (0.20, "Training hurt: success on pool fell from 50% to 20%.", "bad"),
    ],
)
def test_success_is_judged_by_its_intervals(tmp_path, after, words, tone):
    log = [evaluated("start_pool_success", 0.5, step=0), evaluated("end_pool_success", after, step=9)]
    found = verdict(run(tmp_path, *log))
    assert found["words"] == words
    number = found["numbers"][0]
    assert (number["name"], number["value"], number["tone"]) == ("Success on pool", f"50% → {after:.0%}", tone)
    assert f"95 % interval {after - 0.05:.0%} to {after + 0.05:.0%}" in number["detail"]


def test_seeds_are_judged_by_their_range(tmp_path):
    def seed(before, after):
        log = [evaluated("start_success", before, 0.4, step=0), evaluated("end_success", after, 0.4, step=9)]
        return run(tmp_path, *log)

    apart = verdict(seed(0.2, 0.6), seed(0.3, 0.8))
    assert apart["words"] == "Training helped: success rose from 25% to 70%."
    assert "range over 2 seeds 60% to 80%" in apart["numbers"][0]["detail"]
    assert verdict(seed(0.2, 0.6), seed(0.3, 0.25))["words"].startswith("No clear change")


def test_a_run_without_evaluations_is_told_by_its_training(tmp_path):
    log = [{"step": n, "episode/success": 0.1 * n} for n in range(1, 6)]
    found = verdict(run(tmp_path, *log))
    assert found["words"] == "Success in training went from 10% to 40%."  # the mean of 30, 40 and 50
    assert verdict(run(tmp_path, *log[:2]))["words"] == "Success in training is 15%."
    assert verdict(run(tmp_path))["words"] == "Nothing was logged yet."


def test_collapse_is_what_the_alarm_says(tmp_path):
    fine = [thoughts(n) for n in range(1, 5)]
    assert verdict(run(tmp_path, *fine))["numbers"][-1]["value"] == "no"
    assert verdict(run(tmp_path, *fine, state="running"))["numbers"][-1]["value"] == "not so far"
    bad = [thoughts(n, top=0.9, true=0.1) for n in range(5, 8)]
    collapsed = verdict(run(tmp_path, *fine, *bad))
    assert collapsed["words"] == (
        "10% of thoughts in training are true, 90% at the start. Thoughts collapsed at update 7."
    )
    assert (collapsed["numbers"][-1]["value"], collapsed["numbers"][-1]["tone"]) == ("yes", "bad")
    assert "90.0% of all" in collapsed["numbers"][-1]["detail"]
    passed = verdict(run(tmp_path, *fine, *bad, thoughts(8)))
    assert passed["numbers"][-1]["value"] == "for a time"
    assert "and recovered" in passed["words"]
    # too few bad updates in a row for an alarm
    assert verdict(run(tmp_path, *fine, *bad[:2]))["numbers"][-1]["value"] == "no"


def test_state_and_command_head_the_page(tmp_path):
    html = write_report([write_run(tmp_path / "run")]).read_text("utf-8")
    head = html[html.index('id="result"') : html.index('id="curves"')]
    assert '<span class="badge good">finished</span>' in head
    for fact in ("update 4 of 4", "1 h 5 min", "examples/points24.py --seed 3"):
        assert fact in head
    seeds = [write_run(tmp_path / "gtr" / f"seed{n}") for n in range(2)]
    assert "2 finished" in write_report(seeds).read_text("utf-8")
