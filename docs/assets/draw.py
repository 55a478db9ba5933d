"""Draws cards.png and observations.png, the pictures of docs/environments.md.

python docs/assets/draw.py
"""

from pathlib import Path

import numpy as np
from PIL import Image

from trl_gtr.environments import BlackjackEnv, EZPointsEnv, NumberLineEnv, Points24Env
from trl_gtr.environments.cards.canvas import FELT, put
from trl_gtr.environments.cards.cards import CARD_HEIGHT, CARD_WIDTH, RANKS, SUITS, card_back, card_face

HERE = Path(__file__).parent
GAP = 8


def contact_sheet() -> Image.Image:
    """All 52 cards and the back."""
    across, down = CARD_WIDTH + GAP, CARD_HEIGHT + GAP
    sheet = np.full((4 * down + GAP, 14 * across + GAP, 3), FELT, np.uint8)
    for row, suit in enumerate(SUITS):
        for column, rank in enumerate(RANKS):
            put(sheet, card_face(suit + rank), GAP + column * across, GAP + row * down)
    put(sheet, card_back(), GAP + 13 * across, GAP)
    return Image.fromarray(sheet)


def observations() -> Image.Image:
    """One observation of each game; below, the same at 96×96 pixels, enlarged again."""
    states = [
        (Points24Env(), {"cards": ["HQ", "S8", "D5", "CA"]}, ["10", "+", "8", "+"]),
        (EZPointsEnv(), {"cards": ["D9", "C3"]}, ["9", "+"]),
        (NumberLineEnv(), {"target": 3, "current": 5}, []),
        (BlackjackEnv(), {"dealer": [[1, "A", "D"], [7, "7", "S"]], "player": [[10, "K", "C"], [6, "6", "H"]]}, []),
    ]
    sheet = Image.new("RGB", (4 * (300 + GAP) - GAP, 2 * 300 + GAP), "white")
    for column, (env, options, actions) in enumerate(states):
        picture, _ = env.reset(options=options)
        for action in actions:
            picture, *_ = env.step(env.actions.index(action))
        image = Image.fromarray(picture)
        small = image.resize((96, 96), Image.Resampling.BICUBIC)
        sheet.paste(image, (column * (300 + GAP), 0))
        sheet.paste(small.resize((300, 300), Image.Resampling.NEAREST), (column * (300 + GAP), 300 + GAP))
    return sheet


if __name__ == "__main__":
    contact_sheet().save(HERE / "cards.png", optimize=True)
    observations().save(HERE / "observations.png", optimize=True)
