"""Whether a run is going on, for how long, and how to say times to people."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping
from typing import Any

import psutil


def state_of(card: Mapping[str, Any]) -> str | None:
    """`running`, `finished`, `stopped` or `crashed`; `None` for a card that doesn't say.

    A run that was killed can't say so: its process is looked for, if it was one of this machine.
    """
    state = card.get("state")
    return "crashed" if state == "running" and is_alive(card) is False else state


def grows(card: Mapping[str, Any]) -> bool:
    """Whether more may be written: the run goes on, or its process is there to evaluate what it has trained."""
    alive = is_alive(card)
    return state_of(card) == "running" if alive is None else alive


def is_alive(card: Mapping[str, Any]) -> bool | None:
    """Whether the run's process still exists; `None` if that can't be known here."""
    process = card.get("process", {})
    pid, created = process.get("pid"), process.get("created")
    if process.get("host") != platform.node() or not isinstance(pid, int) or not isinstance(created, int | float):
        return None
    try:
        return abs(psutil.Process(pid).create_time() - created) < 1.0  # otherwise another one has got its number
    except (psutil.Error, ValueError, OverflowError):
        return False


def seconds_of(card: Mapping[str, Any]) -> float | None:
    """Seconds of training, over all resumptions."""
    if "seconds" in card:
        return card["seconds"]
    started, updated = (_parse(card.get(key)) for key in ("started", "updated"))
    return None if started is None or updated is None else (updated - started).total_seconds()


def duration(seconds: float) -> str:
    """`43 s`, `3 min 5 s`, `19 min`, `2 h 5 min`, `3 d 4 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        return _two(whole, 60, "min", 1, "s")
    if whole < 3600:
        return f"{round(whole / 60)} min"
    if whole < 48 * 3600:
        return _two(whole, 3600, "h", 60, "min")
    return _two(whole, 86400, "d", 3600, "h")


def _two(seconds: int, large: int, large_unit: str, small: int, small_unit: str) -> str:
    rest = seconds % large // small
    return f"{seconds // large} {large_unit}" + (f" {rest} {small_unit}" if rest else "")


def moment(text: str | None) -> str | None:
    """An ISO time as `17 Nov 2026, 01:33 UTC`; anything else as it is."""
    time = _parse(text)
    return text if time is None else f"{time.day} {time:%b %Y, %H:%M} UTC"


def _parse(text: Any) -> datetime.datetime | None:
    try:
        time = datetime.datetime.fromisoformat(text)
        return time.astimezone(datetime.UTC) if time.tzinfo else time.replace(tzinfo=datetime.UTC)
    except (TypeError, ValueError, OverflowError):
        return None
