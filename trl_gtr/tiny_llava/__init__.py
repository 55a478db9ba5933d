"""The embedded models, LLaVAs of a million parameters: `tiny` for the four card games, `tiny-alfworld` for ALFWorld.

`load_policy("tiny")` gives a shipped start, half-trained on purpose; `build()` a fresh random one; `path()` the folder
of the weights. How they were made, and what they can do: docs/tiny_llava.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def _card_pieces() -> list[str]:
    from .vocabulary import pieces

    return pieces()


def _alfworld_pieces() -> list[str]:
    from .alfworld_vocabulary import pieces

    return pieces()


@dataclass(frozen=True)
class Variant:
    """What makes one embedded model differ from the other."""

    folder: str
    pieces: Callable[[], list[str]]
    """The texts that are one token each."""
    image_size: int
    patch_size: int


VARIANTS = {
    # A card of Points24 is a quarter of the picture wide: one patch for its rank, one for its suit.
    "tiny": Variant("weights", _card_pieces, image_size=96, patch_size=24),
    "tiny-alfworld": Variant("alfworld_weights", _alfworld_pieces, image_size=120, patch_size=24),
}


def path(name: str = "tiny") -> Path:
    """The folder with shipped weights, tokenizer and image processor: an ordinary `from_pretrained` folder."""
    return Path(__file__).parent / VARIANTS[name].folder


def name_of(model: str) -> str:
    """`"tiny"` for the folder of the shipped model, wherever the package lies; any other name or path as it is."""
    shipped = {f"tiny_llava/{variant.folder}": name for name, variant in VARIANTS.items()}
    return shipped.get("/".join(Path(model).parts[-2:]), model)


def figures() -> list[dict[str, Any]]:
    """What the weights of "tiny" were measured to do, a row per game and mode.

    `examples/benchmarks/tiny_start.py` writes the file.
    """
    return json.loads((Path(__file__).parent / "figures.json").read_text("utf-8"))


def build(seed: int = 0, name: str = "tiny", **sizes: int) -> tuple[Any, Any]:
    """A fresh model and its processor. `sizes` are those of `model.build_model`."""
    from .model import build_model, build_processor

    variant = VARIANTS[name]
    processor = build_processor(variant.pieces(), variant.image_size, variant.patch_size)
    return build_model(processor, seed=seed, **sizes), processor


def save(model: Any, processor: Any, folder: str | Path) -> None:
    """Write a `from_pretrained` folder with the weights in half precision; they come back as float32."""
    halves = {name: weight.detach().half() for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(folder, state_dict=halves)  # the LM head is the embedding: kept once
    processor.save_pretrained(folder)
    (Path(folder) / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner only


__all__ = ["VARIANTS", "build", "figures", "name_of", "path", "save"]
