import io
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from trl_gtr.evaluation.comparison import (
    compact,
    comparison_markdown,
    comparison_table,
    cost_markdown,
    curve,
    guidance_markdown,
    interval,
    largest_fall,
    summary,
    teacher_markdown,
)
from trl_gtr.evaluation.comparison_figures import draw_band, draw_curves, draw_guidance


def run(arm: str, seed: int, success: list[float], end: float) -> dict:
    log = [{"start_pool_success": 0.25, "start_pool_true_thoughts": 0.5}]
    for value in success:
        log.append(
            {
                "episode/success": value,
                "thoughts/true": value / 2,
                "thoughts/reading": 1.0,
                "thoughts/distinct_4": 0.3,
            }
        )
    log.append({"end_pool_success": end, "end_pool_true_thoughts": 0.75})
    return {"arm": arm, "seed": seed, "log": log}


RUNS = [run("gtr", 0, [0.2, 0.6, 0.5, 0.7], 0.8), run("gtr", 1, [0.2, 0.4, 0.6, 0.8], 0.9), run("ppo", 0, [0.5], 0.4)]


def test_summary_has_evaluations_and_the_end_of_training() -> None:
    row = summary(RUNS[0])
    assert row["start pool success"] == 0.25
    assert row["end pool success"] == 0.8
    assert row["sampled success"] == pytest.approx((0.6 + 0.5 + 0.7) / 3)
    assert row["sampled true thoughts"] == pytest.approx(row["sampled success"] / 2)


def test_largest_fall_looks_at_neighbouring_updates() -> None:
    assert largest_fall(RUNS[0]) == pytest.approx(0.1)
    assert largest_fall(RUNS[1]) == 0.0
    assert largest_fall(RUNS[2]) == 0.0  # one update can't fall


def test_interval_is_students() -> None:
    values = [0.8, 0.9, 0.7, 0.85, 0.75]
    half = 2.776 * np.std(values, ddof=1) / np.sqrt(5)
    assert interval(values) == f"0.800 ± {half:.3f}"
    assert interval([0.5, 0.25]) == "0.500, 0.250"


def test_arms_with_a_teacher_have_columns_that_others_leave_empty() -> None:
    taught = run("turbo", 0, [0.5], 0.5)
    taught["log"][0]["start_pool_teacher_success"], taught["log"][-1]["end_pool_teacher_success"] = 0.25, 0.625
    header, _, ppo, turbo = comparison_markdown([RUNS[2], taught]).splitlines()
    assert header.startswith("| arm | seeds | pool success | pool teacher success | pool true thoughts |")
    assert turbo.startswith("| turbo | 1 | 0.25 → 0.500 | 0.25 → 0.625 |")
    assert ppo.startswith("| ppo | 1 | 0.25 → 0.400 |  | 0.50 → 0.750 |")


def test_a_teacher_stays_apart_in_a_study_of_several_tasks() -> None:
    log = [{"start_pool_success": 0.1, "start_pool_teacher_success": 0.2, "start_pool_teacher_true_thoughts": 0.3}]
    log.append({"end_pool_success": 0.4, "end_pool_teacher_success": 0.5, "end_pool_teacher_true_thoughts": 0.6})
    row = summary({"arm": "turbo_kl", "seed": 0, "task": "points24", "log": log})
    assert (row["start success"], row["end success"]) == (0.1, 0.4)
    assert (row["start teacher success"], row["end teacher success"]) == (0.2, 0.5)
    assert row["end teacher true thoughts"] == 0.6
    log[-1]["end_unseen_success"] = 0.7  # a second evaluation has a column of its own
    row = summary({"arm": "turbo_kl", "seed": 0, "task": "points24", "log": log})
    assert (row["end pool success"], row["end unseen success"]) == (0.4, 0.7)


def test_table_and_figure(tmp_path) -> None:  # type: ignore[no-untyped-def]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(comparison_table(RUNS, "a study"))
    text = console.export_text()
    for words in ("gtr", "0.25 → 0.800, 0.900", "0.10", "+0.55"):
        assert words in text
    header, _, gtr, ppo = comparison_markdown(RUNS).splitlines()
    assert header.startswith("| arm | seeds | pool success | pool true thoughts | sampled success |")
    assert gtr.startswith("| gtr | 2 | 0.25 → 0.800, 0.900 |")
    assert "| 0.50 → 0.750, 0.750 |" in gtr
    assert ppo.endswith("| 0.00 | +0.15 |")
    draw_curves(RUNS, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list(curve(RUNS[2], "episode/success")) == [0.5]


def test_several_tasks_are_one_table_and_one_figure_over_steps(tmp_path) -> None:  # type: ignore[no-untyped-def]
    runs = []
    for task, arm, steps in (("cards", "grpo", 300), ("cards", "grpo_guided", 250), ("lines", "grpo", 100)):
        made = run(arm, 0, [0.2, 0.4], 0.5) | {"task": task}
        for update, entry in enumerate(made["log"][1:3], 1):
            entry |= {
                "env_steps": update * steps,
                "speed/steps_per_second": 10.0 * update,
                "memory/cpu_gb": update / 4,
            }
        runs.append(made)
    header, _, first, second, third = comparison_markdown(runs).splitlines()
    assert header.startswith("| task | arm | seeds | success | true thoughts |")
    assert header.endswith("| steps/s | peak GB |")
    assert first.startswith("| cards | grpo | 1 | 0.25 → 0.500 |")
    assert first.endswith("| 15 | 0.5 |")  # the mean of 10 and 20, the larger of 0.25 and 0.5
    assert second.startswith("| cards | grpo_guided |")
    assert third.startswith("| lines | grpo |")
    draw_curves(runs, tmp_path / "curves.png", {"episode/success": "success"})
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_compact_run_shows_the_same() -> None:
    whole = run("turbo_kl", 0, [1 / 3, 2 / 3], 0.5)
    whole["log"][1] |= {"env_steps": 512, "teacher/kl": 0.125, "loss/policy": 1.5, "episode/count": 7}
    small = compact(whole)
    assert {"loss/policy", "episode/count"}.isdisjoint(small["log"][1])
    assert small["log"][1]["teacher/kl"] == 0.125
    assert comparison_markdown([small]) == comparison_markdown([whole])


def test_a_compact_run_keeps_evaluations_during_training_and_when_they_were() -> None:
    whole = run("turbo_kl", 0, [0.2, 0.4], 0.5)
    whole["log"][1] |= {"step": 7, "env_steps": 123_456, "response/valid": 0.98765}
    evaluation = {"eval_pool_success": 0.25, "eval_pool_teacher_success": 0.5, "eval_pool_teacher_true_thoughts": 0.75}
    whole["log"].insert(2, {"step": 7, "eval_pool_success_low": 0.1, "eval_pool_length": 4.0, **evaluation})
    log = compact(whole)["log"]
    assert log[1]["response/valid"] == 0.9877
    assert log[2] == {"step": 7, "env_steps": 123_456, **evaluation}  # counts are exact, however large
    assert "end pool success" in summary(compact(whole))


def turbo_run(arm: str, seed: int, end: float, teacher: float | None = None) -> dict:
    """Entropy falls from .4 to .2 (the mean of .3, .2 and .1), and .8 of the responses are valid at the end."""
    made = run(arm, seed, [0.2] * 4, end) | {"task": "cards"}
    for entry, entropy, valid in zip(made["log"][1:5], (0.4, 0.3, 0.2, 0.1), (1.0, 0.9, 0.8, 0.7), strict=True):
        entry |= {"policy/entropy": entropy, "response/valid": valid}
    if teacher is not None:
        made["log"][-1]["end_pool_teacher_success"] = teacher
    return made


def cells(table: str) -> list[dict[str, str]]:
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_a_merged_teacher_is_compared_seed_by_seed() -> None:
    """By hand: on seeds 0, 1, 2 the arm adds .1, .2, .3 to PPO, its teacher −.1, 0, .1 to it, TIES .2 to linear."""
    runs = [turbo_run("ppo", seed, end) for seed, end in enumerate((0.5, 0.1, 0.3))]
    ended = [(0.6, 0.5), (0.3, 0.3), (0.6, 0.7)]
    runs += [turbo_run("turbo_kl", seed, end, teacher) for seed, (end, teacher) in enumerate(ended)]
    runs += [turbo_run("linear_kl", seed, end - 0.2, 0.5) for seed, (end, _) in enumerate(ended)]
    ppo, ties, linear = cells(teacher_markdown(runs))
    half = 4.30 * 0.1 / np.sqrt(3)
    assert ties["success − ppo"] == f"0.200 ± {half:.3f}"
    assert ties["teacher − policy"] == f"0.000 ± {half:.3f}"
    assert ties["TIES − linear"] == "0.200 ± 0.000"
    assert ties["success"] == f"0.500 ± {4.30 * np.std([0.6, 0.3, 0.6], ddof=1) / np.sqrt(3):.3f}"
    assert ties["true thoughts"] == "0.750 ± 0.000"
    assert (ties["entropy"], ties["valid responses"]) == ("0.400 → 0.200 ± 0.000", "0.800 ± 0.000")
    assert (ppo["seeds"], ppo["teacher − policy"], ppo["success − ppo"], ppo["TIES − linear"]) == ("3", "", "", "")
    assert linear["success − ppo"] == f"0.000 ± {half:.3f}"
    assert linear["TIES − linear"] == ""


def test_a_study_that_is_not_over_compares_what_there_is() -> None:
    unfinished = turbo_run("turbo_sft", 2, 0.9, 0.9)
    unfinished["log"].pop()
    runs = [turbo_run("ppo", 1, 0.25), turbo_run("turbo_sft", 0, 0.5, 0.75), turbo_run("turbo_sft", 1, 0.5, 0.25)]
    runs += [unfinished, turbo_run("linear_sft", 0, 0.75, 0.5), turbo_run("turbo_kl", 3, 0.5) | {"task": "lines"}]
    _, sft, linear, elsewhere = cells(teacher_markdown(runs))
    assert (sft["seeds"], sft["success"], sft["teacher − policy"]) == ("2", "0.500, 0.500", "0.250, -0.250")
    assert sft["success − ppo"] == "0.250"  # seed 1 alone
    assert sft["TIES − linear"] == "-0.250"  # seed 0 alone
    assert linear["success − ppo"] == ""
    assert (elsewhere["task"], elsewhere["success − ppo"], elsewhere["teacher − policy"]) == ("lines", "", "")


def test_an_arm_without_its_guided_partner_has_empty_cells() -> None:
    runs = [run(arm, 0, [0.2], 0.5) | {"task": "cards"} for arm in ("ppo", "grpo", "grpo_guided", "gigpo_guided")]
    runs.append(run("grpo_guided", 1, [0.2], 0.5) | {"task": "cards"})  # a seed that grpo has not run yet
    for made in runs:
        made["log"][1]["speed/steps_per_second"] = 4.0
    ppo, grpo, gigpo = cells(guidance_markdown(runs))
    assert (ppo["success: alone"], ppo["success: guided"], ppo["success: added"]) == ("0.500", "", "")
    assert (grpo["success: guided"], grpo["success: added"]) == ("0.500, 0.500", "0.000")
    assert (gigpo["success: alone"], gigpo["success: guided"]) == ("", "0.500")
    costs = [(row["steps/s: alone"], row["steps/s: guided"]) for row in cells(cost_markdown(runs))]
    assert costs == [("4", ""), ("4", "4"), ("", "4")]


def test_guidance_is_compared_seed_by_seed(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """By hand: on seeds 0, 1, 2 guidance adds .3, .1 and .2, though the seeds lie far apart."""
    ends = {"grpo": (0.1, 0.7, 0.4), "grpo_guided": (0.4, 0.8, 0.6)}
    runs = [run(arm, seed, [0.2], end) | {"task": "cards"} for arm in ends for seed, end in enumerate(ends[arm])]
    for made in runs:
        guided = made["arm"].endswith("_guided")
        made["log"][1] |= {"env_steps": 64, "speed/steps_per_second": 5.0 if guided else 8.0, "memory/cpu_gb": 1.5}
    _, _, row = guidance_markdown(runs).splitlines()
    half = 4.30 * 0.1 / np.sqrt(3)
    assert row.startswith("| cards | grpo | 0.400 ± ")
    assert f"| 0.200 ± {half:.3f} |" in row
    assert row.endswith("| 0.000 ± 0.000 |")  # the thoughts are alike
    assert cost_markdown(runs).splitlines()[2] == "| grpo | 8 | 5 | 1.5 | 1.5 |"
    draw_guidance(runs, tmp_path / "guidance.png")
    assert (tmp_path / "guidance.png").read_bytes().startswith(b"\x89PNG")


class Recorder:
    """Takes what is drawn."""

    def plot(self, x, y, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.x, self.y = x.tolist(), y.tolist()
        return [SimpleNamespace(get_color=lambda: "C0")]

    def fill_between(self, x, low, high, **kwargs):  # type: ignore[no-untyped-def]
        self.low, self.high = low.tolist(), high.tolist()


def test_seeds_with_updates_of_different_sizes_meet_at_the_same_steps() -> None:
    """By hand: the second seed has 0.3 at 100 steps and 0.7 at 200, so 0.5 at 150."""
    runs = [
        {"log": [{"s": 0.0, "env_steps": 100}, {"s": 0.1, "env_steps": 150}, {"s": 0.2, "env_steps": 300}]},
        {"log": [{"s": 0.3, "env_steps": 100}, {"s": 0.7, "env_steps": 200}]},
    ]
    axis = Recorder()
    draw_band(axis, runs, "s", "seeds", over="env_steps")
    assert axis.x == [100, 150]  # the second ends at 200
    assert axis.low == [0.0, 0.1]
    assert axis.high == pytest.approx([0.3, 0.5])
    assert axis.y == pytest.approx([0.15, 0.3])
