"""Evaluations in a run's log: when they happened, what they measured, and their confidence intervals."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Moment = Literal["before", "between", "after"]
Player = Literal["policy", "teacher"]
"""Who was evaluated: the policy, or a merged teacher along with it."""
_MEASURE = "(success|return|true_thoughts)"
_METRIC = {
    "policy": re.compile(rf"(start|end|eval)(?:_(\w+?))?(?<!_teacher)_{_MEASURE}"),
    "teacher": re.compile(rf"(start|end|eval)(?:_(\w+?))?_teacher_{_MEASURE}"),
}


@dataclass(frozen=True)
class Point:
    """One evaluation."""

    update: int
    value: float
    low: float
    """Lower end of the 95 % interval, or the value itself if none was logged."""
    high: float
    moment: Moment
    """Before, during or after training."""

    def __str__(self) -> str:
        return f"{self.value:.0%}" + (f" [{self.low:.0%}, {self.high:.0%}]" if self.low < self.high else "")


def evaluation_points(
    log: Iterable[Mapping[str, Any]], measure: str = "success", *, is_over: bool, of: Player = "policy"
) -> dict[str, list[Point]]:
    """A log's evaluations in order, grouped by evaluation set ("" if unnamed).

    Args:
        log: Entries with `step`, the update.
        measure: `success`, `return` or `true_thoughts`.
        is_over: Training has ended, so any evaluation after the last update is of the trained policy.
        of: Whose.
    """
    entries = list(log)
    last_update = max((entry["step"] for entry in entries), default=0)
    found: dict[str, list[Point]] = {}
    for entry in entries:
        for metric, value in entry.items():
            match = _METRIC[of].fullmatch(metric)
            if match is None or match[3] != measure or not math.isfinite(value):
                continue
            low, high = (entry.get(f"{metric}_{end}", value) for end in ("low", "high"))
            if not low <= value <= high:  # not finite, or not an interval
                low = high = value
            trained = is_over and entry["step"] >= last_update
            moment = _moment(match[1], entry["step"], trained)
            found.setdefault(match[2] or "", []).append(Point(entry["step"], value, low, high, moment))
    return found


def _moment(prefix: str, update: int, trained: bool) -> Moment:
    if prefix == "start" or update == 0:
        return "before"
    return "after" if prefix == "end" or trained else "between"


def last_point(points: Sequence[Point], moment: str) -> Point | None:
    """The latest evaluation before, during or after training."""
    return next((point for point in reversed(points) if point.moment == moment), None)
