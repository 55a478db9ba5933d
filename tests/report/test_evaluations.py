"""Evaluations of a run: before, during or after training, on the table and on the curves."""

import pytest

pytest.importorskip("matplotlib", reason="needs trl-gtr[report]")

from trl_gtr.report.curves import CURVES, charts
from trl_gtr.report.evaluations import points, table
from trl_gtr.report.runs import Run


def run(tmp_path, *log, state="finished"):
    return Run(tmp_path, "gtr", list(log), {"state": state})


def moments(of_run):
    return [point.moment for point in points(of_run)[""]]


def test_an_evaluation_of_the_trained_policy_counts_as_after(tmp_path):
    log = [{"step": 0, "eval_success": 0.1}, {"step": 1, "eval_success": 0.2}, {"step": 2, "episode/success": 0.3}]
    last = {"step": 2, "eval_success": 0.4}
    assert moments(run(tmp_path, *log)) == ["before", "between"]
    assert moments(run(tmp_path, *log, last)) == ["before", "between", "after"]
    # of a run that goes on nothing is after
    assert moments(run(tmp_path, *log, last, state="running")) == ["before", "between", "between"]
    (row,) = table({"gtr": [run(tmp_path, *log, last)]})
    assert (row["before"], row["between"], row["after"]) == (["10%"], ["20%"], ["40%"])


def test_intervals_and_names_are_kept_in_the_order_of_the_log(tmp_path):
    log = [
        {"step": 0, "start_unseen_success": 0.5, "start_unseen_success_low": 0.4, "start_unseen_success_high": 0.6},
        {"step": 0, "start_pool_success": 0.5, "start_pool_success_low": float("nan")},
        {"step": 3, "end_unseen_success": 0.9, "end_unseen_success_solvable": 1.0, "end_unseen_true_thoughts": 0.7},
    ]
    found = points(run(tmp_path, *log))
    assert list(found) == ["unseen", "pool"]
    assert [str(point) for point in found["unseen"]] == ["50% [40%, 60%]", "90%"]
    assert str(found["pool"][0]) == "50%"
    assert points(run(tmp_path, *log), "true_thoughts")["unseen"][0].value == 0.7


def test_evaluations_are_points_on_the_curves(tmp_path):
    log = [
        {"step": 0, "start_pool_success": 0.2, "start_pool_success_low": 0.1, "start_pool_success_high": 0.3},
        *({"step": n, "episode/success": 0.1 * n, "episode/success_solvable": 0.1 * n} for n in (1, 2)),
        {"step": 2, "end_pool_success": 0.8, "end_pool_success_low": 0.7, "end_pool_success_high": 0.9},
    ]
    chart = charts(CURVES[:1], {"gtr": [run(tmp_path, *log)]})[0]
    lines = {line["name"]: line for line in chart.data["lines"]}
    assert list(lines) == ["in training", "evaluated on pool"]  # nothing twice where every episode can be won
    drawn = lines["evaluated on pool"]
    assert (drawn["style"], drawn["x"], drawn["mean"]) == ("dot", [0, 2], [0.2, 0.8])
    assert (drawn["low"], drawn["high"]) == ([0.1, 0.7], [0.3, 0.9])
    assert chart.rows[0] == ["0", "", "20.0%"]
    # two seeds: the mean, and the range of the two
    other = [entry | {name: 0.6 for name in entry if name == "end_pool_success"} for entry in log]
    both = charts(CURVES[:1], {"gtr": [run(tmp_path, *log), run(tmp_path, *other)]})[0]
    drawn = both.data["lines"][-1]
    assert (drawn["mean"][1], drawn["low"][1], drawn["high"][1]) == pytest.approx((0.7, 0.6, 0.8))


def test_no_chart_speaks_of_deals(tmp_path):
    words = [word for panel in CURVES for word in (*panel.metrics.values(), panel.note)]
    assert not [word for word in words if "deal" in word]


@pytest.mark.parametrize(
    ("prefix", "titles", "rows"),
    [
        ("", ["evaluated", "merged teacher"], ["", "all, merged teacher"]),
        ("pool_", ["evaluated on pool", "merged teacher on pool"], ["pool", "pool, merged teacher"]),
    ],
)
def test_a_merged_teachers_evaluations_are_told_from_the_policys(tmp_path, prefix, titles, rows):
    log = [{"step": 2, f"end_{prefix}success": 0.25, f"end_{prefix}teacher_success": 0.5}]
    taught = run(tmp_path, *log)
    assert list(points(taught)) == [prefix.removesuffix("_")]
    chart = charts(CURVES[:1], {"turbo": [taught]})[0]
    assert [line["name"] for line in chart.data["lines"]] == titles
    assert [(row["name"], row["after"]) for row in table({"turbo": [taught]})] == [(rows[0], ["25%"]), (rows[1], ["50%"])]
