"""Is a corrector any good? Its answers against what the task knows to be true."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..tasks.base import Task, contradicts, is_true_thought
from ..types import Correction, CorrectionRequest, Response, Share
from .answers import judge_parts
from .base import Corrector, CorrectorWrapper, request_digest


def is_true(correction: Correction, request: CorrectionRequest) -> bool | None:
    """Does the hidden truth agree with an answer? `None` where the task's judge doesn't know. A failed correction says
    nothing and is not true."""
    task, info = request.task, request.info
    if correction.verdict == "right":
        response = replace(request.response, action=correction.action or request.response.action)
        true = is_true_thought(task.judge(request.response, info))
        return true and _acts_right(response, request)
    if correction.verdict == "unsolvable":
        return not task.solvable(info)
    if correction.verdict == "corrected" and correction.thought is not None:
        legal = task.legal_actions(info)
        action = correction.action
        corrected = task.format.parse(task.format.render(correction.thought, legal[0] if action is None else action))
        true = is_true_thought(judge_parts(corrected, action, info, request))
        return true and (action is None or _acts_right(corrected, request))
    return False


def _acts_right(response: Response, request: CorrectionRequest) -> bool:
    """Is the action the one that the expert takes from this thought, and the one that the thought concludes? Not every
    judge looks at the action."""
    task, info = request.task, request.info
    if contradicts(task, response.fields, response.action, info):
        return False
    expert = task.expert(info, hint=response)
    return expert is None or task.to_env_action(response, info) == task.to_env_action(expert, info)


@dataclass(frozen=True)
class Grade:
    """One answer against the truth."""

    wrong: bool
    """The agent's thought or action is wrong, so that it needs a correction."""
    changed: bool
    """The corrector gave another thought or action, or called the state unsolvable."""
    true: bool
    """What the corrector said is true."""
    failed: bool


def grade(correction: Correction, request: CorrectionRequest) -> Grade | None:
    """`None` where the task's judge doesn't know whether the agent's thought or the corrector's is true."""
    response, answer_is_true = request.response, is_true(correction, request)
    thought_is_true = is_true_thought(request.task.judge(response, request.info))
    if thought_is_true is None or answer_is_true is None:
        return None
    right = thought_is_true and _acts_right(response, request)
    changed = correction.verdict in ("corrected", "unsolvable")
    if correction.verdict == "right" and correction.action is not None:
        changed = correction.action != response.action  # the expert on Blackjack: right reading, another action
    return Grade(not right, changed, answer_is_true, correction.verdict == "failed")


@dataclass(frozen=True)
class AuditReport:
    """Shares between 0 and 1; `None` where there was nothing to count."""

    graded: int
    precision: float | None
    """Of the thoughts that it changed, how many were wrong before and are true now."""
    recall: float | None
    """Of the wrong thoughts, how many it made true. A failure is a miss."""
    false_alarms: float | None
    """Of the right thoughts, how many it changed."""
    failed: float | None
    """Of all requests, how many failed."""
    wrong_thoughts: float | None
    """Of all requests, how many held a wrong thought."""

    def metrics(self) -> dict[str, float]:
        values = {
            "precision": self.precision,
            "recall": self.recall,
            "false_alarms": self.false_alarms,
            "audited": float(self.graded),
        }
        return {f"corrector/{name}": value for name, value in values.items() if value is not None}


def report(grades: Iterable[Grade]) -> AuditReport:
    grades = list(grades)
    helped = sum(grade.wrong and grade.changed and grade.true for grade in grades)
    changed = sum(grade.changed for grade in grades)
    wrong = sum(grade.wrong for grade in grades)
    alarms = sum(grade.changed and not grade.wrong for grade in grades)
    return AuditReport(
        graded=len(grades),
        precision=_share(helped, changed),
        recall=_share(helped, wrong),
        false_alarms=_share(alarms, len(grades) - wrong),
        failed=_share(sum(grade.failed for grade in grades), len(grades)),
        wrong_thoughts=_share(wrong, len(grades)),
    )


def _share(part: int, whole: int) -> Share | None:
    return Share(part, whole) if whole else None


def audit(corrector: Corrector, requests: Sequence[CorrectionRequest]) -> AuditReport:
    """Ask about all of these and grade the answers, where the task's judge knows what is true."""
    answers = corrector.correct(requests)
    grades = (grade(*pair) for pair in zip(answers, requests, strict=True))
    return report(each for each in grades if each is not None)


class AuditedCorrector(CorrectorWrapper):
    """Grades a share of another corrector's answers while it works and logs `corrector/precision` and `recall`.

    The answers themselves pass through untouched. Which requests are graded depends on their content alone.

    Args:
        share: Of the requests, between 0 and 1.
        window: The measures are over the last so many graded answers, so that a change over the run shows.
    """

    def __init__(self, corrector: Corrector, share: float = 0.1, window: int = 500):
        super().__init__(corrector)
        if not 0 < share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, not {share}")
        self.share = share
        self._grades: deque[Grade] = deque(maxlen=window)
        self._lock = threading.Lock()

    def check(self, task: Task) -> None:
        if not task.defines("judge"):
            raise ValueError(
                f"task {task.name!r} has no judge(), so its corrector can't be audited; give it one, or leave the "
                "audit out (on the command line: --corrector_audit_share 0)"
            )
        super().check(task)

    def correct(self, requests: Sequence[CorrectionRequest]) -> list[Correction]:
        answers = self.corrector.correct(requests)
        for request, answer in zip(requests, answers, strict=True):
            if self._chosen(request):
                result = grade(answer, request)
                if result is not None:
                    with self._lock:
                        self._grades.append(result)
        return answers

    def _chosen(self, request: CorrectionRequest) -> bool:
        number = hashlib.sha256(f"audit/{request_digest(request)}".encode()).digest()[:8]
        return int.from_bytes(number, "big") / 2**64 < self.share

    def report(self) -> AuditReport:
        with self._lock:
            return report(self._grades)

    def metrics(self) -> dict[str, float]:
        return super().metrics() | self.report().metrics()
