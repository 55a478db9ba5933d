"""What a run was: evaluations, settings, versions, hardware, time by phase, what the corrector used, warnings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .runs import Run

PHASES = {
    "time/generate": "generate",
    "time/environment": "environments",
    "time/wait_for_corrections": "wait for corrections",
    "time/score": "score",
    "time/update": "update",
}
USAGE = {
    "corrector/calls": "calls",
    "corrector/tokens": "tokens",
    "corrector/usd_spent": "US dollars",
    "corrector/retries": "retries",
    "corrector/cache_hits": "answers from the cache",
    "corrector/precision": "precision (audit)",
    "corrector/recall": "recall (audit)",
    "buffer/size": "labels in the buffer",
}
_EVALUATION = re.compile(r"(start|end|eval)(?:_(\w+?))?_success")


def run_view(run: Run, name: str) -> dict[str, Any]:
    """The run's card for the page."""
    card = run.card
    config = card.get("config", {})
    seconds = {words: sum(run.series(metric).values()) for metric, words in PHASES.items()}
    total = sum(seconds.values())
    last_update = max((entry["step"] for entry in run.log), default=0)
    hardware = card.get("hardware", {})
    return {
        "name": name,
        "folder": str(run.folder),
        "facts": {
            "task": card.get("task"),
            "model": card.get("model"),
            "parameters": _count(card.get("parameters"), card.get("trainable")),
            "corrector": card.get("corrector") or ("none" if card else None),
            "updates": last_update,
            "environment steps": _number(run.last("env_steps")),
            "episodes": _number(run.last("episode/count")),
            "started": card.get("started"),
            "last written": card.get("updated"),
        },
        "hardware": {key.replace("_", " "): _text(value) for key, value in hardware.items()},
        "versions": card.get("versions", {}),
        "changed": {key: _text(config[key]) for key in card.get("changed", []) if key in config},
        "config": {key: _text(value) for key, value in config.items()},
        "phases": [
            {"name": words, "seconds": spent, "share": spent / total} for words, spent in seconds.items() if spent > 0
        ],
        "seconds": total,
        "usage": {words: _number(value) for metric, words in USAGE.items() if (value := run.last(metric)) is not None},
        "warnings": card.get("warnings", []),
        "problems": run.problems,
    }


def evaluations(groups: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """A row for each label and kind of deals: success before and after training, or at the last evaluation."""
    rows = []
    for label, runs in groups.items():
        found: dict[str, dict[str, list[str]]] = {}
        for run in runs:
            for metric in sorted(run.metrics):
                match = _EVALUATION.fullmatch(metric)
                if match and (value := run.last(metric)) is not None:
                    low, high = run.last(f"{metric}_low"), run.last(f"{metric}_high")
                    words = f"{value:.0%}" + ("" if low is None or high is None else f" [{low:.0%}, {high:.0%}]")
                    moment = "last" if match[1] == "eval" else match[1]
                    found.setdefault(match[2] or "", {}).setdefault(moment, []).append(words)
        rows += [{"label": label, "deals": deals, **moments} for deals, moments in found.items()]
    return rows


def _count(parameters: int | None, trainable: int | None) -> str | None:
    return None if parameters is None else f"{parameters:,}, of them trained {trainable or 0:,}"


def _number(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None or value == "" else str(value)
