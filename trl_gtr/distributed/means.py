"""Sums and counts → exact means over micro-batches and processes. A mean of means would weigh them wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Means:
    """Named running means, and maxima, that can be added up over processes."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._maxima: dict[str, float] = {}

    def add(self, name: str, values: torch.Tensor | Iterable[float] | float, weight: float = 1.0) -> None:
        """Count each of `values`, once or by a `weight`."""
        if isinstance(values, torch.Tensor):
            # on the CPU, for Apple's GPUs know no float64
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
        """The means over all processes; a name that counted nothing anywhere is left out.

        Args:
            gather: Gives every process's value for one's own.
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
