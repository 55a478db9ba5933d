"""Playing cards: names, numbers and faces.

A card's name is its suit and rank: `"H4"` is the four of hearts, `"ST"` the ten of spades, `"CA"` the ace of clubs.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw

from .canvas import FELT, SUPERSAMPLE, Colour, Picture, lettering, read_only

SUITS = {"H": "hearts", "S": "spades", "D": "diamonds", "C": "clubs"}
RANKS = "A23456789TJQK"

CARD_WIDTH, CARD_HEIGHT = 69, 108
"""A card at full size: four fill a row, in columns of 75 pixels."""

RED: Colour = (200, 16, 46)
INK: Colour = (22, 22, 29)
IVORY: Colour = (255, 254, 250)
EDGE: Colour = (168, 163, 150)
BACK: Colour = (34, 58, 128)


def check_card(name: object) -> str:
    """Return the name, or raise a `ValueError` that lists the valid names."""
    if not (isinstance(name, str) and len(name) == 2 and name[0] in SUITS and name[1] in RANKS):
        raise ValueError(
            f"no such card: {name!r}. A card is its suit ({', '.join(SUITS)}) and its rank ({', '.join(RANKS)}), "
            "such as 'H4' or 'ST'"
        )
    return name


def card_name(suit: str, rank: int) -> str:
    """The name of the card of this suit with rank 1 (ace) to 13 (king)."""
    return suit + RANKS[rank - 1]


def card_rank(name: str) -> int:
    """1 (ace) to 13 (king)."""
    return RANKS.index(name[1]) + 1


def printed_rank(name: str) -> str:
    """The rank as printed on the card: A, 2 … 10, J, Q, K."""
    return "10" if name[1] == "T" else name[1]


def in_words(name: str) -> str:
    """The card in words: "queen of hearts"."""
    spoken = {"A": "ace", "J": "jack", "Q": "queen", "K": "king"}
    return f"{spoken.get(name[1], printed_rank(name))} of {SUITS[name[0]]}"


@lru_cache(maxsize=1024)
def card_face(name: str, width: int = CARD_WIDTH, height: int = CARD_HEIGHT) -> Picture:
    """The front of a card on felt: uint8, (height, width, 3), read-only."""
    k = SUPERSAMPLE
    card = _cardboard(width * k, height * k, IVORY)
    colour = RED if name[0] in "HD" else INK
    rank = lettering(printed_rank(name), round(0.40 * height * k), round(0.80 * width * k))
    card.paste(colour, ((card.width - rank.width) // 2, round(0.085 * height * k)), rank)
    side = round(min(0.40 * height, 0.64 * width) * k)
    suit = _suit(name[0], side)
    card.paste(colour, ((card.width - side) // 2, round(0.955 * height * k) - side), suit)
    return read_only(np.array(card.resize((width, height), Image.Resampling.LANCZOS)))


@lru_cache(maxsize=64)
def card_back(width: int = CARD_WIDTH, height: int = CARD_HEIGHT) -> Picture:
    """The back of a card on felt: uint8, (height, width, 3), read-only."""
    k = SUPERSAMPLE
    card = _cardboard(width * k, height * k, IVORY)
    margin = round(0.08 * width * k)
    inner = Image.new("RGB", (card.width - 2 * margin, card.height - 2 * margin), BACK)
    draw = ImageDraw.Draw(inner)
    step = max(4, inner.width // 4)
    for offset in range(-inner.height, inner.width + inner.height, step):
        for run in (inner.height, -inner.height):
            draw.line((offset, 0, offset + run, inner.height), fill=(122, 146, 214), width=max(1, step // 8))
    card.paste(inner, (margin, margin), _rounded(inner.width, inner.height, 0.06 * card.width))
    return read_only(np.array(card.resize((width, height), Image.Resampling.LANCZOS)))


def _rounded(width: int, height: int, radius: float) -> Image.Image:
    mask = Image.new("L", (width, height))
    ImageDraw.Draw(mask).rounded_rectangle((0, 0, width - 1, height - 1), radius, fill=255)
    return mask


def _cardboard(width: int, height: int, colour: Colour) -> Image.Image:
    """A blank card with rounded corners on felt."""
    card = Image.new("RGB", (width, height), FELT)
    ImageDraw.Draw(card).rounded_rectangle(
        (0, 0, width - 1, height - 1), 0.1 * width, fill=colour, outline=EDGE, width=max(1, SUPERSAMPLE)
    )
    return card


def _suit(suit: str, side: int) -> Image.Image:
    """The suit symbol as a mask (mode L) of `side` × `side` pixels."""
    mask = Image.new("L", (side, side))
    draw = ImageDraw.Draw(mask)

    def polygon(points: list[tuple[float, float]]) -> None:
        draw.polygon([(x * side, y * side) for x, y in points], fill=255)

    def disc(x: float, y: float, radius: float) -> None:
        draw.ellipse([(c + s * radius) * side for s in (-1, 1) for c in (x, y)], fill=255)

    stem = [(0.5, 0.45), (0.54, 0.8), (0.68, 1.0), (0.32, 1.0), (0.46, 0.8)]
    if suit == "D":
        polygon([(0.5, 0.0), (0.9, 0.5), (0.5, 1.0), (0.1, 0.5)])
    elif suit == "H":
        polygon(_heart(top=0.04, bottom=1.0))
    elif suit == "S":
        polygon(_heart(top=0.84, bottom=0.0))
        polygon(stem)
    else:
        disc(0.5, 0.23, 0.23)
        disc(0.235, 0.58, 0.23)
        disc(0.765, 0.58, 0.23)
        disc(0.5, 0.5, 0.14)
        polygon(stem)
    return mask


def _heart(top: float, bottom: float) -> list[tuple[float, float]]:
    """The outline of a heart whose point is at `bottom`; upside down if that is above `top`."""
    outline = []
    for step in range(120):
        angle = 2 * math.pi * step / 120
        x = 16 * math.sin(angle) ** 3
        y = 13 * math.cos(angle) - 5 * math.cos(2 * angle) - 2 * math.cos(3 * angle) - math.cos(4 * angle)
        # The curve spans −16 … 16 across and −17 … 11.95 upwards.
        outline.append((0.5 + 0.49 * x / 16, bottom + (y + 17) / 28.95 * (top - bottom)))
    return outline
