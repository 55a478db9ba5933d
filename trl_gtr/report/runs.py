"""Reading what runs have left on disk, and grouping them by label: runs of one label are seeds of one thing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..responses.safe_text import storable
from .reading import RunFiles, checked_card
from .state import grows, state_of

_SEED_FOLDER = re.compile(r"seed[-_]?\d+")
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


@dataclass
class Run:
    """One output folder."""

    folder: Path
    label: str
    log: list[dict[str, Any]]
    """What `Trainer.log` was given, in order; `step` is the update."""
    card: dict[str, Any] = field(default_factory=dict)
    """`run.json`; empty for a run that has none."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Logged steps, in the order of (environment, episode, step)."""
    files: RunFiles | None = None
    """Whoever finds more that can't be shown says it here."""

    def series(self, name: str) -> dict[int, float]:
        """Values of a metric by update."""
        return {entry["step"]: entry[name] for entry in self.log if isinstance(entry.get(name), int | float)}

    def last(self, name: str) -> float | None:
        values = self.series(name)
        return values[max(values)] if values else None

    @property
    def last_update(self) -> int:
        return max((entry["step"] for entry in self.log), default=0)

    @property
    def state(self) -> str | None:
        """`running`, `finished`, `stopped` or `crashed`; `None` if nothing says it."""
        return state_of(self.card)

    @property
    def problems(self) -> list[str]:
        """What of the run's files was left out."""
        return self.files.all_problems() if self.files is not None else []

    @property
    def metrics(self) -> set[str]:
        return {name for entry in self.log for name in entry}


def read_runs(folders: Sequence[str | Path], labels: Sequence[str] | None = None) -> list[Run]:
    """Runs with their labels. Without `labels` a folder's name, or its parent's if it is one seed of several."""
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise ValueError("A report needs the output folder of at least one run.")
    if labels is not None and len(labels) != len(paths):
        raise ValueError(f"{len(labels)} labels for {len(paths)} runs: give each run one, the same one to seeds.")
    return [_read_run(path, labels[i] if labels else _label(path)) for i, path in enumerate(paths)]


def any_grows(folders: Sequence[str | Path]) -> bool:
    """Whether one of these runs may still write."""
    return any(grows(checked_card(RunFiles(Path(folder)).json(Path(folder) / "run.json"))) for folder in folders)


def groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by label, in the order in which the labels came."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.label, []).append(run)
    return found


def _label(path: Path) -> str:
    path = path.resolve()
    return path.parent.name if _SEED_FOLDER.fullmatch(path.name) else path.name


def _read_run(folder: Path, label: str) -> Run:
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder}.")
    files = RunFiles(folder)
    log, card = _read_log(files), checked_card(files.json(folder / "run.json"))
    rows = sorted(files.rows(folder / "episodes"), key=lambda row: (row["env_index"], row["episode"], row["step"]))
    return Run(folder, storable(label), log, card, rows, files)


def _read_log(files: RunFiles) -> list[dict[str, Any]]:
    folder = files.folder
    metrics = folder / "metrics.jsonl"
    if files.inside(metrics):
        return files.log(metrics)
    checkpoints = sorted(
        (int(name[1]), path)
        for path in folder.glob("checkpoint-*")
        if (name := _CHECKPOINT.fullmatch(path.name)) and (path / "trainer_state.json").is_file()
    )
    for place in [folder, *(path for _, path in reversed(checkpoints))]:
        state = files.json(place / "trainer_state.json")
        if isinstance(state, dict) and "log_history" in state:
            return files.entries(state["log_history"], f"{place.name}/trainer_state.json")
    raise ValueError(f"{folder} is no run's output folder: it has neither metrics.jsonl nor trainer_state.json.")
