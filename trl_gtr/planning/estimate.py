"""One line of a plan: a number, and how it was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

GIB = 2**30

Unit = Literal["", "bytes", "tokens", "FLOPs", "hours", "USD", "share"]


@dataclass(frozen=True)
class Estimate:
    """A number of a plan."""

    name: str
    value: float | str
    unit: Unit
    how: str
    """Where the number comes from: counted, traced, assumed, or a formula."""

    @property
    def key(self) -> str:
        """The name as programs write it."""
        return "".join(c if c.isalnum() else "_" for c in self.name.lower()).strip("_")

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "unit": self.unit, "how": self.how}

    def __str__(self) -> str:
        """The value for people."""
        if isinstance(self.value, str):
            return self.value
        if self.unit == "bytes":
            return readable_bytes(self.value)
        if self.unit == "FLOPs":
            return f"{self.value:.3g} FLOPs"
        if self.unit == "USD":
            return f"{self.value:,.2f} USD"
        if self.unit == "share":
            return f"{self.value:.1%}"
        if self.unit == "hours":
            return f"{self.value:.1f} h" if self.value >= 1 else f"{60 * self.value:.1f} min"
        number = f"{self.value:,.0f}" if self.value == int(self.value) else f"{self.value:,.1f}"
        return f"{number} {self.unit}".strip()


def readable_bytes(count: float) -> str:
    """As in "14.1 GiB"."""
    if count >= GIB / 10:
        return f"{count / GIB:,.2f} GiB"
    return f"{count / 2**20:,.1f} MiB"
