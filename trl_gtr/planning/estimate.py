"""One line of a plan: a number and where it comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

GIB = 2**30

Unit = Literal["", "bytes", "FLOPs", "hours", "USD", "share"]


@dataclass(frozen=True)
class Estimate:
    """One number in a plan."""

    name: str
    value: float | str
    unit: Unit
    how: str
    """Where the number comes from: counted, traced, assumed, or a formula."""

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "unit": self.unit, "how": self.how}

    def __str__(self) -> str:
        """The value in human-readable form."""
        if isinstance(self.value, str):
            return self.value
        if self.unit == "bytes":
            return readable_bytes(self.value)
        if self.unit == "FLOPs":
            power = min(6, int(math.log10(max(1, self.value)) // 3))
            return f"{self.value / 1000**power:.3g} {' kMGTPE'[power].strip()}FLOP"
        if self.unit == "USD":
            return f"{self.value:,.2f} USD"
        if self.unit == "share":
            return f"{self.value:.1%}"
        if self.unit == "hours":
            return f"{self.value:.1f} h" if self.value >= 1 else f"{60 * self.value:.1f} min"
        return f"{self.value:,.0f}" if self.value == int(self.value) or self.value >= 100 else f"{self.value:,.1f}"


def key(name: str) -> str:
    """A name as a JSON key: `KV cache` → `kv_cache`."""
    return "_".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def readable_bytes(count: float) -> str:
    """For example "14.10 GiB"."""
    if count >= GIB / 10:
        return f"{count / GIB:,.2f} GiB"
    return f"{count / 2**20:,.1f} MiB"
