"""The corrector's questions about a points game, and the exact solver it may call."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..base import Rubric, Tool
from .rules import COUNTS, RANKS, PointsRules, read_ranks

MAX_LISTED = 40  # formulas returned by the solver tool; some hands have hundreds


def rubric(rules: PointsRules) -> Rubric:
    questions = {
        "cards_read": "Which ranks are printed on the cards, and did the agent read every one right?",
        "formula_right": f"Does the formula that the agent aims at use each number once, equal {rules.target}, and "
        "start with the formula written so far?",
        "action_leads_there": "Is the agent's action the next symbol of that formula?",
    }
    keys: dict[str, str] = {}
    advice = f"{COUNTS[rules.highest]} Symbols: {', '.join(rules.symbols)}. What is written stays."
    if rules.parentheses:
        questions["possible_solution"] = "Can the formula written so far still be completed to a right one?"
        questions["target_formula"] = (
            f'One right formula that starts with what is written, without the "={rules.target}".'
        )
        keys = {"solution_key": "possible_solution", "target_key": "target_formula"}
    return Rubric(
        role="You judge one step of an agent that writes a formula over playing cards, one symbol at a time. The "
        f"formula has to use the number of every card exactly once and to equal {rules.target}.",
        questions=questions,
        advice=advice,
        **keys,
    )


def solver_tool(rules: PointsRules) -> Tool:
    names = [f"card{place}" for place in range(1, rules.cards + 1)]
    card = {"type": "string", "enum": list(RANKS)}
    return Tool(
        name="find_all_correct_formulas",
        description=f"All formulas that use each of the cards once and equal {rules.target}, each written in one way: "
        "terms and factors may change places. Cards are given by rank.",
        parameters={
            "type": "object",
            "properties": dict.fromkeys(names, card),
            "required": names,
            "additionalProperties": False,
        },
        run=partial(find_all_correct_formulas, rules),
    )


def find_all_correct_formulas(rules: PointsRules, arguments: Mapping[str, Any]) -> str:
    """The solver tool's answer. `arguments` come from a language model and may be anything."""
    names = [f"card{place}" for place in range(1, rules.cards + 1)]
    if not isinstance(arguments, Mapping) or set(arguments) != set(names):
        raise ValueError(f"give exactly the arguments {', '.join(names)}")
    ranks = read_ranks([_rank_argument(arguments[name]) for name in names])
    if ranks is None:
        raise ValueError(f"each card is one of the ranks {', '.join(RANKS)}")
    formulas = rules.solutions(sorted(rules.number(rank) for rank in ranks))
    if not formulas:
        return f"No formula of these cards equals {rules.target}."
    more = f" ({len(formulas) - MAX_LISTED} more)" if len(formulas) > MAX_LISTED else ""
    return ", ".join(formulas[:MAX_LISTED]) + more


def _rank_argument(value: Any) -> str:
    """A rank, also given as a number from 1 to 13; anything else becomes an invalid rank."""
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 13:
        return RANKS[value - 1]
    return value if isinstance(value, str) and len(value) <= 8 else ""
