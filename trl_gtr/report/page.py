"""The page itself: one HTML file with everything in it."""

from __future__ import annotations

import base64
import datetime
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..responses.safe_text import storable
from ..storage.files import written_whole
from .runs import groups, read_runs

MAX_BYTES = 10_000_000
# What curves, style, script and the card may take beside episodes and pictures.
_RESERVE = 2_000_000
TEMPLATES = Path(__file__).parent / "templates"


def write_report(
    folders: Sequence[str | Path], labels: Sequence[str] | None = None, output: str | Path | None = None
) -> Path:
    """Write the report of one run or several, and say where.

    Args:
        folders: The runs' output folders.
        labels: What to call each; runs of one label are seeds, drawn as one line with a band. Without them a folder's
            name, or that of the folder above for `seed0`, `seed1`, …
        output: The file. Without it `report.html` in the first run's folder.
    """
    try:
        from . import card, collapse, curves, episodes
    except ImportError as error:
        raise ImportError(f'A report needs {error.name}: pip install "trl-gtr[report]"') from None

    runs = read_runs(folders, labels)
    by_label = groups(runs)
    path = Path(output) if output is not None else Path(folders[0]) / "report.html"
    names = _names(by_label)

    budget = episodes.Budget(MAX_BYTES - _RESERVE)
    gallery = episodes.Gallery(budget)
    repeated = {label: collapse.repeated_thoughts(seeds, gallery) for label, seeds in by_label.items()}
    shown = episodes.EpisodeData(budget, gallery)
    for i, run in enumerate(runs):
        shown.add(run, names[id(run)], episodes.MOST_EPISODES // len(runs), share=1 / (len(runs) - i))

    if gallery.unreadable and runs[0].files is not None:
        runs[0].files.skip(f"{gallery.unreadable} pictures that are no PNG or WebP or too large")
    charts = curves.charts(curves.CURVES, by_label)
    collapse_charts = curves.charts(curves.COLLAPSE, by_label) + curves.truth_charts(by_label)
    html = _render(
        title=", ".join(by_label),
        task=next((run.card["task"] for run in runs if run.card.get("task")), None),
        labels=list(by_label),
        several_seeds=any(len(seeds) > 1 for seeds in by_label.values()),
        evaluations=card.evaluations(by_label),
        charts=charts,
        collapse_charts=collapse_charts,
        repeated=repeated,
        cards=[card.run_view(run, names[id(run)]) for run in runs],
        data={
            "runs": shown.runs,
            "images": gallery.uris,
            "prompts": shown.prompts,
            "charts": [chart.data for chart in [*charts, *collapse_charts]],
        },
        has_episodes=any(run["episodes"] for run in shown.runs),
    )
    with written_whole(path) as file:
        file.write_text(storable(html), "utf-8")
    return path


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
        made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _names(by_label: dict[str, list[Any]]) -> dict[int, str]:
    """What to call each run where seeds are shown one by one."""
    return {
        id(run): label if len(runs) == 1 else f"{label} · {run.folder.resolve().name}"
        for label, runs in by_label.items()
        for run in runs
    }


def _hash(script: str) -> str:
    """How a content policy names the one script that may run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
