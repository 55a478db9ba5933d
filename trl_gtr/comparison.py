"""Runs side by side: what each one's log says in a few numbers, means over seeds, and curves with bands.

A run is `{"arm": name, "seed": int, "log": log_history}`, the last as in `trainer_state.json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

Run = Mapping[str, Any]

LAST_UPDATES = 3
"""The mean over this many updates is the end of a curve."""

CURVES = {
    "episode/success": "success (sampled)",
    "thoughts/true": "true thoughts",
    "thoughts/reading": "read right",
    "thoughts/distinct_4": "distinct 4-grams",
}
"""What is drawn, by its name in the log."""

_STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def curve(run: Run, name: str) -> np.ndarray:
    """The values of a logged name, update by update."""
    return np.array([entry[name] for entry in run["log"] if name in entry])


def summary(run: Run) -> dict[str, float]:
    """A run in numbers: evaluations before and after training, and what training itself sampled at its end."""
    evaluated = {name: value for entry in run["log"] for name, value in entry.items()}
    row = {
        name.replace("_", " "): evaluated[name]
        for name in sorted(evaluated, reverse=True)
        if name.startswith(("start_", "end_")) and name.endswith(("_success", "_true_thoughts"))
    }
    row["sampled success"] = float(curve(run, "episode/success")[-LAST_UPDATES:].mean())
    row["sampled true thoughts"] = float(curve(run, "thoughts/true")[-LAST_UPDATES:].mean())
    return row


def largest_fall(run: Run) -> float:
    """By how much sampled success fell at most from one update to the next."""
    return float(max([0.0, *(-np.diff(curve(run, "episode/success")))]))


def interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval over seeds (Student's t)."""
    if len(values) < 2:
        return f"{values[0]:.3f}"
    half = _STUDENT_T.get(len(values), 2.0) * np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{np.mean(values):.3f} ± {half:.3f}"


def by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    arms: dict[str, list[Run]] = {}
    for run in runs:
        arms.setdefault(run["arm"], []).append(run)
    return arms


def comparison_table(runs: Sequence[Run], title: str) -> Table:
    """A row per arm: mean and interval of everything in `summary`, and the worst fall of any seed."""
    columns = list(summary(runs[0]))
    table = Table("arm", "seeds", *columns, "largest fall", title=f"{title}: mean and 95 % interval over seeds")
    for arm, mine in by_arm(runs).items():
        cells = [interval([summary(run)[name] for run in mine]) for name in columns]
        table.add_row(arm, str(len(mine)), *cells, f"{max(largest_fall(run) for run in mine):.2f}")
    return table


def draw_band(axis: Any, runs: Sequence[Run], name: str, label: str, colour: str | None = None) -> None:
    """The mean over runs as a line, their range as a band."""
    length = min(len(curve(run, name)) for run in runs)
    values, updates = np.array([curve(run, name)[:length] for run in runs]), np.arange(1, length + 1)
    (line,) = axis.plot(updates, values.mean(0), label=label, color=colour, linewidth=2)
    axis.fill_between(updates, values.min(0), values.max(0), alpha=0.2, color=line.get_color(), linewidth=0)


def draw_curves(runs: Sequence[Run], file: str | Path, curves: Mapping[str, str] = CURVES) -> None:
    """A panel per curve, in it a band per arm."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(curves), figsize=(4 * len(curves), 3.2), layout="constrained", squeeze=False)
    for axis, (name, title) in zip(axes[0], curves.items(), strict=True):
        for arm, mine in by_arm(runs).items():
            draw_band(axis, mine, name, arm)
        axis.set(title=title, xlabel="update", ylim=(-0.02, 1.02))
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.savefig(file, dpi=120)
    plt.close(figure)
