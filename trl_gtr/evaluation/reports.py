"""What an evaluation found: [`EvaluationReport`], its episodes, and shares with confidence intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Rate:
    """A share with its 95 % Wilson interval."""

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
    """Steps of which the task's `judge` knows whether the thought is true; 0 for a task without one."""
    true_steps: int
    extra: Mapping[str, float] = field(default_factory=dict)
    """What the task's own `metrics` says."""
    difficulty: str | None = None
    start: Mapping[str, str] = field(default_factory=dict)
    """What the task's `describe_start` says: the game file and its task type, or the hand."""


@dataclass(frozen=True)
class EvaluationReport:
    """What an agent did in its episodes."""

    task: str
    episodes: tuple[EpisodeResult, ...]
    """Those that were played to their end."""
    planned: int
    """How many there should be."""

    @property
    def complete(self) -> bool:
        """Whether every episode was played. If not, the evaluation was cut short, and episodes that take long are
        missing more often than others."""
        return len(self.episodes) == self.planned

    def __str__(self) -> str:
        if not self.episodes:
            return f"{self.task}: no episode of {self.planned} was played to its end"
        played = f"{len(self.episodes)}" if self.complete else f"{len(self.episodes)} of {self.planned}"
        return f"{self.task}: success {self.success}, return {self.mean_return:+.2f}, {played} episodes"

    @property
    def success(self) -> Rate:
        return Rate(sum(e.success for e in self.episodes), len(self.episodes))

    @property
    def success_solvable(self) -> Rate:
        """Over the deals that can be won at all."""
        solvable = [e for e in self.episodes if e.solvable]
        return Rate(sum(e.success for e in solvable), len(solvable))

    def by_difficulty(self) -> dict[str, Rate]:
        """Success for each difficulty that the task tells apart; empty for a task without the method."""
        names = sorted({e.difficulty for e in self.episodes if e.difficulty is not None})
        groups = {name: [e for e in self.episodes if e.difficulty == name] for name in names}
        return {name: Rate(sum(e.success for e in group), len(group)) for name, group in groups.items()}

    @property
    def mean_return(self) -> float:
        return float(np.mean([e.total_reward for e in self.episodes]))

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Success, return and the rest as numbers; with a prefix, as `{prefix}_success` and so on."""
        if not self.episodes:
            raise ValueError("No episode was played to its end, so there is nothing to measure.")
        steps = sum(e.length for e in self.episodes)
        solvable = self.success_solvable
        judged = sum(e.judged_steps for e in self.episodes)
        metrics = {
            **_with_interval("success", self.success),
            # Left out where no deal could be won: there is no share of nothing.
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
        """The means of the task's own metrics, each over the episodes that have it (success by task type)."""
        names = sorted({name for e in self.episodes for name in e.extra})
        return {name: float(np.mean([e.extra[name] for e in self.episodes if name in e.extra])) for name in names}

    def different_starts(self) -> dict[str, int]:
        """How many different starts were played, by their source ("bundled games"); empty if the task doesn't say."""
        starts = {tuple(sorted(e.start.items())): e.start["source"] for e in self.episodes if e.start}
        return dict(Counter(sorted(starts.values())))

    def to_json(self) -> dict[str, Any]:
        rates = {name: asdict(rate) | {"interval": rate.interval} for name, rate in self.by_difficulty().items()}
        return {
            "task": self.task,
            "complete": self.complete,
            "metrics": self.metrics(),
            "by_difficulty": rates,
            "episodes": [asdict(e) for e in self.episodes],
        }


def _with_interval(name: str, rate: Rate) -> dict[str, float]:
    low, high = rate.interval
    return {name: rate.value, f"{name}_low": low, f"{name}_high": high}
