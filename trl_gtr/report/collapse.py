"""The most repeated thoughts of a run's first and last updates, and in how many different states they were said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .episodes import Gallery, seen
from .runs import Run

MOST_THOUGHTS = 6
MOST_STATES = 4
MOST_CHARACTERS = 400
SHARE = 1 / 4
"""How much of the run its first and its last part are."""


def repeated_thoughts(runs: Sequence[Run], gallery: Gallery) -> list[dict[str, Any]]:
    """The first and the last part of the runs, each with its commonest thoughts."""
    updates = sorted({row["update"] for run in runs for row in run.rows})
    if not updates:
        return []
    size = max(1, round(len(updates) * SHARE))
    periods = [updates[:size], updates[-size:]] if len(updates) > 1 else [updates]
    return [_period(chosen, runs, gallery) for chosen in periods]


def _period(updates: Sequence[int], runs: Sequence[Run], gallery: Gallery) -> dict[str, Any]:
    chosen = set(updates)
    said: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        for row in run.rows:
            if row["update"] in chosen:
                said.setdefault(" ".join((row["thought_text"] or "").split()), []).append(row)
    steps = sum(map(len, said.values()))
    commonest = sorted(said.items(), key=lambda item: (-len(item[1]), item[0]))[:MOST_THOUGHTS]
    return {
        "first": updates[0],
        "last": updates[-1],
        "steps": steps,
        "distinct": len(said),
        "thoughts": [_thought(text, rows, steps, gallery) for text, rows in commonest],
    }


def _thought(text: str, rows: Sequence[dict[str, Any]], steps: int, gallery: Gallery) -> dict[str, Any]:
    states = {seen(row): row for row in rows}
    judged = [all(part["right"] for part in row["judgement"]) for row in rows if row["judgement"]]
    pictures = [gallery.add(row["image"]) for row in list(states.values())[:MOST_STATES]]
    return {
        "text": text[:MOST_CHARACTERS] + ("…" if len(text) > MOST_CHARACTERS else ""),
        "count": len(rows),
        "share": len(rows) / steps,
        "states": len(states),
        "true": sum(judged) / len(judged) if judged else None,
        "pictures": [number for number in pictures if number is not None],
    }
