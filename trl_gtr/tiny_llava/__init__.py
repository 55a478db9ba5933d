"""The embedded models, LLaVAs with a million parameters: `tiny` for the four card games, `tiny-alfworld` for ALFWorld,
`tiny-grids` for FrozenLake, `tiny-minigrid` for MiniGrid's and BabyAI's levels.

`load_policy("tiny")` loads the shipped weights, deliberately half-trained; `build()` creates a randomly initialised
model; `path()` is the folder with the weights. How they were made and what they can do: docs/tiny_llava.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CARD_GAMES = ("points24", "ezpoints", "number_line", "blackjack")


def _card_pieces() -> list[str]:
    from .vocabulary import pieces

    return pieces()


def _alfworld_pieces() -> list[str]:
    from .alfworld_vocabulary import pieces

    return pieces()


def _grid_pieces() -> list[str]:
    from .grids_vocabulary import pieces

    return pieces()


def _minigrid_pieces() -> list[str]:
    from .minigrid_vocabulary import pieces

    return pieces()


@dataclass(frozen=True)
class Variant:
    """What differs between the embedded models."""

    folder: str
    tasks: tuple[str, ...]
    """The tasks it was trained on."""
    pieces: Callable[[], list[str]]
    """Texts that are single tokens."""
    image_size: int
    patch_size: int
    options: Mapping[str, str] = field(default_factory=dict)
    """The options of its task that it was trained with, where others make another game of it."""


VARIANTS = {
    # A card of Points24 is a quarter of the picture wide: one patch for its rank, one for its suit.
    "tiny": Variant("weights", CARD_GAMES, _card_pieces, image_size=96, patch_size=24),
    "tiny-alfworld": Variant("alfworld_weights", ("alfworld",), _alfworld_pieces, image_size=120, patch_size=24),
    # One patch for each square of FrozenLake's 4×4 maps.
    "tiny-grids": Variant("grids_weights", ("frozen_lake",), _grid_pieces, image_size=96, patch_size=24),
    # One patch for each of the 7×7 squares in front of the agent.
    "tiny-minigrid": Variant(
        "minigrid_weights",
        ("minigrid",),
        _minigrid_pieces,
        image_size=168,
        patch_size=24,
        options={"level": "BabyAI-GoToObj-v0", "view": "partial"},
    ),
}


def path(name: str = "tiny") -> Path:
    """The folder with the shipped weights, tokenizer and image processor, for `from_pretrained`."""
    return Path(__file__).parent / VARIANTS[name].folder


def name_of(model: str) -> str:
    """The name (`"tiny"`) if `model` is a shipped model's folder; any other name or path unchanged."""
    shipped = {f"tiny_llava/{variant.folder}": name for name, variant in VARIANTS.items()}
    return shipped.get("/".join(Path(model).parts[-2:]), model)


def for_task(task: str) -> str | None:
    """The embedded model that knows this task; `None` if there is none."""
    return next((name for name, variant in VARIANTS.items() if task in variant.tasks), None)


def figures() -> list[dict[str, Any]]:
    """Measured performance of the shipped weights, one row per game and mode.

    Written by `examples/benchmarks/tiny_start.py`.
    """
    return json.loads((Path(__file__).parent / "figures.json").read_text("utf-8"))


def build(seed: int = 0, name: str = "tiny", **sizes: int) -> tuple[Any, Any]:
    """A randomly initialised model and its processor. `sizes` are passed to `model.build_model`."""
    from .model import build_model, build_processor

    variant = VARIANTS[name]
    processor = build_processor(variant.pieces(), variant.image_size, variant.patch_size)
    return build_model(processor, seed=seed, **sizes), processor


def save(model: Any, processor: Any, folder: str | Path) -> None:
    """Write a `from_pretrained` folder with weights in half precision; they load as float32."""
    halves = {name: weight.detach().half() for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(folder, state_dict=halves)  # the LM head is tied to the embedding: saved once
    processor.save_pretrained(folder)
    (Path(folder) / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only


__all__ = ["CARD_GAMES", "VARIANTS", "build", "figures", "for_task", "name_of", "path", "save"]
