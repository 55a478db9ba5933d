"""Files of a run, read as what they are: anybody's. What can't be used is left out and said, and ends nothing.

No link is followed out of the run's folder, and every value is checked before the page is made of it.
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
"""That are said of one run; further ones are counted."""
MAX_UPDATE = 2**40
MAX_VALUE = 1e30
"""Beyond it no chart can be drawn."""

STATES = ("running", "finished", "stopped", "crashed")
_WHERE = ("update", "env_index", "episode", "step")
_TEXTS = (
    "prompt", "thought", "thought_text", "action", "error",
    "substitute", "verdict", "corrected_thought", "corrected_action", "failure", "reason",
)  # fmt: skip
_FLAGS = ("valid", "legal", "success", "ended")
_NUMBERS = ("reward", "value", "advantage", "action_start")
ADDED = ("substitute", "failure")
"""Texts that version 0.1 didn't log; it has the kind of a failure in `reason`."""
COLUMNS = (*_WHERE, *_TEXTS, *_FLAGS, *_NUMBERS, "image", "judgement", "tokens", "token_logprobs")


class RunFiles:
    """Reads the files of one run, and remembers what it had to leave out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []
        self._more = 0

    def skip(self, what: str) -> None:
        """Say what is left out."""
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(one_line(what, 300))
            logger.warning("%s: left out: %s", one_line(self.folder), self.problems[-1])
        else:
            self._more += 1

    def all_problems(self) -> list[str]:
        return self.problems + ([f"{self._more} more of this kind"] if self._more else [])

    def inside(self, path: Path) -> bool:
        """Whether this is a file of the run, and no link to somewhere else."""
        if not path.is_file():
            return False
        if path.resolve().is_relative_to(self.folder.resolve()):
            return True
        self.skip(f"{path.relative_to(self.folder)} is a link out of the run's folder")
        return False

    def json(self, path: Path) -> Any:
        """What is in a JSON file; `None` if there is none that can be read."""
        if not self.inside(path):
            return None
        try:
            return json.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            self.skip(f"{path.relative_to(self.folder)}: {_why(error)}")
            return None

    def log(self, path: Path) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`. One without its end is being written, or was when the power failed."""
        found = []
        lines = path.read_text("utf-8", "replace").split("\n")
        for number, line in enumerate(lines[:-1], start=1):
            try:
                found += self.entries([json.loads(line)], f"{path.name}, line {number}")
            except (ValueError, RecursionError) as error:
                self.skip(f"{path.name}, line {number}: {_why(error)}")
        return found

    def entries(self, entries: Any, where: str) -> list[dict[str, Any]]:
        """Entries of a log: mappings with a `step`, of whose values the numbers are kept."""
        found = []
        for entry in entries if isinstance(entries, list) else [entries]:
            if not isinstance(entry, dict) or not _is_count(entry.get("step")):
                self.skip(f"{where}: no entry of a log, which has a `step`")
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
                    continue  # said already
                if wrong := _wrong_columns(row):
                    self.skip(f"{name}, row {number}: {', '.join(wrong)} is not what a logged step has")
                else:
                    yield row

    def _shard(self, path: Path, name: str) -> list[dict[str, Any] | None]:
        try:
            with path.open("rb") as file:
                table = pq.ParquetFile(file).read()
            for added in {*ADDED} - {*table.column_names}:
                table = table.append_column(added, pa.nulls(len(table), pa.string()))
            missing = set(COLUMNS) - set(table.column_names)
            if missing:
                raise ValueError(f"no column {', '.join(sorted(missing))}")
            table = table.select(list(COLUMNS))
        except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
            self.skip(f"{name}: {_why(error)}")
            return []
        try:
            return table.to_pylist()
        except (ValueError, pa.ArrowException):  # a text that is no UTF-8
            return [self._row(table.slice(i, 1), f"{name}, row {i}") for i in range(len(table))]

    def _row(self, row: pa.Table, name: str) -> dict[str, Any] | None:
        try:
            return row.to_pylist()[0]
        except (ValueError, pa.ArrowException) as error:
            self.skip(f"{name}: {_why(error)}")
            return None


def checked_card(card: Any) -> dict[str, Any]:
    """Of a card (`run.json`) what has the right shape."""
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
    """The columns in which a logged step isn't what it should be."""
    checks = {
        **{name: _is_count(row[name]) for name in _WHERE},
        **{name: isinstance(row[name], str | None) for name in _TEXTS},
        **{name: isinstance(row[name], bool | None) for name in _FLAGS},
        **{name: row[name] is None or is_number(row[name]) for name in _NUMBERS},
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
    """A number that floats can hold; not finite ones are numbers too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return True
    return abs(value) < most


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
