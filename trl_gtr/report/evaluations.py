"""Evaluations of runs, for the page's summary, table and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..runs.logged_evaluations import Point, evaluation_points, last_point
from .runs import Run


def points(run: Run, measure: str = "success") -> dict[str, list[Point]]:
    """The policy's evaluations, by evaluation set."""
    return evaluation_points(run.log, measure, is_over=run.state != "running")


def teacher_points(run: Run, measure: str = "success") -> dict[str, list[Point]]:
    """Those of its merged teacher, if it has one."""
    return evaluation_points(run.log, measure, is_over=run.state != "running", of="teacher")


def titled_points(run: Run, measure: str = "success") -> dict[str, list[Point]]:
    """All of them, by what a legend says."""
    titled = {f"evaluated on {name}" if name else "evaluated": found for name, found in points(run, measure).items()}
    for name, found in teacher_points(run, measure).items():
        titled[f"merged teacher on {name}" if name else "merged teacher"] = found
    return titled


def table(groups: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """One row per label and evaluation set: success before, after, and last during training; one text per seed."""
    rows = []
    for label, runs in groups.items():
        by_name: dict[str, dict[str, list[str]]] = {}
        for run in runs:
            taught = {f"{name or 'all'}, merged teacher": found for name, found in teacher_points(run).items()}
            for name, evaluated in (points(run) | taught).items():
                moments = by_name.setdefault(name, {"before": [], "between": [], "after": []})
                for moment, texts in moments.items():
                    if point := last_point(evaluated, moment):
                        texts.append(str(point))
        rows += [{"label": label, "name": name, **moments} for name, moments in by_name.items()]
    return rows
