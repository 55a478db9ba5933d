"""What correctors get from a task: rubric, solver tool, and the state that a thought believes in."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from trl_gtr.tasks import make_task

NAMES = ["points24", "ezpoints", "number_line", "blackjack"]
INFOS: dict[str, dict[str, Any]] = {
    "points24": {"Cards": ["HT", "SA", "C9", "D4"], "Numbers": [10, 1, 9, 4], "Formula": ["4", "+", "9"]},
    "ezpoints": {"Cards": ["H3", "S9"], "Numbers": [3, 9], "Formula": ["3", "+"]},
    "number_line": {"Target": 4, "Current": 1},
}
GOOD: dict[str, tuple[dict[str, Any], str]] = {
    "points24": (
        {"cards": ["4", "9", "A", "10"], "formula": "4+9", "thoughts": "4+9+1+10=24, so the next symbol is +."},
        "+",
    ),
    "ezpoints": ({"cards": ["9", "3"], "formula": "3+", "thoughts": "3+9=12, so I append 9."}, "9"),
    "number_line": ({"current number": 1, "target number": 4, "thoughts": "1 is less than 4, so I go up: +."}, "+"),
}


@pytest.mark.parametrize("name", ["points24", "ezpoints", "number_line"])
def test_believed_info_makes_the_thought_s_reading_true(name):
    task = make_task(name)
    state = task.public_state(INFOS[name])
    thought, action = GOOD[name]
    believed = task.believed_info(thought, state)
    assert all(task.judge(task.format.respond(thought, action), believed).values())


def test_believed_info_refuses_what_can_not_be():
    points, line = make_task("points24"), make_task("number_line")
    state = points.public_state(INFOS["points24"])
    for cards in (["4", "9", "A"], ["4", "9", "A", "11"], "4 9 A 10", None, ["4"] * 5):
        with pytest.raises(ValueError, match="4 cards"):
            points.believed_info({"cards": cards}, state)
    for current, target in ((3, 3), (-1, 2), (2, 6), (None, 2), ("a", 2), (1.5, 2)):
        with pytest.raises(ValueError, match="number"):
            line.believed_info({"current number": current, "target number": target}, {})
    spaced = {**INFOS["points24"], "Formula": ["10", " ", "+"]}
    believed = points.believed_info({"cards": ["10", "9", "4", "A"]}, points.public_state(spaced))
    assert believed["Formula"] == ["10", " ", "+"]
    assert sorted(believed["Numbers"]) == [1, 4, 9, 10]


@pytest.mark.parametrize("name", NAMES)
def test_rubrics_ask_in_words(name):
    rubric = make_task(name).rubric
    assert rubric.role
    assert len(rubric.questions) >= 2
    assert all(question.endswith(("?", ".")) for question in rubric.questions.values())
    assert {rubric.target_key, rubric.solution_key} - {None} <= set(rubric.questions)
    json.dumps(dict(rubric.questions))


def test_points24_has_the_solver_as_a_tool():
    task = make_task("points24")
    assert (task.rubric.target_key, task.rubric.solution_key) == ("target_formula", "possible_solution")
    (tool,) = task.tools
    assert tool.name == "find_all_correct_formulas"
    assert list(tool.parameters["properties"]) == ["card1", "card2", "card3", "card4"]
    json.dumps(tool.parameters)
    tool = pickle.loads(pickle.dumps(tool))
    formulas = tool.run({"card1": "8", "card2": "3", "card3": "8", "card4": "3"}).split(", ")
    assert "8/(3-8/3)" in formulas
    kings = tool.run({"card1": "K", "card2": 10, "card3": "A", "card4": "4"})
    assert kings == tool.run({"card1": "4", "card2": "J", "card3": "A", "card4": "Q"})
    assert "24" in tool.run({f"card{k}": "A" for k in range(1, 5)})  # says that there is none
    assert not make_task("ezpoints").tools


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        None,
        [],
        "card1",
        {"card1": "4", "card2": "4", "card3": "4"},
        {"card1": "4", "card2": "4", "card3": "4", "card4": "4", "card5": "4"},
        *({"card1": bad, "card2": "4", "card3": "4", "card4": "4"}
          for bad in (0, 14, -1, True, None, 4.0, "", "0", "11", "eval(1)", "4" * 10**6, ["4"], {"a": 1}, 10**400)),
    ],
    ids=lambda value: str(type(value)),
)  # fmt: skip
def test_the_solver_tool_refuses_hostile_arguments(arguments):
    (tool,) = make_task("points24").tools
    with pytest.raises(ValueError, match="card"):
        tool.run(arguments)
