"""Draws the grid worlds of docs/environments.md: sokoban, frozen_lake, taxi, cliff_walking and minigrid.

python docs/assets/draw_grids.py     # needs the extra `minigrid`
"""

from pathlib import Path

import numpy as np
from PIL import Image

from trl_gtr import make_task

HERE = Path(__file__).parent
ROOM = ["######", "#  . #", "# $* #", "# @  #", "#.$ ##", "######"]
GAP = 8
LEVELS = {
    "MiniGrid-DoorKey-6x6-v0": ("partial", "full"),
    "MiniGrid-Empty-Random-6x6-v0": ("full",),
    "MiniGrid-FourRooms-v0": ("full",),
    "BabyAI-GoToObj-v0": ("partial",),
    "BabyAI-PickupLoc-v0": ("full",),
    "BabyAI-UnlockPickup-v0": ("full",),
}
SEEDS = {"frozen_lake": (0, 5), "taxi": (0,), "cliff_walking": (0,)}


def side_by_side(pictures: list[np.ndarray]) -> Image.Image:
    gap = np.full((pictures[0].shape[0], GAP, 3), 255, np.uint8)
    parts = [part for picture in pictures for part in (picture, gap)]
    return Image.fromarray(np.hstack(parts[:-1]))


def observation(name: str, seed: int, options: dict | None = None, **env_kwargs: int) -> np.ndarray:
    picture, _ = make_task(name, env_kwargs=env_kwargs).make_env().reset(seed=seed, options=options)
    return picture


def level(name: str, view: str, height: int = 224) -> np.ndarray:
    picture, _ = make_task("minigrid", level=name, view=view).make_env().reset(seed=3)
    width = round(picture.shape[1] * height / picture.shape[0])
    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BOX))


if __name__ == "__main__":
    rooms = [observation("sokoban", 0, {"room": ROOM.copy()}), observation("sokoban", 1)]
    rooms.append(observation("sokoban", 4, size=8, boxes=3))
    side_by_side(rooms).save(HERE / "sokoban.png", optimize=True)
    for name, seeds in SEEDS.items():
        side_by_side([observation(name, seed) for seed in seeds]).save(HERE / f"{name}.png", optimize=True)
    levels = [level(name, view) for name, views in LEVELS.items() for view in views]
    side_by_side(levels).save(HERE / "minigrid.png", optimize=True)
