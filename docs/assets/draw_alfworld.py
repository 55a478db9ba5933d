"""Draws alfworld_scenes.png, the picture of docs/alfworld.md: eight moments of bundled games, and a small one of each.

python docs/assets/draw_alfworld.py
"""

from pathlib import Path

from PIL import Image

from trl_gtr.environments.alfworld import ALFWorldEnv

HERE = Path(__file__).parent
GAP = 8
SMALL = 112  # pixels: what a small model sees

# game, and how far the expert has played it
SCENES = [
    ("pick_heat_then_place_in_recep/2", 0),
    ("pick_heat_then_place_in_recep/2", 1),
    ("pick_heat_then_place_in_recep/2", 4),
    ("pick_heat_then_place_in_recep/21", 2),
    ("look_at_obj_in_light/2", 5),
    ("pick_two_obj_and_place/3", 6),
    ("pick_clean_then_place_in_recep/5", 6),
    ("pick_two_obj_and_place/5", 1),
]


def scenes() -> Image.Image:
    sheet = Image.new("RGB", (4 * (300 + GAP) - GAP, 2 * (300 + SMALL + 2 * GAP)), "white")
    for place, (game, steps) in enumerate(SCENES):
        env = ALFWorldEnv(games=[f"bundled:{game}"])
        picture, info = env.reset(seed=0)
        for _ in range(steps):
            picture, _, _, _, info = env.step(info["extra.expert_plan"][0])
        x, y = place % 4 * (300 + GAP), place // 4 * (300 + SMALL + 2 * GAP)
        image = Image.fromarray(picture)
        sheet.paste(image, (x, y))
        small = image.resize((SMALL, SMALL), Image.Resampling.BILINEAR)
        sheet.paste(small, (x + (300 - SMALL) // 2, y + 300 + GAP))
    return sheet


if __name__ == "__main__":
    scenes().save(HERE / "alfworld_scenes.png", optimize=True)
