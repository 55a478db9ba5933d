"""The page itself: one HTML file with everything in it."""

from __future__ import annotations

import base64
import datetime
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..responses.safe_text import storable
from ..storage.files import atomic_write
from .runs import Run, any_grows, groups, read_runs
from .state import moment

MAX_BYTES = 10_000_000
# What curves, style, script and the card may take beside episodes and pictures.
_RESERVE = 2_000_000
TEMPLATES = Path(__file__).parent / "templates"


def write_report(
    folders: Sequence[str | Path],
    labels: Sequence[str] | None = None,
    output: str | Path | None = None,
    refresh: float | None = None,
) -> Path:
    """Write the report of one run or several, and say where.

    Args:
        folders: The runs' output folders.
        labels: What to call each; runs of one label are seeds, drawn as one line with a band. Without them a folder's
            name, or that of the folder above for `seed0`, `seed1`, …
        output: The file. Without it `report.html` in the first run's folder.
        refresh: Seconds after which an open page loads itself again; `None` for never.
    """
    path = Path(output) if output is not None else Path(folders[0]) / "report.html"
    html = _report(read_runs(folders, labels), refresh)
    with atomic_write(path) as file:
        file.write_text(storable(html), "utf-8")
    return path


def watch_report(
    folders: Sequence[str | Path],
    labels: Sequence[str] | None = None,
    output: str | Path | None = None,
    seconds: float = 30.0,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[Path]:
    """Write the report whenever its runs have written more, until none of them goes on; the file each time.

    Args:
        folders: See `write_report`, and so `labels` and `output`.
        seconds: How long to wait between two looks. An open page loads itself again as often.
        wait: Who waits.
    """
    growing, shown = True, None
    while growing:
        # First: what a run writes while the page is made comes with the next one.
        growing, written = any_grows(folders), _last_written(folders)
        if not growing or written != shown:
            yield write_report(folders, labels, output, refresh=seconds if growing else None)
            shown = written
        if growing:
            wait(seconds)


def _last_written(folders: Sequence[str | Path]) -> list[int]:
    logs = (Path(folder) / "metrics.jsonl" for folder in folders)
    return [log.stat().st_mtime_ns if log.is_file() else 0 for log in logs]


def _report(runs: Sequence[Run], refresh: float | None) -> str:
    try:
        from . import card, collapse, curves, episodes, evaluations, verdict
    except ImportError as error:
        raise ImportError(f'A report needs {error.name}: pip install "trl-gtr[report]"') from None

    by_label = groups(runs)
    names = _names(by_label)

    budget = episodes.Budget(MAX_BYTES - _RESERVE)
    gallery = episodes.Gallery(budget)
    repeated = {label: collapse.repeated_thoughts(seeds, gallery) for label, seeds in by_label.items()}
    shown = episodes.EpisodeData(budget, gallery, episodes.shared_starts(runs))
    for i, run in enumerate(runs):
        shown.add(run, names[id(run)], episodes.MOST_EPISODES // len(runs), share=1 / (len(runs) - i))

    if gallery.unreadable and runs[0].files is not None:
        runs[0].files.skip(f"{gallery.unreadable} pictures that are no PNG or WebP or too large")
    charts = curves.charts(curves.CURVES, by_label)
    collapse_charts = curves.charts(curves.COLLAPSE, by_label) + curves.truth_charts(by_label)
    return _render(
        title=", ".join(by_label),
        task=next((run.card["task"] for run in runs if run.card.get("task")), None),
        labels=list(by_label),
        several_seeds=any(len(seeds) > 1 for seeds in by_label.values()),
        refresh=None if refresh is None else max(1, round(refresh)),
        verdicts=verdict.verdicts(by_label),
        evaluations=evaluations.table(by_label),
        charts=charts,
        collapse_charts=collapse_charts,
        repeated=repeated,
        cards=[card.run_view(run, names[id(run)]) for run in runs],
        data={
            "runs": shown.runs,
            "images": gallery.uris,
            "prompts": shown.prompts,
            "charts": [chart.data for chart in [*charts, *collapse_charts]],
            "refresh": refresh,
        },
        has_episodes=any(run["episodes"] for run in shown.runs),
    )


def _render(**values: Any) -> str:
    """The template with its style and script in it; everything else is escaped."""
    import jinja2
    import markupsafe

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = markupsafe.Markup((TEMPLATES / "report.js").read_text("utf-8"))
    return environment.get_template("report.html.j2").render(
        **values,
        style=markupsafe.Markup((TEMPLATES / "report.css").read_text("utf-8")),
        script=script,
        script_hash=_hash(script),
        made=moment(datetime.datetime.now(datetime.UTC).isoformat()),
    )


def _names(by_label: dict[str, list[Run]]) -> dict[int, str]:
    """What to call each run where seeds are shown one by one."""
    return {
        id(run): label if len(runs) == 1 else f"{label} · {run.folder.resolve().name}"
        for label, runs in by_label.items()
        for run in runs
    }


def _hash(script: str) -> str:
    """How a content policy names the one script that may run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
