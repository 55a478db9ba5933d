"""What a run was: settings, versions, hardware, time by phase, what the corrector used, warnings."""

from __future__ import annotations

from typing import Any

from .. import tiny_llava
from .runs import Run
from .state import duration, moment, seconds_of

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


def run_view(run: Run, name: str) -> dict[str, Any]:
    """The run's card for the page."""
    card = run.card
    config = card.get("config", {})
    seconds = {words: sum(run.series(metric).values()) for metric, words in PHASES.items()}
    total = sum(seconds.values())
    spent = seconds_of(card)
    hardware = card.get("hardware", {})
    return {
        "name": name,
        "folder": str(run.folder),
        "facts": {
            "state": run.state,
            "command": card.get("command"),
            "task": card.get("task"),
            "model": tiny_llava.name_of(card["model"]) if "model" in card else None,
            "parameters": _count(card.get("parameters"), card.get("trainable")),
            "corrector": card.get("corrector") or ("none" if card else None),
            "updates": _progress(run.last_update, card.get("updates")),
            "environment steps": _number(run.last("env_steps")),
            "episodes": _number(run.last("episode/count")),
            "training took": None if spent is None else duration(spent),
            "started": moment(card.get("started")),
            "last written": moment(card.get("updated")),
        },
        "hardware": {key.replace("_", " "): _text(value) for key, value in hardware.items()},
        "versions": card.get("versions", {}),
        "changed": {key: _text(config[key]) for key in card.get("changed", []) if key in config},
        "config": {key: _text(value) for key, value in config.items()},
        "phases": [
            {"name": words, "duration": duration(part), "share": part / total}
            for words, part in seconds.items()
            if part > 0
        ],
        "duration": duration(total),
        "usage": {words: _number(value) for metric, words in USAGE.items() if (value := run.last(metric)) is not None},
        "warnings": card.get("warnings", []),
        "problems": run.problems,
    }


def _progress(done: int, planned: int | None) -> str:
    return f"{done:,} of {planned:,}" if planned else f"{done:,}"


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
