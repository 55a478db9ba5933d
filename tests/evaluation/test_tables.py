"""Tables of evaluations: what a run shows at its end."""

import io

from rich.console import Console

from trl_gtr import make_task
from trl_gtr.evaluation.agents import ExpertAgent, RandomAgent
from trl_gtr.evaluation.evaluate import evaluate_agent
from trl_gtr.evaluation.tables import difficulty_table, report_table


def shown(table):
    console = Console(width=80, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_tables_fit_into_a_terminal():
    task = make_task("points24")
    reports = {
        "unseen, start": evaluate_agent(RandomAgent(), task, 8),
        "unseen, end": evaluate_agent(ExpertAgent(task), task, 8),
    }
    text = shown(report_table(reports, "a run"))
    assert "…" not in text
    for words in ("a run", "success", "solvable", "true", str(reports["unseen, end"].success), "1.000"):
        assert words in text
    ez = make_task("ezpoints")
    wins = {f"valid_unseen, {when}": evaluate_agent(ExpertAgent(ez), ez, 4) for when in "ab"}
    text = shown(report_table(wins, "every deal can be won"))
    assert "solvable" not in text
    assert "…" not in text
    text = shown(difficulty_table(reports, "by kind"))
    assert "…" not in text
    assert "with parentheses" in text


def test_the_table_says_what_was_played():
    pool = make_task("points24", hands=[["4", "9", "A", "K"], ["3", "3", "8", "8"]])
    text = shown(report_table({"expert": evaluate_agent(ExpertAgent(pool), pool, 6)}, "a run"))
    assert "2 different hands" in text
    line = make_task("number_line")
    reports = {"pool": evaluate_agent(RandomAgent(), pool, "all"), "line": evaluate_agent(RandomAgent(), line, 2)}
    assert "pool: 2 different hands" in shown(report_table(reports, "two tasks"))
    assert "different" not in shown(report_table({"line": reports["line"]}, "random deals"))


def test_a_share_of_nothing_is_a_dash():
    task = make_task("points24", hands=[["A", "A", "A", "A"]])
    assert " - " in shown(report_table({"hopeless": evaluate_agent(RandomAgent(), task, 2)}, "a run"))


def test_the_table_says_what_was_cut_short():
    task = make_task("number_line")
    left = iter([False] * 30)
    reports = {
        "whole": evaluate_agent(RandomAgent(), task, 2),
        "part": evaluate_agent(RandomAgent(), task, 20, num_envs=2, stopped=lambda: next(left, True)),
        "nothing": evaluate_agent(RandomAgent(), task, 3, stopped=lambda: True),
    }
    text = shown(report_table(reports, "a run"))
    assert f"part was cut short: {len(reports['part'].episodes)} of 20 episodes" in text
    assert "nothing was cut short: 0 of 3 episodes" in text
    assert "whole was cut short" not in text
