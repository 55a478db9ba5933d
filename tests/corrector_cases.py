"""Steps to be corrected and answers about them, for the corrector tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from trl_gtr.tasks import make_task
from trl_gtr.tasks.number_line import NumberLineTask
from trl_gtr.types import CorrectionRequest

SECRET = "sk-test-0123456789abcdef0123456789abcdef"
CANARY = "the hidden truth, a canary"


def number_line_request(
    current: int = 1, target: int = 4, *, said: tuple[int, int] | None = None, action: str = "+", shade: int = 0
) -> CorrectionRequest:
    """A step in which the agent read the numbers `said`, rightly if left out; `shade` makes pictures differ."""
    task = NumberLineTask()
    info = {"Current": current, "Target": target, "hidden": CANARY}
    read_current, read_target = said or (current, target)
    way = "up" if action == "+" else "down"
    thought = {
        "current number": read_current,
        "target number": read_target,
        "thoughts": f"I am at {read_current} and want {read_target}, so I go {way} with {action}.",
    }
    image = np.full((30, 40, 3), shade, np.uint8)
    return CorrectionRequest(
        image=image,
        prompt=task.prompt(image, info),
        response=task.format.parse(task.format.render(thought, action)),
        public_state=task.public_state(info),
        info=info,
        task=task,
    )


def yes_answer() -> dict[str, Any]:
    return {
        "numbers": "1 and 4, read right",
        "direction": "above, and it goes up",
        "evaluation": "YES",
        "correction": None,
        "right_action": None,
    }


def no_answer(current: int = 1, target: int = 4, **changes: Any) -> dict[str, Any]:
    """A NO with the thought that is right for these numbers."""
    action, way = ("+", "up") if target > current else ("-", "down")
    thought = {
        "current number": current,
        "target number": target,
        "thoughts": f"From {current} to {target} I go {way}: {action}.",
    }
    answer = {
        "numbers": "misread",
        "direction": "wrong",
        "evaluation": "NO",
        "correction": thought,
        "right_action": action,
    }
    return answer | changes


def points_request(
    cards: tuple[str, ...] = ("4", "6", "A", "A"),
    formula: str = "4",
    *,
    read: tuple[str, ...] | None = None,
    aim: str = "4*6*1*1",
    symbol: str = "*",
    action: str = "*",
) -> CorrectionRequest:
    """A step of Points24 with these cards on the table, of which the agent read `read` and aims at `aim`."""
    task = make_task("points24")
    numbers = [{"A": 1, "J": 10, "Q": 10, "K": 10}.get(card) or int(card) for card in cards]
    names = ["H" + ("T" if card == "10" else card) for card in cards]
    info = {"Cards": names, "Numbers": numbers, "Formula": list(formula), "hidden": CANARY}
    thought = {
        "cards": list(read or cards),
        "formula": formula,
        "thoughts": f"I aim at {aim}=24. The formula so far is {formula}, so the next symbol is {symbol}.",
    }
    image = np.zeros((30, 40, 3), np.uint8)
    return CorrectionRequest(
        image=image,
        prompt=task.prompt(image, info),
        response=task.format.parse(task.format.render(thought, action)),
        public_state=task.public_state(info),
        info=info,
        task=task,
    )


def points_answer(
    cards: tuple[str, ...] = ("4", "6", "A", "A"),
    formula: str = "4",
    target: str | None = "4*6*1*1",
    aim: str | None = None,
    action: str | None = "*",
    **changes: Any,
) -> dict[str, Any]:
    """A NO with a corrected thought; `aim` is the formula in the thought if it differs from the named target."""
    thought = {
        "cards": list(cards),
        "formula": formula,
        "thoughts": f"I aim at {aim or target}=24. After {formula} the next symbol is {action}.",
    }
    answer = {
        "cards_read": "no",
        "formula_right": "no",
        "action_leads_there": "no",
        "possible_solution": "YES",
        "target_formula": target,
        "evaluation": "NO",
        "correction": thought,
        "right_action": action,
    }
    return answer | changes
