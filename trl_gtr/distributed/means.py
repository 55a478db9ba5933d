"""Exact means over micro-batches and processes, from sums and counts. A mean of means would be weighted wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Means:
    """Named running means and maxima that can be combined over processes."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._maxima: dict[str, float] = {}

    def add(self, name: str, values: torch.Tensor | Iterable[float] | float, weight: float = 1.0) -> None:
        """Add `values`, each with this `weight`."""
        if isinstance(values, torch.Tensor):
            # on the CPU, since Apple's GPUs don't support float64
            total, count = float(values.detach().cpu().double().sum()), values.numel()
        else:
            items = [float(value) for value in values] if isinstance(values, Iterable) else [float(values)]
            total, count = sum(items), len(items)
        entry = self._sums.setdefault(name, [0.0, 0.0])
        entry[0] += weight * total
        entry[1] += weight * count

    def maximum(self, name: str, value: float) -> None:
        self._maxima[name] = max(value, self._maxima.get(name, value))

    def reduce(self, gather: Callable[[Any], list[Any]] = lambda own: [own]) -> dict[str, float]:
        """Means over all processes, without names that have no values.

        Args:
            gather: All-gathers a value from every process.
        """
        states = gather((self._sums, self._maxima))
        total = Means()
        for sums, maxima in states:
            for name, (value, count) in sums.items():
                entry = total._sums.setdefault(name, [0.0, 0.0])
                entry[0] += value
                entry[1] += count
            for name, value in maxima.items():
                total.maximum(name, value)
        means = {name: value / count for name, (value, count) in total._sums.items() if count}
        return means | total._maxima
