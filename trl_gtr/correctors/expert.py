"""The task's exact expert as a corrector: offline, free, deterministic."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..tasks.base import Task, contradicts, is_true_thought
from ..types import Correction, CorrectionRequest
from .base import Corrector, CorrectorWrapper, failed, request_digest


class ExpertCorrector(Corrector):
    """Asks `task.judge` whether the thought is true and `task.expert` for a better one.

    A true thought that concludes a different action from the expert's is also wrong. The expert gets the agent's
    response as a hint, so that only what is wrong in it is replaced. Where the judge gives no verdict, only the
    expert's own thought is right.
    """

    identity = "expert"

    def check(self, task: Task) -> None:
        if not task.defines("expert"):
            raise ValueError(
                f"task {task.name!r} has no expert(info, hint); add one (to a GymTask with `expert=`), or choose "
                "another corrector, e.g. corrector=OpenAICorrector(...)"
            )

    def correct(self, requests: Sequence[CorrectionRequest]) -> list[Correction]:
        return [self._correct(request) for request in requests]

    def _correct(self, request: CorrectionRequest) -> Correction:
        started = time.perf_counter()
        correction = self._judge(request)
        return replace(correction, source=self.identity, latency=time.perf_counter() - started)

    def _judge(self, request: CorrectionRequest) -> Correction:
        task, response = request.task, request.response
        expert = task.expert(request.info, hint=response)
        right = is_true_thought(task.judge(response, request.info)) if response.valid else False
        if right is None:
            right = expert is not None and dict(response.fields) == dict(expert.fields)
        if expert is None:
            if right:
                return Correction("right", action=response.action)
            return Correction("unsolvable", reason="this state can't be won")
        right = right and not contradicts(task, response.fields, expert.action, request.info)
        target = task.target(expert, request.info)
        # Give the expert's action even if the thought is right: where a judge checks only the reading, as in
        # Blackjack, and the thought concludes nothing, the agent's action may still be wrong.
        if right:
            return Correction("right", action=expert.action, target=target)
        return Correction("corrected", thought=dict(expert.fields), action=expert.action, target=target)


class UnreliableCorrector(CorrectorWrapper):
    """Corrupts another corrector's answers on purpose, to study bad correctors and to test audits.

    A share `silent` of the requests fails. Of the rest, a share `wrong` gets the opposite verdict: a right thought is
    "corrected" to a corrupted copy of itself, a wrong one is called right.
    Which requests are affected depends only on their content and `seed`, never on order or threads.
    """

    def __init__(self, corrector: Corrector, wrong: float = 0.0, silent: float = 0.0, seed: int = 0):
        for name, share in (("wrong", wrong), ("silent", silent)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} must be a share between 0 and 1, not {share}")
        super().__init__(corrector)
        self.wrong, self.silent, self.seed = wrong, silent, seed
        self.identity = f"unreliable(wrong={wrong}, silent={silent}, seed={seed}, {corrector.identity})"

    def correct(self, requests: Sequence[CorrectionRequest]) -> list[Correction]:
        answers = self.corrector.correct(requests)
        return [self._corrupt(*pair) for pair in zip(requests, answers, strict=True)]

    def _corrupt(self, request: CorrectionRequest, answer: Correction) -> Correction:
        digest = request_digest(request)
        if answer.verdict == "failed":
            return answer
        if self._draw(digest, "silent") < self.silent:
            return failed("unusable", "silent on purpose", usage=answer.usage, source=self.identity)
        if self._draw(digest, "wrong") < self.wrong:
            return replace(self._opposite(request, answer), source=self.identity)
        return answer

    def _opposite(self, request: CorrectionRequest, answer: Correction) -> Correction:
        if answer.verdict != "right":
            return Correction("right", action=request.response.action, usage=answer.usage, latency=answer.latency)
        fields = {key: _corrupted(value) for key, value in request.response.fields.items()}
        return Correction("corrected", thought=fields, usage=answer.usage, latency=answer.latency)

    def _draw(self, digest: str, purpose: str) -> float:
        """A uniform number in [0, 1), the same for the same content."""
        number = hashlib.sha256(f"{self.seed}/{purpose}/{digest}".encode()).digest()[:8]
        return int.from_bytes(number, "big") / 2**64


def _corrupted(value: Any) -> Any:
    """A value of the same type that is certainly false for this state."""
    if isinstance(value, list):
        return value[1:]
    if isinstance(value, str):
        return value[: len(value) // 2] + " 0"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value + 1
    return value
