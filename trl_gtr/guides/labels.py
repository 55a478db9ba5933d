"""From corrections to labels: which ids to learn, and which labels to discard."""

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
    "contradictory",  # the thought concludes a different action than the corrector's
    "lone_surrogates",  # copied from the agent's text; tokenizers reject lone surrogates
    "special_tokens",  # the text can't be encoded without a special token
    "unreadable",  # the ids decode to a different text that can't be parsed any more
]
"""Why a label is discarded."""
FLAWS: tuple[str, ...] = get_args(Flaw)


class Label(NamedTuple):
    """What the agent should have written in a step."""

    ids: np.ndarray
    """int64, (tokens,): the right response."""
    num_labels: int
    """How many ids to clone, from the start; 0 if there is nothing to learn."""
    flaw: Flaw | None = None
    """Why the corrector's answer was discarded, if it was."""


class LabelMaker:
    """Encodes the response that a correction calls for.

    Args:
        args: `clone` decides what is cloned.
        task: The task being played.
        policy: Encodes the text.
    """

    def __init__(self, args: GTRConfig, task: Task, policy: VLMPolicy) -> None:
        self.args, self.task, self.policy = args, task, policy

    def label(self, step: Transition, correction: Correction) -> Label | None:
        """The right response, and how much of it to clone: the thought, and the action if `clone` includes it.

        Both are rendered anew from their fields, so that the label is clean JSON even if the agent's text was parsed
        leniently. `None` if the correction has no thought to teach.
        """
        if correction.verdict == "corrected" and correction.thought is not None:
            thought = correction.thought
        elif correction.verdict == "right" and self.args.clone not in ("corrected_thoughts", "corrected_responses"):
            thought = step.response.fields
        else:
            return None
        if contradicts(self.task, thought, correction.action, step.info):
            return _discarded("contradictory")
        action = correction.action or self._concluded(thought, step.info) or step.response.action
        text = self.task.format.render(thought, action or "")
        if LONE_SURROGATE.search(text):
            return _discarded("lone_surrogates")
        ids = self.policy.encode_response(text)
        if not self.policy.is_text(ids[:-1]):
            return _discarded("special_tokens")
        # Parse what the ids decode to: a tokenizer may have normalised the text.
        written = self.task.format.parse(self.policy.spans.text(ids))
        if written.action_span is None or (written.error and not self.task.format.parse(text).error):
            return _discarded("unreadable")
        end = self.policy.spans.action_start(ids, written.action_span)
        return self._cut(ids, end, action, step, correction)

    def _concluded(self, thought: Mapping[str, Any], info: Mapping[str, Any]) -> str | None:
        """The action that the thought leads to, if legal. Preferred to the agent's own, which may be wrong."""
        action = self.task.format.conclusion(thought)
        legal = action is not None and self.task.to_env_action(Response("", thought, action), info) is not None
        return action if legal else None

    def _cut(self, ids: np.ndarray, end: int, action: str | None, step: Transition, correction: Correction) -> Label:
        """The label, with `end` as the end of the thought."""
        if not action:
            return Label(ids[:end], end)
        full = self.args.clone in ("corrected_responses", "responses") and correction.action is not None
        right = self.args.clone == "thoughts_and_right_actions" and step.response.action == correction.action
        return Label(ids, len(ids) if full or right else end)


def _discarded(flaw: Flaw) -> Label:
    return Label(np.zeros(0, np.int64), 0, flaw)


def count_labels(labels: list[Label], means: Any) -> None:
    """Add the share of labels with each flaw to `means`."""
    for flaw in FLAWS:
        means.add(f"labels/{flaw}", [label.flaw == flaw for label in labels])
