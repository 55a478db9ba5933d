"""Draws the grid worlds of docs/environments.md: sokoban.png, frozen_lake.png, taxi.png and cliff_walking.png.

python docs/assets/draw_grids.py
"""

from pathlib import Path

import numpy as np
from PIL import Image

from trl_gtr import make_task

HERE = Path(__file__).parent
ROOM = ["######", "#  . #", "# $* #", "# @  #", "#.$ ##", "######"]
GAP = 8
SEEDS = {"frozen_lake": (0, 5), "taxi": (0,), "cliff_walking": (0,)}


def side_by_side(pictures: list[np.ndarray]) -> Image.Image:
    gap = np.full((pictures[0].shape[0], GAP, 3), 255, np.uint8)
    parts = [part for picture in pictures for part in (picture, gap)]
    return Image.fromarray(np.hstack(parts[:-1]))


def observation(name: str, seed: int, options: dict | None = None, **env_kwargs: int) -> np.ndarray:
    picture, _ = make_task(name, env_kwargs=env_kwargs).make_env().reset(seed=seed, options=options)
    return picture


if __name__ == "__main__":
    rooms = [observation("sokoban", 0, {"room": ROOM.copy()}), observation("sokoban", 1)]
    rooms.append(observation("sokoban", 4, size=8, boxes=3))
    side_by_side(rooms).save(HERE / "sokoban.png", optimize=True)
    for name, seeds in SEEDS.items():
        side_by_side([observation(name, seed) for seed in seeds]).save(HERE / f"{name}.png", optimize=True)
