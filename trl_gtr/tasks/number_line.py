"""The NumberLine task: read two numbers from the image and walk from one to the other.

{"current number": 1, "target number": 4, "thoughts": "The current number 1 is below the target 4, so I go up with
+.", "action": "+"}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium as gym

from .. import environments  # noqa: F401  registers the games
from ..responses.action_text import from_thoughts, match_action, plain_signs
from ..responses.format import Field, ThoughtFormat
from ..types import Response, Transition
from .base import Rubric, Task
from .choices import CHOSEN, NOT_CHOSEN, mentions, settle

ENV_ID = "gym_cards/NumberLine-v0"
ACTIONS = ("-", "+")

PROMPT = """\
You are walking along a number line from 0 to {max_position}. The picture shows a target number and the current number.
Goal: make the current number equal to the target number. + raises the current number by 1, - lowers it by 1.
Allowed actions: -, +
{instructions}"""

FIELDS = (
    Field("current number", "number", "the current number in the picture"),
    Field("target number", "number", "the target number in the picture"),
    Field("thoughts", "text", "which of the two is larger, and so whether to go up (+) or down (-)"),
)

# The expert's sentences; which one is used depends on the current number.
FRAMES = (
    "The current number {current} is {relation} the target {target}, so I go {way} with {action}.",
    "I am at {current} and have to reach {target}, so I go {way}: {action}.",
    "{current} is {relation} {target}, so the next action is {action}.",
)

RUBRIC = Rubric(
    role="You judge one step of an agent that walks along a number line towards a target.",
    questions={
        "numbers": "Which current and target number does the picture show, and did the agent read both right?",
        "direction": "Does the target lie above or below the current number, and does the agent's thought and action "
        "go that way?",
    },
    advice="+ raises the current number by 1 and - lowers it by 1. The goal is to make it equal to the target number.",
)

_DIRECTION = re.compile(
    r"""(?P<up>\b(?:plus|add|increase[sd]?|increasing|raise|up|upwards?|forwards?|(?:move|go|to\ the)\ right)\b)
    |(?P<down>\b(?:minus|subtract|decrease[sd]?|decreasing|down|downwards?|backwards?|(?:move|go|to\ the)\ left)\b)
    |(?<![^\s"'`“‘(])(?P<sign>[+-])1?(?![^\s"'`”’).,;:!?])""",
    re.IGNORECASE | re.VERBOSE,
)


_NOT_CHOSEN = re.compile(NOT_CHOSEN, re.IGNORECASE | re.VERBOSE)
_CHOSEN = re.compile(rf"{CHOSEN}|\bno[:,]\s*$", re.IGNORECASE | re.VERBOSE)
_RULED_OUT = re.compile(
    r"""["'`”’)]*\s+(?:is\s+wrong\b|(?:would|will|leads?)(?:\s+\w+){0,3}?\s+(?:away|overshoot|further|farther|past)\b)""",
    re.IGNORECASE,
)


def named_direction(thoughts: str) -> str | None:
    """The direction the text settles on, `+` or `-`, named by its sign or a word such as *up* or *decrease*.

    Reasons and mentions that aren't choices are ignored: "not -", "rather than up", "- would lead away". `None` if it
    is ambiguous.
    """
    return settle(
        (match["sign"] or ("+" if match["up"] else "-"), bool(_CHOSEN.search(before)))
        for match, before in mentions(plain_signs(thoughts), _DIRECTION)
        if not _NOT_CHOSEN.search(before) and not _RULED_OUT.match(match.string, match.end())
    )


class NumberLineTask(Task):
    """The task around `gym_cards/NumberLine-v0`. Stateless.

    Args:
        env_kwargs: Options of the environment.
        cut: Without effect: no episode of this game is hopeless.
        thoughts: Ask for thoughts; false trains actions alone.
    """

    name = "number_line"
    rubric = RUBRIC
    reading_parts = ("current", "target")

    def __init__(
        self, *, env_kwargs: Mapping[str, Any] | None = None, cut: bool = True, thoughts: bool = True
    ) -> None:
        self.env_kwargs = dict(env_kwargs or {})
        self.cut = cut  # unused: every state can still be won
        conclusion = partial(from_thoughts, named_direction)
        self.format = ThoughtFormat(FIELDS if thoughts else (), action_help="- or +", conclusion=conclusion)
        self._prompt = PROMPT.format(
            max_position=self.env_kwargs.get("max_position", 5), instructions=self.format.instructions()
        )

    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        return gym.make(ENV_ID, disable_env_checker=True, **self.env_kwargs)

    def prompt(self, observation: Any, info: Mapping[str, Any]) -> str:
        return self._prompt

    def public_state(self, info: Mapping[str, Any]) -> dict[str, Any]:
        return {"actions": list(ACTIONS)}

    def legal_actions(self, info: Mapping[str, Any]) -> Sequence[str]:
        return ACTIONS

    def to_env_action(self, response: Response, info: Mapping[str, Any]) -> int | None:
        return match_action(response.action, ACTIONS, signs=True) if response.valid else None

    def believed_info(self, fields: Mapping[str, Any], public_state: Mapping[str, Any]) -> dict[str, Any]:
        """The state if both numbers are as the thought reads them."""
        current, target = (fields.get(key) for key in ("current number", "target number"))
        highest = self.env_kwargs.get("max_position", 5)
        if not (current in range(highest + 1) and target in range(highest + 1)):
            raise ValueError(f"both numbers lie between 0 and {highest}")
        if current == target:
            raise ValueError("the current number is not yet the target number")
        return {"Current": current, "Target": target}

    def judge(self, response: Response, info: Mapping[str, Any]) -> dict[str, bool]:
        """Both numbers, and whether the thought's direction and the action lead to the target."""
        right, thoughts = _right_action(info), response.fields.get("thoughts")
        action = match_action(response.action, ACTIONS, signs=True)
        return {
            "current": bool(response.fields.get("current number") == info["Current"]),
            "target": bool(response.fields.get("target number") == info["Target"]),
            "direction": isinstance(thoughts, str)
            and named_direction(thoughts) == right
            and action is not None
            and ACTIONS[action] == right,
        }

    def difficulty(self, info: Mapping[str, Any]) -> str:
        return f"distance {abs(int(info['Target']) - int(info['Current']))}"

    def expert(self, info: Mapping[str, Any], hint: Response | None = None) -> Response | None:
        current, target, action = int(info["Current"]), int(info["Target"]), _right_action(info)
        way, relation = ("up", "below") if action == "+" else ("down", "above")
        words = {"current": current, "target": target, "action": action, "way": way, "relation": relation}
        thoughts = FRAMES[current % len(FRAMES)].format(**words)
        hinted = hint.fields.get("thoughts") if hint else None
        if isinstance(hinted, str) and named_direction(hinted) == action:
            thoughts = hinted
        values = {"current number": current, "target number": target, "thoughts": thoughts}
        thought = {field.key: values[field.key] for field in self.format.fields}
        return self.format.respond(thought, action)

    def success(self, transitions: Sequence[Transition]) -> bool:
        """Whether the target was reached: the only way an episode terminates."""
        return bool(transitions) and transitions[-1].terminated

    def metrics(self, transitions: Sequence[Transition]) -> dict[str, float]:
        """`no_wrong_move`: the original game's definition of success, a return above 0."""
        return {"no_wrong_move": float(sum(transition.reward for transition in transitions) > 0)}


def _right_action(info: Mapping[str, Any]) -> str:
    return "+" if info["Target"] > info["Current"] else "-"
