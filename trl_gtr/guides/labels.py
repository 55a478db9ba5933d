"""From a correction to a lesson: which ids are taught, and which labels are thrown away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ..config import GTRConfig
from ..policy.scoring import VLMPolicy
from ..storage.files import LONE_SURROGATE
from ..tasks.base import Task, contradicts
from ..types import Correction, Response, Transition

Flaw = Literal[
    "contradictory",  # the thought concludes another action than the corrector's
    "lone_surrogates",  # a lone surrogate, kept from the agent's own words: no tokenizer takes it
    "special_tokens",  # the text can't be spelt without a special token, which isn't text
    "unreadable",  # the ids spell another text, in which thought and action can't be read any more
]
"""Why a label is thrown away."""
FLAWS: tuple[str, ...] = get_args(Flaw)


class Label(NamedTuple):
    """What a step should have said."""

    ids: np.ndarray
    """int64, (tokens,): the right response."""
    num_labels: int
    """How many of them to clone, from the first on; 0 if there is nothing to learn."""
    flaw: Flaw | None = None
    """Why there is nothing to learn although the corrector had something to say."""


class LabelMaker:
    """Writes the response that a correction calls for, as ids.

    Args:
        args: Its `clone` says what is cloned.
        task: What is played.
        policy: Whose ids they are.
    """

    def __init__(self, args: GTRConfig, task: Task, policy: VLMPolicy) -> None:
        self.args, self.task, self.policy = args, task, policy

    def label(self, step: Transition, correction: Correction) -> Label | None:
        """The right response, and how much of it to clone: its thought, and the action where the settings say so.

        Both are written anew from their parts, so that what is cloned is clean JSON even where the agent's text had to
        be read leniently. `None` where the correction has no thought to teach.
        """
        if correction.verdict == "corrected" and correction.thought is not None:
            thought = correction.thought
        elif correction.verdict == "right" and self.args.clone not in ("corrected_thoughts", "corrected_responses"):
            thought = step.response.fields
        else:
            return None
        if contradicts(self.task, thought, correction.action, step.info):
            return _thrown_away("contradictory")
        action = correction.action or self._concluded(thought, step.info) or step.response.action
        text = self.task.format.render(thought, action or "")
        if LONE_SURROGATE.search(text):
            return _thrown_away("lone_surrogates")
        ids = self.policy.encode_response(text)
        if not self.policy.is_text(ids[:-1]):
            return _thrown_away("special_tokens")
        # What the ids spell: a tokenizer may have normalised the text.
        written = self.task.format.parse(self.policy.spans.text(ids))
        if written.action_span is None or (written.error and not self.task.format.parse(text).error):
            return _thrown_away("unreadable")
        end = self.policy.spans.action_start(ids, written.action_span)
        return self._cut(ids, end, action, step, correction)

    def _concluded(self, thought: Mapping[str, Any], info: Mapping[str, Any]) -> str | None:
        """Where the corrector names no action, the one that its thought leads to: the agent's may be wrong."""
        action = self.task.format.conclusion(thought)
        legal = action is not None and self.task.to_env_action(Response("", thought, action), info) is not None
        return action if legal else None

    def _cut(self, ids: np.ndarray, end: int, action: str | None, step: Transition, correction: Correction) -> Label:
        """`end`: where the thought ends."""
        if not action:
            return Label(ids[:end], end)
        full = self.args.clone in ("corrected_responses", "responses") and correction.action is not None
        right = self.args.clone == "thoughts_and_right_actions" and step.response.action == correction.action
        return Label(ids, len(ids) if full or right else end)


def _thrown_away(flaw: Flaw) -> Label:
    return Label(np.zeros(0, np.int64), 0, flaw)


def count_labels(labels: list[Label], means: Any) -> None:
    """Add the share of the update's labels with each flaw to `means`."""
    for flaw in FLAWS:
        means.add(f"labels/{flaw}", [label.flaw == flaw for label in labels])
