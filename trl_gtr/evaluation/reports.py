"""Evaluation results: [`EvaluationReport`], its episodes, and rates with confidence intervals."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..storage.files import atomic_write

EVALUATIONS_FILE = "evaluations.json"


@dataclass(frozen=True)
class Rate:
    """A rate with its 95 % Wilson interval."""

    hits: int
    count: int

    @property
    def value(self) -> float:
        return self.hits / self.count if self.count else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        if not self.count:
            return math.nan, math.nan
        z, n, p = 1.959963984540054, self.count, self.value
        center = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, center - half), min(1.0, center + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.3f} [{low:.3f}, {high:.3f}]"


@dataclass(frozen=True)
class EpisodeResult:
    """One played episode."""

    index: int
    success: bool
    solvable: bool
    total_reward: float
    length: int
    valid_steps: int
    legal_steps: int
    judged_steps: int
    """Steps whose thought the task's `judge` can verify; 0 for a task without one."""
    true_steps: int
    extra: Mapping[str, float] = field(default_factory=dict)
    """The task's own `metrics`."""
    difficulty: str | None = None
    start: Mapping[str, str] = field(default_factory=dict)
    """From the task's `describe_start`: the game file and its task type, or the hand."""


@dataclass(frozen=True)
class EvaluationReport:
    """The results of an agent's episodes."""

    task: str
    episodes: tuple[EpisodeResult, ...]
    """The finished episodes."""
    planned: int
    """How many episodes were planned."""

    @property
    def complete(self) -> bool:
        """Whether all episodes were finished. If not, the evaluation was cut short and long episodes are
        underrepresented."""
        return len(self.episodes) == self.planned

    def __str__(self) -> str:
        if not self.episodes:
            return f"{self.task}: none of {self.planned} episodes finished"
        played = f"{len(self.episodes)}" if self.complete else f"{len(self.episodes)} of {self.planned}"
        return f"{self.task}: success {self.success}, return {self.mean_return:+.2f}, {played} episodes"

    @property
    def success(self) -> Rate:
        return Rate(sum(e.success for e in self.episodes), len(self.episodes))

    @property
    def success_solvable(self) -> Rate:
        """Success over the deals that can be won."""
        solvable = [e for e in self.episodes if e.solvable]
        return Rate(sum(e.success for e in solvable), len(solvable))

    def by_difficulty(self) -> dict[str, Rate]:
        """Success by difficulty; empty if the task doesn't define difficulties."""
        names = sorted({e.difficulty for e in self.episodes if e.difficulty is not None})
        groups = {name: [e for e in self.episodes if e.difficulty == name] for name in names}
        return {name: Rate(sum(e.success for e in group), len(group)) for name, group in groups.items()}

    @property
    def mean_return(self) -> float:
        return float(np.mean([e.total_reward for e in self.episodes]))

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Success, return and other metrics; with a prefix, as `{prefix}_success` and so on."""
        if not self.episodes:
            raise ValueError("No episode was finished, so there is nothing to measure.")
        steps = sum(e.length for e in self.episodes)
        solvable = self.success_solvable
        judged = sum(e.judged_steps for e in self.episodes)
        metrics = {
            **_with_interval("success", self.success),
            # Left out if no deal could be won.
            **(_with_interval("success_solvable", solvable) if solvable.count else {}),
            "return": self.mean_return,
            "length": steps / len(self.episodes),
            "valid": sum(e.valid_steps for e in self.episodes) / steps,
            "legal": sum(e.legal_steps for e in self.episodes) / steps,
            **({"true_thoughts": sum(e.true_steps for e in self.episodes) / judged} if judged else {}),
            "episodes": float(len(self.episodes)),
            **self.extra(),
        }
        return {f"{prefix}_{name}": value for name, value in metrics.items()} if prefix else metrics

    def extra(self) -> dict[str, float]:
        """Means of the task's own metrics, each over the episodes that have it (e.g. success by task type)."""
        names = sorted({name for e in self.episodes for name in e.extra})
        return {name: float(np.mean([e.extra[name] for e in self.episodes if name in e.extra])) for name in names}

    def different_starts(self) -> dict[str, int]:
        """Number of different starts played, by source ("bundled games"); empty if the task doesn't say."""
        starts = {tuple(sorted(e.start.items())): e.start["source"] for e in self.episodes if e.start}
        return dict(Counter(sorted(starts.values())))

    def to_json(self) -> dict[str, Any]:
        rates = {name: asdict(rate) | {"interval": rate.interval} for name, rate in self.by_difficulty().items()}
        return {
            "task": self.task,
            "complete": self.complete,
            "planned": self.planned,
            "metrics": self.metrics(),
            "by_difficulty": rates,
            "episodes": [asdict(e) for e in self.episodes],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> EvaluationReport:
        return cls(values["task"], tuple(EpisodeResult(**each) for each in values["episodes"]), values["planned"])


def write_evaluations(folder: Path, reports: Mapping[str, EvaluationReport]) -> None:
    """Write `evaluations.json`: every episode of a run's evaluations, by the evaluation's name."""
    with atomic_write(folder / EVALUATIONS_FILE) as file:
        written = {name: report.to_json() for name, report in reports.items() if report.episodes}
        file.write_text(json.dumps(written), "utf-8")


def read_evaluations(folder: Path) -> dict[str, EvaluationReport]:
    """The evaluations written to a run's folder; empty if there are none."""
    file = folder / EVALUATIONS_FILE
    if not file.is_file():
        return {}
    return {name: EvaluationReport.from_json(each) for name, each in json.loads(file.read_text("utf-8")).items()}


def _with_interval(name: str, rate: Rate) -> dict[str, float]:
    low, high = rate.interval
    return {name: rate.value, f"{name}_low": low, f"{name}_high": high}
