"""The embedded default model: a LLaVA of a million parameters that has learned to read the four card games.

`load()` gives the shipped start, half-trained on purpose; `build()` a fresh random one; `path()` the folder, for
whatever wants a name or path. How it was made, and what it can do: docs/tiny_llava.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def path() -> Path:
    """The folder with the shipped weights, tokenizer and image processor: an ordinary `from_pretrained` folder."""
    return Path(__file__).parent / "weights"


def load(**model_kwargs: Any) -> tuple[Any, Any]:
    """The shipped model, in float32 unless told otherwise, and its processor."""
    from ..models import load_policy

    return load_policy("tiny", **model_kwargs)


def build(seed: int = 0, **sizes: int) -> tuple[Any, Any]:
    """A fresh model and its processor. `sizes` are those of `model.build_model`."""
    from .model import build_model, build_processor

    processor = build_processor()
    return build_model(processor.tokenizer, seed=seed, **sizes), processor


def save(model: Any, processor: Any, folder: str | Path) -> None:
    """Write a `from_pretrained` folder with the weights in half precision; they come back as float32."""
    halves = {name: weight.detach().half() for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(folder, state_dict=halves)  # the LM head is the embedding: kept once
    processor.save_pretrained(folder)
    (Path(folder) / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner only


__all__ = ["build", "load", "path", "save"]
