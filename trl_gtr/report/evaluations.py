"""Evaluations of runs, for the head of the page, its table and its curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..runs.logged_evaluations import Point, evaluation_points, last_point
from .runs import Run


def points(run: Run, measure: str = "success") -> dict[str, list[Point]]:
    return evaluation_points(run.log, measure, is_over=run.state != "running")


def table(groups: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """A row for each label and what it was evaluated on: success before, after, and last in between; a text a seed."""
    rows = []
    for label, runs in groups.items():
        by_name: dict[str, dict[str, list[str]]] = {}
        for run in runs:
            for name, evaluated in points(run).items():
                moments = by_name.setdefault(name, {"before": [], "between": [], "after": []})
                for moment, texts in moments.items():
                    if point := last_point(evaluated, moment):
                        texts.append(str(point))
        rows += [{"label": label, "name": name, **moments} for name, moments in by_name.items()]
    return rows
