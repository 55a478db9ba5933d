"""Sokoban's pixel art: 16×16 tiles, drawn with Pillow and scaled to the room."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw

from ..cards.canvas import SIZE, Colour, Picture, put, read_only

GRID = 16
_SHARP = 8  # tiles are enlarged this much before they are scaled down, so that their edges stay sharp

NIGHT: Colour = (38, 34, 48)
BRICK: Colour = (122, 84, 76)
MORTAR: Colour = (84, 56, 56)
STONE: Colour = (226, 218, 200)
STONE_EDGE: Colour = (208, 198, 178)
RED: Colour = (214, 60, 60)
WOOD: Colour = (196, 138, 66)
WOOD_DARK: Colour = (124, 78, 30)
GREEN: Colour = (98, 178, 84)
GREEN_DARK: Colour = (38, 104, 44)
SKIN: Colour = (244, 200, 160)
HAIR: Colour = (70, 44, 30)
BLUE: Colour = (48, 96, 200)
BLUE_DARK: Colour = (28, 54, 128)
SHOE: Colour = (40, 36, 40)

_Draw = ImageDraw.ImageDraw


_BARE = str.maketrans("$@*+", "  ..")


def draw_room(lines: Sequence[str]) -> Picture:
    """The room's text as a picture of 300×300 pixels, the room in the middle."""
    bare = tuple(line.translate(_BARE) for line in lines)
    picture = _bare_room(bare).copy()
    for row, (line, empty) in enumerate(zip(lines, bare, strict=True)):
        if line != empty:
            for column, sign in enumerate(line):
                if sign != empty[column]:
                    _put(picture, lines, row, column)
    return picture


@lru_cache(maxsize=32)
def _bare_room(lines: Sequence[str]) -> Picture:
    """What never moves: drawn once for a whole episode."""
    picture = np.full((SIZE, SIZE, 3), NIGHT, np.uint8)
    for row, line in enumerate(lines):
        for column in range(len(line)):
            _put(picture, lines, row, column)
    return read_only(picture)


def _put(picture: Picture, lines: Sequence[str], row: int, column: int) -> None:
    height, width = len(lines), len(lines[0])
    side = SIZE // max(height, width)
    left, top = (SIZE - side * width) // 2, (SIZE - side * height) // 2
    put(picture, tile(lines[row][column], side), left + column * side, top + row * side)


@lru_cache(maxsize=64)
def tile(sign: str, side: int) -> Picture:
    """One square of the room, uint8, (side, side, 3)."""
    image = Image.new("RGB", (GRID, GRID), STONE)
    draw = ImageDraw.Draw(image)
    if sign == "#":
        _wall(draw)
    else:
        draw.rectangle((0, 0, GRID - 1, GRID - 1), outline=STONE_EDGE)
        if sign in ".+":
            _target(draw)
        if sign in "$*":
            _box(draw, on_target=sign == "*")
        if sign in "@+":
            _player(draw)
    sharp = image.resize((GRID * _SHARP, GRID * _SHARP), Image.Resampling.NEAREST)
    return read_only(np.array(sharp.resize((side, side), Image.Resampling.BOX)))


def _wall(draw: _Draw) -> None:
    draw.rectangle((0, 0, GRID, GRID), fill=MORTAR)
    for row, offset in enumerate((0, -4, 0, -4)):
        for left in range(offset, GRID, 8):
            draw.rectangle((left, 4 * row, left + 6, 4 * row + 2), fill=BRICK)


def _target(draw: _Draw) -> None:
    """A red ring with a dot, wide enough to show around a player."""
    draw.ellipse((1, 1, 14, 14), outline=RED, width=2)
    draw.rectangle((7, 7, 8, 8), fill=RED)


def _box(draw: _Draw, on_target: bool) -> None:
    """A wooden crate; a green one is home."""
    light, dark = (GREEN, GREEN_DARK) if on_target else (WOOD, WOOD_DARK)
    draw.rectangle((1, 1, 14, 14), fill=light, outline=dark)
    draw.rectangle((3, 3, 12, 12), outline=dark)
    if on_target:
        draw.line((5, 8, 7, 10), fill=dark, width=2)
        draw.line((7, 10, 11, 5), fill=dark, width=2)
    else:
        draw.line((4, 4, 11, 11), fill=dark, width=2)
        draw.line((11, 4, 4, 11), fill=dark, width=2)


def _player(draw: _Draw) -> None:
    draw.rectangle((5, 2, 10, 3), fill=HAIR)
    draw.rectangle((5, 4, 10, 6), fill=SKIN)
    draw.point([(6, 5), (9, 5)], fill=HAIR)
    draw.rectangle((4, 7, 11, 10), fill=BLUE)
    draw.point([(3, 8), (12, 8), (3, 9), (12, 9)], fill=SKIN)
    draw.rectangle((5, 11, 10, 12), fill=BLUE_DARK)
    draw.rectangle((5, 13, 6, 14), fill=SHOE)
    draw.rectangle((9, 13, 10, 14), fill=SHOE)
