"""Drawing helpers for the games: felt, lettering, and terminal output.

Everything is drawn once at a larger size, scaled down smoothly and cached; a game step then only copies pixels.
Cached arrays are read-only, so that callers can't corrupt them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Picture: TypeAlias = "np.ndarray"
"""uint8, (height, width, 3)."""
Colour: TypeAlias = tuple[int, int, int]
Font: TypeAlias = "ImageFont.FreeTypeFont | ImageFont.ImageFont"

SIZE = 300
"""Width and height of every observation."""
FELT: Colour = (31, 94, 66)
SLATE: Colour = (18, 58, 41)
CREAM: Colour = (255, 250, 235)
GOLD: Colour = (255, 209, 92)
WHITE: Colour = (255, 255, 255)
BLACK: Colour = (0, 0, 0)

SUPERSAMPLE = 4

# The operators as strokes (x0, y0, x1, y1) around their centre: the font's own are too small to survive scaling.
_STROKES: dict[str, list[tuple[float, float, float, float]]] = {
    "+": [(-1, 0, 1, 0), (0, -1, 0, 1)],
    "-": [(-1, 0, 1, 0)],
    "*": [(0, -1, 0, 1), (-0.87, -0.5, 0.87, 0.5), (-0.87, 0.5, 0.87, -0.5)],
    "/": [(-0.75, 1.3, 0.75, -1.3)],
}


def read_only(picture: Picture) -> Picture:
    picture.flags.writeable = False
    return picture


@lru_cache(maxsize=16)
def blank(colour: Colour) -> Picture:
    """An empty observation. Copy it before drawing on it."""
    return read_only(np.full((SIZE, SIZE, 3), colour, dtype=np.uint8))


def put(picture: Picture, patch: Picture, x: int, y: int) -> None:
    """Copy `patch` into `picture` with its upper left corner at (x, y)."""
    height, width = patch.shape[:2]
    picture[y : y + height, x : x + width] = patch


def lettering(text: str, height: int, max_width: int | None = None) -> Image.Image:
    """`text`, one word in bold, as a mask (mode L) whose capitals are `height` pixels high, squeezed if too wide.

    Uses the font bundled with Pillow.
    """
    points = 2 * height  # capitals 1.4 times the height: enough for smooth edges
    font = ImageFont.load_default(points)
    # Text that will be squeezed gets wider strokes; any wider would close the openings of 6, 9 and 5.
    wide = max_width is not None and font.getlength(text) > 2 * max_width
    bold = points / (34 if wide else 48)
    letters = [_bold_letter(letter, font, points, bold) for letter in text]
    gap = round(points / 16)
    mask = Image.new("L", (sum(letter.width + gap for letter in letters) - gap, 2 * points))
    left = 0
    for letter in letters:
        mask.paste(letter, (left, 0))
        left += letter.width + gap
    _, cap_top, _, base = font.getbbox("H")
    cap_line, base_line = round(points / 2 + cap_top - bold), round(points / 2 + base + bold)
    _, inked_top, _, inked_bottom = mask.getbbox() or (0, cap_line, 0, base_line)
    mask = mask.crop((0, min(cap_line, inked_top), mask.width, max(base_line, inked_bottom)))
    scale = height / (base_line - cap_line)
    width = max(1, round(mask.width * scale))
    if max_width is not None:
        width = min(width, max_width)
    return mask.resize((width, round(mask.height * scale)), Image.Resampling.LANCZOS)


def _bold_letter(letter: str, font: Font, points: int, bold: float) -> Image.Image:
    """One letter, cropped left and right. The font has no bold, so the letter is drawn all around a small circle."""
    mask = Image.new("L", (2 * points, 2 * points))
    draw = ImageDraw.Draw(mask)
    for step in range(24):
        angle = 2 * math.pi * step / 24
        at = (points / 2 + bold * math.cos(angle), points / 2 + bold * math.sin(angle))
        draw.text(at, letter, fill=255, font=font)
    left, _, right, _ = mask.getbbox() or (0, 0, points // 4, 0)
    return mask.crop((left, 0, right, mask.height))


@lru_cache(maxsize=256)
def words(text: str, height: int, ink: Colour, paper: Colour, max_width: int | None = None) -> Picture:
    """A tightly cropped line of text whose capitals are `height` pixels high."""
    mask = lettering(text, height, max_width)
    line = Image.new("RGB", mask.size, paper)
    line.paste(ink, (0, 0), mask)
    return read_only(np.array(line))


@lru_cache(maxsize=256)
def formula_cell(element: str, width: int, height: int) -> Picture:
    """One element of a formula in its own box; an empty box for a space."""
    k = SUPERSAMPLE
    cell = Image.new("RGB", (width * k, height * k), SLATE)
    middle_x, middle_y = width * k / 2, height * k / 2
    draw = ImageDraw.Draw(cell)
    arm, pen = 0.36 * width * k, max(1, round(0.15 * width * k))
    if element in _STROKES:
        for x0, y0, x1, y1 in _STROKES[element]:
            ends = (middle_x + x0 * arm, middle_y + y0 * arm, middle_x + x1 * arm, middle_y + y1 * arm)
            draw.line(ends, fill=GOLD, width=pen)
    elif element in "()":
        sign = lettering(element, round(0.6 * height) * k, round(0.5 * width) * k)
        cell.paste(GOLD, (round(middle_x - sign.width / 2), round(middle_y - sign.height / 2)), sign)
    elif element != " ":
        sign = lettering(element, round(0.68 * height) * k, round(0.86 * width) * k)
        cell.paste(CREAM, (round(middle_x - sign.width / 2), round(middle_y - sign.height / 2)), sign)
    return read_only(np.array(cell.resize((width, height), Image.Resampling.LANCZOS)))


def in_terminal(picture: Picture, columns: int = 96) -> str:
    """The picture for a colour terminal: each character shows two pixels, one above the other."""
    small = np.array(Image.fromarray(picture).resize((columns, columns), Image.Resampling.LANCZOS))
    lines = []
    for upper, lower in zip(small[::2], small[1::2], strict=True):
        lines.append(
            "".join(
                f"\x1b[38;2;{a[0]};{a[1]};{a[2]}m\x1b[48;2;{b[0]};{b[1]};{b[2]}m▀"
                for a, b in zip(upper.tolist(), lower.tolist(), strict=True)
            )
        )
    return "\x1b[0m\n".join([*lines, ""])
