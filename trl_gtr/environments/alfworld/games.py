"""Find games: bundled with this library, a split of ALFWorld's data, or the user's files."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .generator import SPLITS, bundled_games, make_game
from .goals import TASK_TYPES

DEFAULT_DATA = "~/.cache/alfworld"
"""Where `alfworld-download` puts its data unless `ALFWORLD_DATA` says otherwise."""
FOLDER = "json_2.1.1"

_SOLVABLE = re.compile(rb'"solvable":\s*(true|false)')


@dataclass(frozen=True)
class Game:
    """A reference to a game by name; `load` reads it."""

    name: str
    """`"bundled:<task type>/<seed>"`, or the path of a `game.tw-pddl` file."""
    task_type: str

    @property
    def bundled(self) -> bool:
        return self.name.startswith("bundled:")

    def load(self) -> dict[str, Any]:
        if self.bundled:
            task_type, seed = self.name.removeprefix("bundled:").split("/")
            return make_game(task_type, int(seed))
        with open(self.name, encoding="utf-8") as file:
            return json.load(file)


def find_games(
    games: str | Sequence[str | os.PathLike[str]] = "auto",
    split: str = "train",
    task_types: Sequence[str] | None = None,
    backend: str = "text",
) -> list[Game]:
    """The games to play, in a fixed order.

    Args:
        games: `"bundled"`; `"data"`: the split of ALFWorld's data; `"auto"`: the data if available, else the bundled
            games; or a list of `game.tw-pddl` files, folders containing them, or names of bundled games.
        split: `"train"`, `"valid_seen"` or `"valid_unseen"`.
        task_types: Only these of the six types.
        backend: THOR only plays ALFWorld's data.
    """
    if backend == "thor" and games in ("auto", "bundled"):
        if games == "bundled":
            raise ValueError("The bundled games don't exist in THOR: use games='data' or backend='text'.")
        games = "data"
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}.")
    unknown = sorted(set(task_types or ()) - set(TASK_TYPES))
    if unknown:
        raise ValueError(f"task_types: there is no {', '.join(unknown)}; the six are {', '.join(TASK_TYPES)}.")
    if isinstance(games, str):
        if games not in ("auto", "bundled", "data"):
            raise ValueError(f"games must be 'auto', 'bundled', 'data' or a list of files, not {games!r}.")
        source = ("data" if data_folder(split) else "bundled") if games == "auto" else games
        found = _bundled(split) if source == "bundled" else _from_data(split)
    else:
        found = [game for name in games for game in _named(name)]
    found = [game for game in found if task_types is None or game.task_type in task_types]
    if not found:
        raise ValueError(
            f"No games found for games={games!r}, split={split!r}, task_types={task_types}. "
            "Remove a filter, or use games='bundled'."
        )
    return found


def game_chances(games: Sequence[Game], weights: Mapping[str, float]) -> list[float]:
    """The probability of drawing each game, given task type weights; games of the same type are equally likely.

    Types not listed have weight 1; types without games are ignored.
    """
    unknown = sorted(set(weights) - set(TASK_TYPES))
    if unknown:
        raise ValueError(f"task_type_weights: there is no {', '.join(unknown)}; the six are {', '.join(TASK_TYPES)}.")
    if not all(0 <= weight < math.inf for weight in weights.values()):
        raise ValueError(f"task_type_weights must be non-negative numbers, not {dict(weights)}.")
    counts = Counter(game.task_type for game in games)
    total = sum(weights.get(task_type, 1.0) for task_type in counts)
    if not total:
        raise ValueError(f"task_type_weights exclude every available type: {', '.join(sorted(counts))}.")
    return [weights.get(game.task_type, 1.0) / counts[game.task_type] / total for game in games]


def data_folder(split: str) -> Path | None:
    """The split's folder in ALFWorld's data, or `None` if there is none.

    `ALFWORLD_DATA` is read at call time, not at import. If the user has set it, it must point to the data.
    """
    setting = os.environ.get("ALFWORLD_DATA") or DEFAULT_DATA
    root = Path(os.path.expandvars(setting)).expanduser()
    folder = root / FOLDER / split
    if folder.is_dir():
        return folder
    # Importing `alfworld` sets the variable to its default; the user didn't choose that.
    if root.resolve() != Path(DEFAULT_DATA).expanduser().resolve():
        raise ValueError(
            f"ALFWORLD_DATA is {setting!r}, which has no folder {FOLDER}/{split}. Set it to the folder filled by "
            f"`alfworld-download` (it contains {FOLDER}/), or unset it to play the bundled games."
        )
    return None


def _bundled(split: str) -> list[Game]:
    return [Game(f"bundled:{task_type}/{seed}", task_type) for task_type, seed in bundled_games(split)]


def _from_data(split: str) -> list[Game]:
    folder = data_folder(split)
    if folder is None:
        raise ValueError(
            f"games='data' needs ALFWorld's games: run `alfworld-download`, or set ALFWORLD_DATA to the folder that "
            f"holds {FOLDER}/. games='bundled' needs no download."
        )
    paths = sorted(folder.glob("*/*/game.tw-pddl"))
    # As in alfworld: no movable receptacles, no slicing, nothing known to be unsolvable.
    wanted = [path for path in paths if "movable" not in str(path) and "Sliced" not in str(path)]
    return [_file(path) for path in wanted if _solvable(path)]


def _named(name: str | os.PathLike[str]) -> list[Game]:
    """The games for one entry of a user's list."""
    text = os.fspath(name)
    if text.startswith("bundled:"):
        task_type, _, seed = text.removeprefix("bundled:").partition("/")
        if task_type not in TASK_TYPES or not seed.isdecimal():
            raise ValueError(f"games: {text!r} should be bundled:<task type>/<seed>, of {', '.join(TASK_TYPES)}.")
        return [Game(text, task_type)]
    path = Path(text).expanduser()
    files = sorted(path.rglob("game.tw-pddl")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ValueError(f"games: there is no game at {text!r}; list game.tw-pddl files or folders containing them.")
    return [_file(file) for file in files]


def _file(path: Path) -> Game:
    """Read the task type from the name of the grandparent folder, as in ALFRED, else from the game's goal."""
    task_type = path.parent.parent.name.split("-")[0]
    if task_type not in TASK_TYPES:
        from .goals import read_goal

        with path.open(encoding="utf-8") as file:
            task_type = read_goal(json.load(file)["pddl_problem"]).task_type
    return Game(str(path.resolve()), task_type)


def _solvable(path: Path) -> bool:
    """Whether the game is marked solvable. The mark is near the end of the file; reading whole files takes minutes."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 4096))
        tail = file.read()
        marks = _SOLVABLE.findall(tail)
        if not marks:
            file.seek(0)
            marks = _SOLVABLE.findall(file.read())
    return bool(marks) and marks[-1] == b"true"
