"""Figures of compared runs: curves with bands over seeds, and where each method ends alone and with guidance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trl_gtr.evaluation.comparison import CURVES, GUIDED, Run, by, curve, methods, summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_band(
    axis: Any,
    runs: Sequence[Run],
    name: str,
    label: str,
    colour: str | None = None,
    over: str = "update",
    style: str = "-",
    band: bool = True,
) -> None:
    """Draw the mean over runs as a line, with their range as a band.

    Args:
        over: What is on the x-axis: "update", or a logged number, e.g. "env_steps" if updates differ in size.
        band: Whether to draw the range.
    """
    drawn = [(positions(run, name, over), curve(run, name)) for run in runs if len(curve(run, name))]
    if not drawn:
        return
    # Up to where the first run ends, at the points of the first: those of the others may lie elsewhere.
    end = min(x[-1] for x, _ in drawn)
    shared = drawn[0][0][drawn[0][0] <= end]
    values = np.array([np.interp(shared, x, y) for x, y in drawn])
    (line,) = axis.plot(shared, values.mean(0), style, label=label, color=colour, linewidth=2)
    if band:
        axis.fill_between(shared, values.min(0), values.max(0), alpha=0.2, color=line.get_color(), linewidth=0)


def positions(run: Run, name: str, over: str) -> np.ndarray:
    """Where on the x-axis the values of `curve` are."""
    if over == "update":
        return np.arange(1, len(curve(run, name)) + 1)
    return np.array([entry[over] for entry in run["log"] if name in entry])


def draw_curves(runs: Sequence[Run], file: str | Path, curves: Mapping[str, str] = CURVES) -> None:
    """Draw one panel per curve, with one band per arm; in a study of several tasks, a row of panels per task."""
    tasks, names = by("task", runs), methods(runs)
    figure = _new_figure(4 * len(curves), 3.2 * len(tasks))
    axes = figure.subplots(len(tasks), len(curves), squeeze=False)
    for row, (task, of_task) in zip(axes, tasks.items(), strict=True):
        over = "env_steps" if task else "update"
        for axis, (name, title) in zip(row, curves.items(), strict=True):
            for arm, mine in by("arm", of_task).items():
                colour = f"C{names.index(arm.removesuffix(GUIDED)) % 10}"
                draw_band(axis, mine, name, arm, colour, over, "--" if arm.endswith(GUIDED) else "-")
            axis.set(title=f"{task}: {title}" if task else title, xlabel=over.replace("_", " "), ylim=(-0.02, 1.02))
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.savefig(file, dpi=120)


def draw_guidance(runs: Sequence[Run], file: str | Path) -> None:
    """Draw a column per task: above, mean sampled success over steps; below, greedy success at the end for each seed.

    A method keeps its colour. Dashed lines and filled dots are with guidance. The dotted line is the common start.
    """
    tasks, names = by("task", runs), methods(runs)
    figure = _new_figure(4.2 * len(tasks), 6.2)
    curves, ends = figure.subplots(2, len(tasks), squeeze=False, sharey=True)
    for task, above, below in zip(tasks, curves, ends, strict=True):
        arms = by("arm", tasks[task])
        for place, method in enumerate(names):
            colour = f"C{place % 10}"
            for arm, style, side, face in ((method, "-", -0.16, "none"), (method + GUIDED, "--", 0.16, colour)):
                mine = arms.get(arm, [])
                label = method if arm == method else "_"  # which matplotlib leaves out of the legend
                draw_band(above, mine, "episode/success", label, colour, "env_steps", style, band=False)
                reached = [summary(run)["end success"] for run in mine]
                below.scatter([place + side] * len(reached), reached, 26, edgecolors=colour, facecolors=face, zorder=3)
                if reached:
                    below.hlines(np.mean(reached), place + side - 0.13, place + side + 0.13, colour, linewidth=2)
        above.plot([], [], "k--", label="guided")
        start = np.mean([summary(run)["start success"] for run in tasks[task]])
        below.axhline(start, color="0.4", linestyle=":", label="start")
        above.set(title=task, xlabel="environment steps", ylim=(-0.02, 1.04))
        below.set_xticks(range(len(names)), names)
        for axis in (above, below):
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
    curves[0].set_ylabel("success while training (sampled)")
    ends[0].set_ylabel("success at the end (greedy)")
    curves[0].legend(fontsize=8, ncols=2)
    ends[0].legend(fontsize=8)
    figure.savefig(file, dpi=120)


def _new_figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError('Figures need matplotlib: pip install "trl-gtr[report]"') from None
    return Figure(figsize=(width, height), layout="constrained")
