"""Reads a run's files as untrusted input. Unusable data are skipped and reported, never fatal.

Links out of the run's folder are not followed, and every value is validated before it is used.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..responses.safe_text import one_line

logger = logging.getLogger(__name__)

MOST_PROBLEMS = 20
"""Listed per run; further ones are only counted."""
MAX_UPDATE = 2**40
MAX_VALUE = 1e30
"""Larger values can't be drawn."""

STATES = ("running", "finished", "stopped", "crashed")
_WHERE = ("update", "env_index", "episode", "step")
_TEXTS = (
    "prompt", "thought", "thought_text", "action", "error",
    "substitute", "verdict", "corrected_thought", "corrected_action", "failure", "reason",
)  # fmt: skip
_FLAGS = ("valid", "legal", "success", "ended")
_NUMBERS = ("reward", "value", "advantage", "action_start")
_COUNTS = ("history_turns", "history_images")
ADDED = {**dict.fromkeys(("substitute", "failure"), pa.string()), **dict.fromkeys(_COUNTS, pa.int32())}
"""Columns that earlier versions didn't log; in version 0.1, `reason` is the kind of failure."""
COLUMNS = (*_WHERE, *_TEXTS, *_FLAGS, *_NUMBERS, *_COUNTS, "image", "judgement", "tokens", "token_logprobs")


class RunFiles:
    """Reads the files of one run and records what was skipped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []
        self._more = 0

    def skip(self, what: str) -> None:
        """Report something that was skipped."""
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(one_line(what, 300))
            logger.warning("%s: skipped: %s", one_line(self.folder), self.problems[-1])
        else:
            self._more += 1

    def all_problems(self) -> list[str]:
        return self.problems + ([f"{self._more} more"] if self._more else [])

    def inside(self, path: Path) -> bool:
        """Whether this is a file inside the run's folder, not a link to elsewhere."""
        if not path.is_file():
            return False
        if path.resolve().is_relative_to(self.folder.resolve()):
            return True
        self.skip(f"{path.relative_to(self.folder)} is a link out of the run's folder")
        return False

    def json(self, path: Path) -> Any:
        """The contents of a JSON file; `None` if it is missing or unreadable."""
        if not self.inside(path):
            return None
        try:
            return json.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            self.skip(f"{path.relative_to(self.folder)}: {_why(error)}")
            return None

    def log(self, path: Path) -> list[dict[str, Any]]:
        """The entries of `metrics.jsonl`. An incomplete last line is being written, or was cut off by a crash."""
        found = []
        lines = path.read_text("utf-8", "replace").split("\n")
        for number, line in enumerate(lines[:-1], start=1):
            try:
                found += self.entries([json.loads(line)], f"{path.name}, line {number}")
            except (ValueError, RecursionError) as error:
                self.skip(f"{path.name}, line {number}: {_why(error)}")
        return found

    def entries(self, entries: Any, where: str) -> list[dict[str, Any]]:
        """Valid log entries: mappings with a `step`, reduced to their numeric values."""
        found = []
        for entry in entries if isinstance(entries, list) else [entries]:
            if not isinstance(entry, dict) or not _is_count(entry.get("step")):
                self.skip(f"{where}: not a log entry with a `step`")
                continue
            numbers = {name: value for name, value in entry.items() if is_number(value, MAX_VALUE)}
            found.append(numbers | {"step": entry["step"]})
        return found

    def rows(self, folder: Path) -> Iterator[dict[str, Any]]:
        """Logged steps."""
        for shard in sorted(folder.glob("update-*.parquet")):
            if not self.inside(shard):
                continue
            name = str(shard.relative_to(self.folder))
            for number, row in enumerate(self._shard(shard, name)):
                if row is None:
                    continue  # already reported
                if wrong := _wrong_columns(row):
                    self.skip(f"{name}, row {number}: invalid {', '.join(wrong)}")
                else:
                    yield row

    def _shard(self, path: Path, name: str) -> list[dict[str, Any] | None]:
        try:
            with path.open("rb") as file:
                table = pq.ParquetFile(file).read()
            for added in ADDED.keys() - {*table.column_names}:
                table = table.append_column(added, pa.nulls(len(table), ADDED[added]))
            missing = set(COLUMNS) - set(table.column_names)
            if missing:
                raise ValueError(f"no column {', '.join(sorted(missing))}")
            table = table.select(list(COLUMNS))
        except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
            self.skip(f"{name}: {_why(error)}")
            return []
        try:
            return table.to_pylist()
        except (ValueError, pa.ArrowException):  # text that isn't UTF-8
            return [self._row(table.slice(i, 1), f"{name}, row {i}") for i in range(len(table))]

    def _row(self, row: pa.Table, name: str) -> dict[str, Any] | None:
        try:
            return row.to_pylist()[0]
        except (ValueError, pa.ArrowException) as error:
            self.skip(f"{name}: {_why(error)}")
            return None


def checked_card(card: Any) -> dict[str, Any]:
    """The valid parts of a card (`run.json`)."""
    if not isinstance(card, dict):
        return {}
    shapes: Mapping[str, type] = {
        **dict.fromkeys(("config", "versions", "hardware", "process"), dict),
        **dict.fromkeys(("changed", "warnings"), list),
        **dict.fromkeys(("task", "model", "corrector", "started", "updated", "command", "error"), str),
        **dict.fromkeys(("parameters", "trainable", "updates"), int),
    }
    kept = {name: card[name] for name, shape in shapes.items() if isinstance(card.get(name), shape)}
    if card.get("state") in STATES:
        kept["state"] = card["state"]
    if is_number(card.get("seconds"), MAX_VALUE) and card["seconds"] >= 0:
        kept["seconds"] = float(card["seconds"])
    kept["changed"] = [name for name in kept.get("changed", []) if isinstance(name, str)]
    kept["warnings"] = [
        {"message": str(entry["message"]), "update": entry["update"], "count": entry["count"]}
        for entry in kept.get("warnings", [])
        if isinstance(entry, dict) and "message" in entry and all(_is_count(entry.get(k)) for k in ("update", "count"))
    ]
    return kept


def _wrong_columns(row: Mapping[str, Any]) -> list[str]:
    """The columns of a logged step with invalid values."""
    checks = {
        **{name: _is_count(row[name]) for name in _WHERE},
        **{name: isinstance(row[name], str | None) for name in _TEXTS},
        **{name: isinstance(row[name], bool | None) for name in _FLAGS},
        **{name: row[name] is None or is_number(row[name]) for name in _NUMBERS},
        **{name: row[name] is None or _is_count(row[name]) for name in _COUNTS},
        "image": row["image"] is None
        or (isinstance(row["image"], dict) and isinstance(row["image"].get("bytes"), bytes | None)),
        "judgement": _all(row["judgement"], lambda e: isinstance(e, dict) and isinstance(e.get("part"), str)
                          and isinstance(e.get("right"), bool)),
        "tokens": _all(row["tokens"], lambda e: isinstance(e, str)),
        "token_logprobs": _all(row["token_logprobs"], lambda e: e is None or is_number(e)),
    }  # fmt: skip
    return [name for name, right in checks.items() if not right]


def _all(values: Any, fits: Any) -> bool:
    return values is None or (isinstance(values, list) and all(map(fits, values)))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_UPDATE


def is_number(value: Any, most: float = sys.float_info.max) -> bool:
    """Whether this is a number in float range; non-finite ones count."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return True
    return abs(value) < most


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
