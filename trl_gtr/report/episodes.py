"""Sampled episodes for the page as plain JSON, with each distinct picture and prompt stored once."""

from __future__ import annotations

import base64
import difflib
import hashlib
import io
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from jinja2.utils import htmlsafe_json_dumps
from PIL import Image

from .reading import is_number
from .runs import Run

logger = logging.getLogger(__name__)

MOST_EPISODES = 240
MOST_CHARACTERS = 4000
MOST_TOKENS = 600
PICTURE_SIZE = 300
FORMATS = ("PNG", "WEBP")
"""The formats runs write; no other Pillow decoder may touch the bytes."""
MOST_PIXELS = 1 << 24
_WORD = re.compile(r"\s+|\w+|[^\w\s]")

Row = dict[str, Any]


class Budget:
    """Bytes left for the page to grow."""

    def __init__(self, size: int) -> None:
        self.left = size

    def take(self, size: int) -> bool:
        """Reserve `size` bytes if there is room, and return whether there was."""
        if size > self.left:
            return False
        self.left -= size
        return True


class Gallery:
    """Distinct pictures as data URIs, with their indices."""

    def __init__(self, budget: Budget) -> None:
        self.uris: list[str] = []
        self._number: dict[bytes, int | None] = {}
        self._budget = budget
        self.unreadable = 0
        """Pictures that could not be shown."""

    def add(self, picture: Mapping[str, Any] | None) -> int | None:
        """The picture's index; `None` if there is no picture or no room for it."""
        png = picture["bytes"] if picture else None
        if png is None:
            return None
        if png not in self._number:
            uri = self._data_uri(png)
            self._number[png] = len(self.uris) if uri and self._budget.take(len(uri)) else None
            if uri and self._number[png] is not None:
                self.uris.append(uri)
        return self._number[png]

    def _data_uri(self, picture: bytes) -> str | None:
        try:
            return _data_uri(picture)
        except Exception as error:  # Pillow raises many kinds of errors for damaged images
            self.unreadable += 1
            logger.debug("a picture can't be read (%s)", type(error).__name__)
            return None


def _data_uri(picture: bytes) -> str:
    opened = Image.open(io.BytesIO(picture), formats=FORMATS)
    if opened.width * opened.height > MOST_PIXELS:
        raise ValueError(f"a picture of {opened.width} × {opened.height} pixels")
    image = opened.convert("RGB")
    image.thumbnail((PICTURE_SIZE, PICTURE_SIZE), Image.Resampling.LANCZOS)
    webp = io.BytesIO()
    image.save(webp, "WEBP", quality=70, method=2)
    return "data:image/webp;base64," + base64.b64encode(webp.getvalue()).decode()


def episodes_of(run: Run) -> list[list[Row]]:
    """The run's logged steps by episode."""
    episodes: dict[tuple[int, int], list[Row]] = {}
    for row in run.rows:
        episodes.setdefault((row["env_index"], row["episode"]), []).append(row)
    return list(episodes.values())


def start_of(episode: Sequence[Row]) -> bytes | None:
    """A digest of the first picture and prompt: episodes with the same start can be compared across runs.

    `None` if the first step wasn't logged.
    """
    first = episode[0]
    return None if first["step"] else seen(first)


def seen(row: Row) -> bytes:
    """A digest of what the agent saw: picture and prompt."""
    digest = hashlib.blake2b((row["prompt"] or "").encode(), digest_size=16)
    digest.update((row["image"] or {}).get("bytes") or b"")
    return digest.digest()


def shared_starts(runs: Sequence[Run]) -> set[bytes]:
    """Starts that every run has played; empty for a single run."""
    starts = [{start for episode in episodes_of(run) if (start := start_of(episode))} for run in runs]
    return set.intersection(*starts) if len(starts) > 1 else set()


def spread(episodes: Sequence[list[Row]], most: int, shared: Set[bytes] = frozenset()) -> Iterator[list[Row]]:
    """At most `most` episodes, most important first: one from each update, then a second from each, …

    Within an update, episodes from `shared` starts come first, then complete ones. If there are more updates than
    `most`, they are thinned out evenly.
    """
    by_update: dict[int, list[list[Row]]] = {}
    for episode in episodes:
        by_update.setdefault(episode[0]["update"], []).append(episode)
    for waiting in by_update.values():
        waiting.sort(
            key=lambda episode: (start_of(episode) not in shared, episode[0]["step"] > 0 or not episode[-1]["ended"]),
            reverse=True,
        )
    updates = sorted(by_update)
    if len(updates) > most:
        updates = [updates[round(i * (len(updates) - 1) / max(most - 1, 1))] for i in range(most)]
    # From both ends to the middle, so the first and last updates are kept if room runs out.
    updates = [u for pair in zip(updates, reversed(updates), strict=True) for u in pair]
    updates = list(dict.fromkeys(updates))
    given = 0
    while given < most and any(by_update[update] for update in updates):
        for update in updates:
            if by_update[update] and given < most:
                given += 1
                yield by_update[update].pop()


class EpisodeData:
    """Collects the data for the page's episode viewer.

    Args:
        shared: Starts that every run has played.
    """

    def __init__(self, budget: Budget, gallery: Gallery, shared: Set[bytes] = frozenset()) -> None:
        self.budget, self.gallery, self.shared = budget, gallery, shared
        self._start_number: dict[bytes, int] = {}
        self.prompts: list[str] = []
        self._prompt_number: dict[str, int] = {}
        self.runs: list[dict[str, Any]] = []

    def add(self, run: Run, name: str, most: int, share: float) -> None:
        """Add as many of the run's episodes as fit into `share` of the remaining room."""
        stop_at = self.budget.left * (1 - share)
        chosen = []
        for episode in spread(episodes_of(run), most, self.shared):
            view = self._episode(episode)
            if self.budget.left < stop_at or not self.budget.take(len(htmlsafe_json_dumps(view))):
                break
            chosen.append(view)
        chosen.sort(key=lambda view: (view["update"], view["env"], view["episode"]))
        coef = run.card.get("config", {}).get("thought_prob_coef")
        self.runs.append(
            {
                "name": name,
                "episodes": chosen,
                "logged": len(episodes_of(run)),
                "thoughtCoef": coef if is_number(coef) and math.isfinite(coef) else 1.0,
                "scale": {key: _largest(run.rows, key) for key in ("reward", "value", "advantage")},
            }
        )

    def _episode(self, rows: list[Row]) -> dict[str, Any]:
        known = [row["success"] for row in rows if row["success"] is not None]
        start = start_of(rows)
        return {
            "update": rows[0]["update"],
            "env": rows[0]["env_index"],
            "episode": rows[0]["episode"],
            "success": known[-1] if known else None,
            "ended": rows[-1]["ended"],
            "start": None if start is None else self._start_number.setdefault(start, len(self._start_number)),
            "steps": [self._step(row) | self._history(row, rows[:place]) for place, row in enumerate(rows)],
        }

    def _history(self, row: Row, before: Sequence[Row]) -> dict[str, Any]:
        """What the agent saw again: the number of earlier turns, and the logged pictures of those shown with one."""
        turns, images = row["history_turns"] or 0, row["history_images"] or 0
        shown = [self.gallery.add(each["image"]) for each in before if 0 < row["step"] - each["step"] <= images]
        return {"turns": turns, "earlier": [number for number in shown if number is not None]} if turns else {}

    def _step(self, row: Row) -> dict[str, Any]:
        thought, tokens = _readable(row["thought"]), row["tokens"] or []
        view = {
            "n": row["step"],
            "update": row["update"],
            "image": self.gallery.add(row["image"]),
            "prompt": self._prompt(row["prompt"] or ""),
            "thought": _cut(thought),
            "action": _cut(row["action"] or "", 300),
            "valid": row["valid"],
            "legal": row["legal"],
            "substitute": _cut(row["substitute"] or "", 300) or None,
            "error": row["error"],
            "verdict": row["verdict"],
            "reason": _cut(": ".join(filter(None, (row["failure"], row["reason"]))), 500) or None,
            "judged": [[entry["part"], entry["right"]] for entry in row["judgement"] or []],
            "tokens": [_cut(token, 200) for token in tokens[:MOST_TOKENS]],
            "moreTokens": max(0, len(tokens) - MOST_TOKENS),
            "logprobs": [_number(p, 3) for p in (row["token_logprobs"] or [])[:MOST_TOKENS]],
            "actionStart": row["action_start"] or 0,
            **{key: _number(row[key], 4) for key in ("reward", "value", "advantage")},
        }
        if row["corrected_thought"] is not None:
            view["diff"] = word_diff(_cut(thought), _cut(_readable(row["corrected_thought"])))
            view["correctAction"] = row["corrected_action"]
        return view

    def _prompt(self, prompt: str) -> int:
        prompt = _cut(prompt)
        if prompt not in self._prompt_number:
            self._prompt_number[prompt] = len(self.prompts)
            self.prompts.append(prompt)
            self.budget.left -= len(htmlsafe_json_dumps(prompt))
        return self._prompt_number[prompt]


def word_diff(before: str, after: str) -> list[list[str]]:
    """Pieces of both texts in order: `["=", …]` in both, `["-", …]` only before, `["+", …]` only after.

    A space between two changed words is part of the change, since phrases are easier to read than fragments.
    """
    a, b = _WORD.findall(before), _WORD.findall(after)
    pieces: list[list[str]] = []
    removed = added = ""
    for tag, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        old, new = "".join(a[i:j]), "".join(b[k:m])
        if tag != "equal" or ((removed or added) and old.isspace() and j < len(a)):
            removed, added = removed + old, added + new
            continue
        pieces += [piece for piece in (["-", removed], ["+", added], ["=", old]) if piece[1]]
        removed = added = ""
    return pieces + [piece for piece in (["-", removed], ["+", added]) if piece[1]]


def _readable(segment: str | None) -> str:
    """A thought segment with one line per part; unchanged if it doesn't match the format."""
    segment = segment or ""
    try:
        parts = json.loads(segment.rstrip().rstrip(",") + "}")
    except (ValueError, RecursionError):
        return segment
    if not isinstance(parts, dict):
        return segment
    return "\n".join(f"{key}: {_plain(value)}" for key, value in parts.items())


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _cut(text: str, most: int = MOST_CHARACTERS) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)"


def _number(value: float | None, digits: int) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, digits)


def _largest(rows: Sequence[Row], key: str) -> float:
    return max((abs(row[key]) for row in rows if row[key] is not None and math.isfinite(row[key])), default=0.0)
