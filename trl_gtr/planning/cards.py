"""GPU specifications from the vendors' data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from .estimate import GIB


@dataclass(frozen=True)
class Card:
    """A GPU."""

    memory: int
    """In bytes."""
    bf16_flops: float
    """Per second, for dense matrix products in bfloat16."""
    fp32_flops: float
    """The same in float32, without TF32."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""


def _card(gib: int, bf16_tflops: float, fp32_tflops: float, gb_per_second: float) -> Card:
    return Card(gib * GIB, bf16_tflops * 1e12, fp32_tflops * 1e12, gb_per_second * 1e9)


CARDS = {
    "A100-40": _card(40, 312, 19.5, 1555),
    "A100-80": _card(80, 312, 19.5, 2039),
    "H100": _card(80, 989, 67, 3350),
    "H200": _card(141, 989, 67, 4800),
    "L40S": _card(48, 362, 91.6, 864),
    "L4": _card(24, 121, 30.3, 300),
    "RTX-A6000": _card(48, 155, 38.7, 768),
    "RTX-3090": _card(24, 71, 35.6, 936),
    "RTX-4090": _card(24, 165, 82.6, 1008),
}


def card_named(name: str) -> Card:
    known = {each.lower(): card for each, card in CARDS.items()}
    if name.lower() not in known:
        raise ValueError(f"Unknown card {name!r}: choose one of {', '.join(CARDS)}.")
    return known[name.lower()]
