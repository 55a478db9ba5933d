"""Evaluation reports side by side, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..responses.safe_text import printable
from .reports import EvaluationReport


def report_table(reports: Mapping[str, EvaluationReport], title: str) -> Table:
    """A row per report: success with its 95 % interval, return, length, shares of steps. 80 columns wide at most.

    The caption names evaluations that were cut short; one without any whole episode has no row.
    """
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    metrics = {name: report.metrics() for name, report in reports.items() if report.episodes}
    # Where every deal can be won, it would say the same twice.
    differs = any(m.get("success_solvable") != m["success"] for m in metrics.values())
    table.caption = "true: thoughts that are true in all parts"
    if differs:
        table.caption = f"solvable: success over the deals that can be won; {table.caption}"
    if played := _played(reports):
        table.caption = f"{played}\n{table.caption}"
    for name, report in reports.items():
        if not report.complete:
            cut_short = f"{printable(name)} was cut short: {len(report.episodes)} of {report.planned} episodes"
            table.caption = f"{table.caption}\n{escape(cut_short)}"
    for column in ("", "success", *(["solvable"] if differs else []), "return", "steps", "valid", "true"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, m in metrics.items():
        solvable = [f"{m['success_solvable']:.3f}" if "success_solvable" in m else "-"] if differs else []
        true = f"{m['true_thoughts']:.3f}" if "true_thoughts" in m else "unknown"
        means = (f"{m['return']:+.2f}", f"{m['length']:.1f}", f"{m['valid']:.3f}", true)
        table.add_row(Text(printable(name)), str(reports[name].success), *solvable, *means)
    return table


def _played(reports: Mapping[str, EvaluationReport]) -> str:
    """What was played, as in "72 different bundled games"; where reports differ in that, each says so."""
    counts = [report.different_starts() for report in reports.values()]
    words = [" and ".join(f"{count} different {source}" for source, count in each.items()) for each in counts]
    if len(set(words)) > 1:
        return "; ".join(f"{name}: {each}" for name, each in zip(reports, words, strict=True) if each)
    return "".join(words[:1])


def difficulty_table(reports: Mapping[str, EvaluationReport], title: str) -> Table:
    """A row per difficulty of the deals, a column per report."""
    table = Table(
        "", "deals", *map(escape, map(printable, reports)), title=title, box=box.SIMPLE, padding=(0, 1, 0, 0)
    )
    rates = [report.by_difficulty() for report in reports.values()]
    for difficulty in rates[0]:
        row = [rate[difficulty] for rate in rates]
        table.add_row(difficulty, str(row[0].count), *map(str, row))
    return table
