"""Curves as SVG (by matplotlib) in the page's colours, with their values for tooltips and tables.

Runs with the same label are drawn as one line, their mean, with a band from the lowest to the highest.
"""

from __future__ import annotations

import io
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ..runs.logged_evaluations import Point
from .evaluations import titled_points
from .runs import Run

SERIES_COLOURS = 8
MOST_POINTS = 300
STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P")
# Placeholder colours for matplotlib; the page replaces them by its light or dark mode colours.
_INK, _GRID = "#010101", "#020202"
_SIZE = (4.4, 2.5)
_AXES = (0.11, 0.16, 0.87, 0.76)
_FORMAT: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "trl-gtr",
    "font.size": 9,
    "font.family": "sans-serif",
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True)
class Panel:
    """One chart: metrics by name, each with its legend."""

    title: str
    metrics: Mapping[str, str]
    note: str = ""
    share: bool = False
    """Values are shares, shown in percent from 0 to 100."""
    evaluated: str = ""
    """Name of the same metric in evaluations, which are drawn as points with intervals."""


CURVES = (
    Panel(
        "Success",
        {"episode/success": "in training", "episode/success_solvable": "winnable only"},
        "of episodes that ended in the update; dots: evaluations with 95 % interval",
        share=True,
        evaluated="success",
    ),
    Panel("Return", {"episode/return": "in training"}, "sum of raw rewards per episode", evaluated="return"),
    Panel(
        "True thoughts",
        {"thoughts/true": "every part true", "thoughts/reading": "image read correctly"},
        "of all steps",
        share=True,
        evaluated="true_thoughts",
    ),
    Panel(
        "Corrected thoughts",
        {"corrector/corrected": "corrected", "corrector/failed": "no answer"},
        "of steps the corrector saw",
        share=True,
    ),
    Panel("Responses", {"response/valid": "valid format", "response/legal": "legal action"}, "of all steps", True),
    Panel("Response length", {"response/tokens": "tokens", "response/thought_tokens": "thought only"}),
    Panel(
        "Groups not learned from",
        {"groups/dead": "all returns equal", "groups/cut": "cut short"},
        "of the groups played",
        share=True,
    ),
    Panel("Refilled groups", {"groups/refilled": "refilled"}, "of the groups played", share=True),
    Panel("Policy loss", {"loss/policy": "clipped surrogate"}),
    Panel("Value loss", {"loss/value": "value loss"}),
    Panel("Cloning loss", {"loss/cloning": "cross-entropy on labels"}),
    Panel("Drift", {"policy/approx_kl": "KL from the acting policy"}),
    Panel("Entropy", {"policy/entropy": "per token"}),
    Panel(
        "KL to the merged teacher",
        {"teacher/kl": "per thought token"},
        "of the agent's own thoughts, bounded at 0 and 10",
    ),
    Panel(
        "Teacher's responses",
        {"teacher/parsed": "steps with a valid one", "teacher/valid": "valid, of all it wrote"},
        share=True,
    ),
    Panel(
        "Distance in weights",
        {"teacher/distance": "policy to teacher", "teacher/travelled": "policy to start"},
        "Euclidean, over merged weights",
    ),
    Panel("Merge", {"teacher/merge_seconds": "seconds"}),
    Panel("Speed", {"speed/steps_per_second": "environment steps per second"}),
    Panel("Corrector cost", {"corrector/usd_spent": "total US dollars"}),
)
COLLAPSE = (
    Panel(
        "Distinct n-grams",
        {"thoughts/distinct_2": "2-grams", "thoughts/distinct_4": "4-grams"},
        "share of distinct word n-grams; falls on collapse",
        share=True,
    ),
    Panel("Self-BLEU", {"thoughts/self_bleu": "self-BLEU"}, "similarity of thoughts; rises on collapse", share=True),
    Panel(
        "Repeated in another state",
        {"thoughts/identical_across_states": "word for word", "thoughts/identical_untrue": "and untrue"},
        "collapse: rises",
        share=True,
    ),
    Panel("Commonest thought", {"thoughts/top_share": "its share"}, "collapse: rises", share=True),
)


@dataclass
class Line:
    """One line over updates with its band, or points with their intervals."""

    name: str
    colour: int
    style: str
    x: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    points: bool = False

    @property
    def swatch(self) -> str:
        """Its marker in the legend."""
        if self.points:
            return "square" if self.style == "s" else "dot"
        return "solid" if self.style == "-" else "dashed"

    def draw(self, axes: Any) -> None:
        colour = _series_colour(self.colour)
        if self.points:
            ranges = [[m - low for m, low in zip(self.mean, self.low, strict=True)],
                      [high - m for m, high in zip(self.mean, self.high, strict=True)]]  # fmt: skip
            axes.errorbar(self.x, self.mean, ranges, fmt=self.style, color=colour, markersize=5.5, elinewidth=1.2)
            return
        marker = "o" if len(self.x) == 1 else None
        axes.plot(self.x, self.mean, self.style, color=colour, marker=marker, linewidth=1.8)
        if self.low != self.high:
            axes.fill_between(self.x, self.low, self.high, color=colour, alpha=0.2, linewidth=0)


@dataclass
class Chart:
    """A panel as shown on the page."""

    title: str
    note: str
    svg: Markup
    data: dict[str, Any]
    rows: list[list[str]] = field(default_factory=list)
    """The same data as a table: the update, then one value per line."""


def charts(panels: Sequence[Panel], groups: Mapping[str, Sequence[Run]]) -> list[Chart]:
    """The panels that have data, with one colour per label and one style per metric."""
    made = []
    for panel in panels:
        lines = []
        for style, (metric, words) in zip(STYLES, panel.metrics.items(), strict=False):
            for colour, (label, runs) in enumerate(groups.items()):
                name = words if len(groups) == 1 else label if len(panel.metrics) == 1 else f"{label}: {words}"
                lines += mean_line(metric, name, colour % SERIES_COLOURS, style, runs)
        if panel.evaluated:
            lines = [line for line in lines if not _says_the_same(line, lines)]
            lines += evaluation_lines(panel.evaluated, groups)
        if lines:
            made.append(draw(panel.title, panel.note, lines, panel.share))
    return made


def _says_the_same(line: Line, lines: Sequence[Line]) -> bool:
    """Whether it equals an earlier line, e.g. success on winnable deals if all are winnable."""
    before = lines[: lines.index(line)]
    return any((line.x, line.mean, line.colour) == (other.x, other.mean, other.colour) for other in before)


def evaluation_lines(measure: str, groups: Mapping[str, Sequence[Run]]) -> list[Line]:
    """Evaluations as points, with one marker per evaluation set (and one colour, if there is only one label). With
    several seeds: mean and range."""
    evaluated = {label: [titled_points(run, measure) for run in runs] for label, runs in groups.items()}
    titles = list(dict.fromkeys(title for runs in evaluated.values() for run in runs for title in run))
    lines = []
    for colour, (label, runs) in enumerate(evaluated.items()):
        for i, (marker, title) in enumerate(zip(MARKERS, titles, strict=False)):
            found = [point for run in runs for point in run.get(title, [])]
            if not found:
                continue
            if len(groups) > 1:
                lines.append(_points(f"{label}: {title}", colour, marker, found))
            else:
                lines.append(_points(title, i + 1, marker, found))
    return lines


def _points(name: str, colour: int, marker: str, found: Sequence[Point]) -> Line:
    by_update: dict[int, list[Point]] = {}
    for point in found:
        by_update.setdefault(point.update, []).append(point)
    line = Line(name, colour % SERIES_COLOURS, marker, sorted(by_update), [], [], [], points=True)
    for update in line.x:
        same = by_update[update]
        line.mean.append(sum(point.value for point in same) / len(same))
        line.low.append(same[0].low if len(same) == 1 else min(point.value for point in same))
        line.high.append(same[0].high if len(same) == 1 else max(point.value for point in same))
    return line


def truth_charts(groups: Mapping[str, Sequence[Run]]) -> list[Chart]:
    """For each label, the share of true thoughts by part, with one colour per part."""
    prefix, made = "thoughts/true_", []
    for label, runs in groups.items():
        parts = sorted({name for run in runs for name in run.metrics if name.startswith(prefix)})
        lines = []
        for i, name in enumerate(parts):
            lines += mean_line(name, name.removeprefix(prefix).replace("_", " "), i % SERIES_COLOURS, "-", runs)
        if lines:
            title = "True by part" if len(groups) == 1 else f"True by part: {label}"
            made.append(draw(title, "of all steps", lines, share=True))
    return made


def mean_line(metric: str, name: str, colour: int, style: str, runs: Sequence[Run]) -> list[Line]:
    """Mean and range over the runs that logged the metric; empty if none did."""
    values: dict[int, list[float]] = {}
    for run in runs:
        for update, value in run.series(metric).items():
            if math.isfinite(value):
                values.setdefault(update, []).append(float(value))
    if not values:
        return []
    updates = sorted(values)
    stride = math.ceil(len(updates) / MOST_POINTS)
    updates = [*updates[:-1:stride], updates[-1]]  # always keep the last one
    return [
        Line(
            name,
            colour,
            style,
            x=updates,
            mean=[sum(values[u]) / len(values[u]) for u in updates],
            low=[min(values[u]) for u in updates],
            high=[max(values[u]) for u in updates],
        )
    ]


def draw(title: str, note: str, lines: Sequence[Line], share: bool = False) -> Chart:
    with matplotlib.rc_context(_FORMAT):
        figure = Figure(figsize=_SIZE, dpi=72)  # 72: a pixel is one unit of the SVG
        axes = figure.add_axes(_AXES)
        for line in lines:
            line.draw(axes)
        axes.grid(color=_GRID, linewidth=0.7)
        axes.tick_params(length=0)
        axes.set_xlabel("update", loc="right")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        if share:
            axes.set_ylim(-0.03, 1.03)
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        else:  # factor out powers such as 1e-3: longer labels would be cut off
            axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4), useOffset=False)
        box = axes.get_window_extent()
        limits = axes.get_xlim()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    data = {
        "box": [box.x0, figure.bbox.height - box.y1, box.x1, figure.bbox.height - box.y0],
        "limits": limits,
        "share": share,
        "lines": [
            {"name": line.name, "colour": line.colour, "style": line.swatch, "x": line.x}
            | {key: [round(v, 6) for v in getattr(line, key)] for key in ("mean", "low", "high")}
            for line in lines
        ],
    }
    return Chart(title, note, _inline(buffer.getvalue(), f"{title}, by update. {note}"), data, _table(lines, share))


def _table(lines: Sequence[Line], share: bool) -> list[list[str]]:
    updates = sorted({u for line in lines for u in line.x})
    stride = math.ceil(len(updates) / 50)
    by_update = [dict(zip(line.x, line.mean, strict=True)) for line in lines]

    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.1%}" if share else f"{value:.4g}"

    return [[str(u), *(cell(values.get(u)) for values in by_update)] for u in updates[::stride]]


def _series_colour(index: int) -> str:
    return f"#0303{index:02x}"


def _inline(svg: str, label: str) -> Markup:
    """The bare SVG element, in the page's colours and with unique ids."""
    svg = svg[svg.index("<svg") :]
    prefix = f"chart-{zlib.crc32(svg.encode()):08x}-"
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{prefix}", svg)
    svg = svg.replace(_INK, "var(--ink)").replace(_GRID, "var(--grid)")
    svg = re.sub(r"#0303([0-9a-f]{2})", lambda match: f"var(--series-{int(match[1], 16)})", svg)
    svg = re.sub(r"font: [^;\"]*?(\d+px)[^;\"]*", r"font: \1 var(--font)", svg)
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img" aria-label="@">', svg, count=1)
    return Markup(svg.replace('aria-label="@"', Markup('aria-label="{}"').format(label), 1))
