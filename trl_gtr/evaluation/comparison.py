"""Comparing runs: each log summarised in a few numbers, means over seeds, and curves with bands.

A run is `{"arm": name, "seed": int, "log": log_history}`, with `log_history` as in `trainer_state.json`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

Run = Mapping[str, Any]

LAST_UPDATES = 3
"""A curve's final value is the mean over this many updates."""

CURVES = {
    "episode/success": "success (sampled)",
    "thoughts/true": "true thoughts",
    "thoughts/reading": "read right",
    "thoughts/distinct_4": "distinct 4-grams",
}
"""Curves to draw, by their name in the log."""

SAMPLED = {
    "episode/success": "sampled success",
    "thoughts/true": "sampled true thoughts",
    "thoughts/identical_across_states": "identical across states",
    "thoughts/self_bleu": "self-BLEU",
    "policy/entropy": "entropy",
    "thoughts/length_words": "words a thought",
}
"""Table columns for metrics sampled in training."""

_STUDENT_T = {3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 15: 2.14, 20: 2.09}


def curve(run: Run, name: str) -> np.ndarray:
    """The values of a logged metric, update by update."""
    return np.array([entry[name] for entry in run["log"] if name in entry])


def summary(run: Run) -> dict[str, float]:
    """A run in numbers: evaluations before and after training, and metrics sampled at the end of training."""
    evaluated = {name: value for entry in run["log"] for name, value in entry.items()}
    row = {
        name.replace("_", " "): evaluated[name]
        for name in sorted(evaluated, key=lambda name: (name.endswith("true_thoughts"), name))
        if name.startswith(("start_", "end_")) and name.endswith(("_success", "_true_thoughts"))
    }
    for name, words in SAMPLED.items():
        if len(values := curve(run, name)):
            row[words] = float(values[-LAST_UPDATES:].mean())
    return row


def largest_fall(run: Run) -> float:
    """The largest drop in sampled success from one update to the next."""
    return float(max([0.0, *(-np.diff(curve(run, "episode/success")))]))


def interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval over seeds (Student's t); fewer than three values are listed as they are."""
    if len(values) < 3:
        return ", ".join(f"{value:.3f}" for value in values)
    half = _STUDENT_T[max(n for n in _STUDENT_T if n <= len(values))] * np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{np.mean(values):.3f} ± {half:.3f}"


def by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    arms: dict[str, list[Run]] = {}
    for run in runs:
        arms.setdefault(run["arm"], []).append(run)
    return arms


def arm_row(arm: str, runs: Sequence[Run]) -> dict[str, str]:
    """One arm's table row: evaluations as start → end with the end's interval, then metrics sampled at the end.

    The largest fall is the largest drop in sampled success between updates, over all seeds; the smallest gain is the
    smallest improvement in the first evaluation's success from start to end, over all seeds.
    """
    rows = [summary(run) for run in runs]
    cells = {"arm": arm, "seeds": str(len(runs))}
    gains = None
    for name in rows[0]:
        values = [row[name] for row in rows if name in row]
        if name.startswith("start "):
            continue
        if name.startswith("end "):
            words = name.removeprefix("end ")
            starts = [row.get(f"start {words}", math.nan) for row in rows]
            cells[words] = f"{np.mean(starts):.2f} → {interval(values)}"
            if gains is None and words.endswith("success"):
                gains = [end - start for start, end in zip(starts, values, strict=True)]
        else:
            cells[name] = interval(values)
    cells["largest fall"] = f"{max(map(largest_fall, runs)):.2f}"
    if gains is not None:
        cells["smallest gain"] = f"{min(gains):+.2f}"
    return cells


def comparison_rows(runs: Sequence[Run]) -> list[dict[str, str]]:
    """A row for each arm, all with the same columns: only some arms have a teacher to evaluate."""
    rows = [arm_row(arm, mine) for arm, mine in by_arm(runs).items()]
    names = dict.fromkeys(name for row in sorted(rows, key=len, reverse=True) for name in row)
    return [{name: row.get(name, "") for name in names} for row in rows]


def comparison_table(runs: Sequence[Run], title: str) -> Table:
    """One row per arm."""
    rows = comparison_rows(runs)
    table = Table(*rows[0], title=f"{title}: mean and 95 % interval over seeds")
    for row in rows:
        table.add_row(*row.values())
    return table


def comparison_markdown(runs: Sequence[Run]) -> str:
    """The same table as Markdown."""
    rows = comparison_rows(runs)
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def draw_band(axis: Any, runs: Sequence[Run], name: str, label: str, colour: str | None = None) -> None:
    """Draw the mean over runs as a line, with their range as a band."""
    length = min(len(curve(run, name)) for run in runs)
    values, updates = np.array([curve(run, name)[:length] for run in runs]), np.arange(1, length + 1)
    (line,) = axis.plot(updates, values.mean(0), label=label, color=colour, linewidth=2)
    axis.fill_between(updates, values.min(0), values.max(0), alpha=0.2, color=line.get_color(), linewidth=0)


def draw_curves(runs: Sequence[Run], file: str | Path, curves: Mapping[str, str] = CURVES) -> None:
    """Draw one panel per curve, with one band per arm."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError('Curves need matplotlib: pip install "trl-gtr[report]"') from None

    figure = Figure(figsize=(4 * len(curves), 3.2), layout="constrained")
    axes = figure.subplots(1, len(curves), squeeze=False)
    for axis, (name, title) in zip(axes[0], curves.items(), strict=True):
        for arm, mine in by_arm(runs).items():
            draw_band(axis, mine, name, arm)
        axis.set(title=title, xlabel="update", ylim=(-0.02, 1.02))
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.savefig(file, dpi=120)
