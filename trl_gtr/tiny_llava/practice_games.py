"""The games of ALFWorld from which its embedded model has learned: generated ones that are in no split, in the room
layouts of training."""

from __future__ import annotations

from ..environments.alfworld.generator import SEEDS
from ..environments.alfworld.rooms import LAYOUTS, UNSEEN_LAYOUTS

ALFWORLD_TASK_TYPE = "pick_and_place_simple"


def alfworld_practice(count: int = 320) -> list[str]:
    """Names of generated games that are in no split, in the room layouts of training only."""
    seeds = [seed for seed in range(SEEDS, SEEDS + 10 * count) if seed % LAYOUTS not in UNSEEN_LAYOUTS]
    return [f"bundled:{ALFWORLD_TASK_TYPE}/{seed}" for seed in seeds[:count]]
