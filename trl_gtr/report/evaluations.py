"""Evaluations that a run has logged: when each was made, what it measured, and how sure it is."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .runs import Run

_METRIC = re.compile(r"(start|end|eval)(?:_(\w+?))?_(success|return|true_thoughts)")


@dataclass(frozen=True)
class Point:
    """One evaluation."""

    update: int
    value: float
    low: float
    """The 95 % interval, or the value itself where none was logged."""
    high: float
    moment: Literal["before", "between", "after"]

    def __str__(self) -> str:
        return f"{self.value:.0%}" + (f" [{self.low:.0%}, {self.high:.0%}]" if self.low < self.high else "")


def points(run: Run, measure: str = "success") -> dict[str, list[Point]]:
    """The run's evaluations in the order of its log, by what they were played on ("" where that has no name)."""
    found: dict[str, list[Point]] = {}
    for entry in run.log:
        for metric, value in entry.items():
            match = _METRIC.fullmatch(metric)
            if match is None or match[3] != measure or not math.isfinite(value):
                continue
            low, high = (entry.get(f"{metric}_{end}", value) for end in ("low", "high"))
            if not low <= value <= high:  # not finite, or not an interval
                low = high = value
            point = Point(entry["step"], value, low, high, _moment(run, match[1], entry["step"]))
            found.setdefault(match[2] or "", []).append(point)
    return found


def _moment(run: Run, prefix: str, update: int) -> Literal["before", "between", "after"]:
    if prefix == "start" or update == 0:
        return "before"
    # The policy after the last update is the trained one, whoever evaluates it.
    return "after" if prefix == "end" or (run.state != "running" and update >= run.last_update) else "between"


def last(run_points: Sequence[Point], moment: str) -> Point | None:
    """The latest evaluation of a moment."""
    return next((point for point in reversed(run_points) if point.moment == moment), None)


def table(groups: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """A row for each label and what it was evaluated on: success before, after, and last in between; a text a seed."""
    rows = []
    for label, runs in groups.items():
        by_name: dict[str, dict[str, list[str]]] = {}
        for run in runs:
            for name, evaluated in points(run).items():
                moments = by_name.setdefault(name, {"before": [], "between": [], "after": []})
                for moment, texts in moments.items():
                    if point := last(evaluated, moment):
                        texts.append(str(point))
        rows += [{"label": label, "name": name, **moments} for name, moments in by_name.items()]
    return rows
