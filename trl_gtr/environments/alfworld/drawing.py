"""Draw the scene from the agent's point of view: the receptacles in front, their contents, and the hand.

Nothing behind a closed door or elsewhere is visible: the image is drawn from a view (`World.view`), which excludes it.
Parts are drawn once and cached; an image then takes about a millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from .furniture import furniture
from .icons import BADGES, Colour, badge, darker, icon
from .world import kind_of

SIZE = 300
FLOOR = 236  # top of the floor
HAND = 250  # top of the hand's band
TITLE = 18
ICON_SIZES = (92, 80, 70, 60, 52, 46, 40, 34, 28, 24, 20, 16, 12)  # few sizes, so that the cache works
NARROWEST = 0.6  # of its width; a name that would be squeezed further gets two lines
INK: Colour = (28, 28, 34)
PAPER: Colour = (255, 253, 246)
SKIN: Colour = (238, 186, 148)

# room → wall, its pattern, floor
ROOMS: dict[str, tuple[Colour, str, Colour]] = {
    "kitchen": ((246, 232, 196), "tiles", (172, 122, 84)),
    "bathroom": ((200, 228, 226), "tiles", (226, 226, 222)),
    "bedroom": ((214, 212, 234), "stripes", (150, 132, 150)),
    "living room": ((212, 224, 200), "stripes", (164, 112, 70)),
}
_TELLING = {
    "bathroom": {"toilet", "bathtubbasin", "toiletpaperhanger", "towelholder", "handtowelholder"},
    "kitchen": {"fridge", "microwave", "stoveburner", "coffeemachine", "toaster"},
    "bedroom": {"bed"},
}
# Where long names may be split: "papertowel" / "roll 1".
_LAST_WORDS = (
    *("ball", "basin", "bat", "bear", "bottle", "box", "brush", "burner", "can", "card", "clock", "control", "hamper"),
    *("hanger", "holder", "knife", "lamp", "machine", "paper", "phone", "plant", "racket", "roll", "shaker", "sponge"),
    *("table", "top", "towel"),
)


def room_kind(receptacles: Sequence[str]) -> str:
    """Kitchen, bathroom, bedroom or living room, judged by its receptacles."""
    kinds = {kind_of(name) for name in receptacles}
    return next((room for room, telling in _TELLING.items() if kinds & telling), "living room")


def draw_scene(view: Mapping[str, Any]) -> np.ndarray:
    """The image of a view: uint8, (300, 300, 3)."""
    picture = _background(room_kind(view["room"])).copy()
    states = {thing: set(words) for thing, words in view["states"]}
    if view["here"]:
        columns = 1 if len(view["here"]) == 1 else 2 if len(view["here"]) <= 4 else 3
        for cell, (name, state, contents) in zip(
            _cells((4, 3, SIZE - 4, HAND - 3), len(view["here"]), columns), view["here"], strict=True
        ):
            _draw_receptacle(picture, cell, name, state, contents, states)
    else:
        _draw_room(picture, view["room"])
    _draw_hand(picture, view["holding"], states)
    return np.asarray(picture).copy()


def _cells(box: tuple[int, int, int, int], count: int, columns: int) -> list[tuple[int, int, int, int]]:
    left, top, right, bottom = box
    rows = math.ceil(count / columns)
    width, height = (right - left) / columns, (bottom - top) / rows
    return [
        (
            round(left + i % columns * width),
            round(top + i // columns * height),
            round(left + (i % columns + 1) * width),
            round(top + (i // columns + 1) * height),
        )
        for i in range(count)
    ]


def _draw_receptacle(
    picture: Image.Image,
    cell: tuple[int, int, int, int],
    name: str,
    state: str,
    contents: Sequence[str],
    states: Mapping[str, set[str]],
) -> None:
    left, top, right, bottom = cell
    title = _label(f"{name} ({state})" if state else name, right - left - 6, 14, plate=True)
    picture.paste(title, ((left + right - title.width) // 2, top), title)
    body = furniture(kind_of(name), right - left - 6, bottom - top - TITLE - 4, state != "closed")
    x, y = left + 3, top + TITLE + 2
    picture.paste(body.image, (x, y), body.image)
    if state == "closed" or not contents:
        return
    in_left, in_top, in_right, in_bottom = body.inside
    inside = (x + in_left, y + in_top, x + in_right, y + in_bottom)
    for place, thing in zip(_places(inside, len(contents)), contents, strict=True):
        _draw_thing(picture, place, thing, states.get(thing, set()), body.dark)


def _places(inside: tuple[int, int, int, int], count: int) -> list[tuple[int, int, int, int]]:
    """One place per object, in the grid that allows the largest size."""
    width, height = inside[2] - inside[0], inside[3] - inside[1]

    def size(columns: int) -> float:
        return min(width / columns, height / math.ceil(count / columns) - 11)

    return _cells(inside, count, max(range(1, count + 1), key=size))


def _draw_thing(
    picture: Image.Image, place: tuple[int, int, int, int], thing: str, words: set[str], dark: bool
) -> None:
    """Draw the object with its name below it and badges for its states."""
    left, top, right, bottom = place
    lettering = 12 if bottom - top >= 50 else 10
    text, lines = _name(thing, right - left, lettering, light=dark)
    height = bottom - top - lettering * lines - 1  # what is left above the name
    size = next((size for size in ICON_SIZES if size <= min(right - left - 2, height)), ICON_SIZES[-1])
    image = icon(kind_of(thing), size, "on" in words)
    x, y = (left + right - size) // 2, top + (height - size) // 2
    picture.paste(image, (x, y), image)
    _draw_badges(picture, x + size, y, size, words)
    picture.paste(text, ((left + right - text.width) // 2, y + size), text)


def _draw_badges(picture: Image.Image, right: int, top: int, size: int, words: set[str]) -> None:
    side = max(12, round(size * 0.4))
    for place, word in enumerate(word for word in BADGES if word in words):
        mark = badge(word, side)
        picture.paste(mark, (right - side, top + place * side), mark)


def _draw_room(picture: Image.Image, receptacles: Sequence[str]) -> None:
    """The view from the middle of the room: all receptacles, closed and at a distance."""
    title = _label("middle of the room", SIZE - 20, 14, plate=True)
    picture.paste(title, ((SIZE - title.width) // 2, 3), title)
    area = (4, TITLE + 6, SIZE - 4, HAND - 2)
    columns = max(1, min(len(receptacles), math.ceil(math.sqrt(len(receptacles) * 1.2))))
    for (left, top, right, bottom), name in zip(_cells(area, len(receptacles), columns), receptacles, strict=True):
        lettering = 11 if bottom - top >= 50 else 9
        text, lines = _name(name, right - left, lettering)
        body = furniture(kind_of(name), right - left - 4, bottom - top - lettering * lines - 3)
        picture.paste(body.image, (left + 2, top + 1), body.image)
        picture.paste(text, ((left + right - text.width) // 2, bottom - lettering * lines - 3), text)


def _draw_hand(picture: Image.Image, holding: str, states: Mapping[str, set[str]]) -> None:
    band = _hand(bool(holding))
    picture.paste(band, (0, HAND))
    if not holding:
        return
    words, size = states.get(holding, set()), SIZE - HAND - 4
    image = icon(kind_of(holding), size, "on" in words)
    picture.paste(image, (72, HAND + 2), image)
    left = 72 + size + 6
    for word in (word for word in BADGES if word in words):
        mark = badge(word, 26)
        picture.paste(mark, (left, HAND + (SIZE - HAND - 26) // 2), mark)
        left += 30
    text = _label(holding, SIZE - left - 8, 18, light=True)
    picture.paste(text, (max(left + 4, 144), HAND + (SIZE - HAND - text.height) // 2), text)


@lru_cache(maxsize=2)
def _hand(full: bool) -> Image.Image:
    """The band at the lower edge: a hand pointing at the object it holds, or an open hand."""
    scale, width, height = 4, SIZE, SIZE - HAND
    band = Image.new("RGB", (width * scale, height * scale), (64, 58, 66))
    draw = ImageDraw.Draw(band)

    def at(*values: float) -> list[float]:
        return [value * scale for value in values]

    draw.rectangle(at(0, 0, width, 1.5), (36, 32, 38))
    draw.rounded_rectangle(at(-10, 14, 26, 42), 6 * scale, (70, 110, 180), darker((70, 110, 180)), scale)
    draw.rounded_rectangle(at(20, 10, 56, 44), 12 * scale, SKIN, darker(SKIN), scale)
    reach = 66 if full else 82
    for finger in range(4):
        top = 10 + finger * 8.5
        draw.rounded_rectangle(
            at(44, top, reach - abs(finger - 1.5) * 3, top + 8), 4 * scale, SKIN, darker(SKIN), scale
        )
    draw.rounded_rectangle(at(30, 3, 58, 13), 5 * scale, SKIN, darker(SKIN), scale)
    band = band.resize((width, height), Image.Resampling.LANCZOS)
    if not full:
        text = _label("empty", 120, 18, light=True)
        band.paste(text, (144, (height - text.height) // 2), text)
    return band


def _name(name: str, max_width: int, height: int, light: bool = False) -> tuple[Image.Image, int]:
    """The lettering of a name and its number of lines: two if one would be hard to read."""
    if max_width >= NARROWEST * _lettering(name, height, light, False).width:
        return _label(name, max_width, height, light), 1
    return _two_lines(name, max_width, height, light), 2


@lru_cache(maxsize=1024)
def _two_lines(name: str, max_width: int, height: int, light: bool) -> Image.Image:
    lines = broken(name)
    widest = max(_lettering(line, height, light, False).width for line in lines)
    smaller = height if max_width >= NARROWEST * widest else height - 2  # still too narrow: use smaller letters
    labels = [_label(line, max_width, smaller, light) for line in lines]
    board = Image.new("RGBA", (max(label.width for label in labels), labels[0].height + height))
    for place, label in enumerate(labels):
        board.alpha_composite(label, ((board.width - label.width) // 2, place * height))
    return board


def broken(name: str) -> tuple[str, str]:
    """Split a name into two lines: `"papertowelroll 1"` → `("papertowel", "roll 1")`; by default before the number."""
    kind, _, number = name.rpartition(" ")
    last = max((word for word in _LAST_WORDS if kind.endswith(word) and word != kind), key=len, default="")
    return kind[: len(kind) - len(last)], f"{last} {number}".strip()


def _label(text: str, max_width: int, height: int, light: bool = False, plate: bool = False) -> Image.Image:
    """Lettering as an RGBA image, squeezed if it is too wide."""
    label = _lettering(text, height, light, plate)
    return label if label.width <= max_width else _squeezed(text, max_width, height, light, plate)


@lru_cache(maxsize=1024)
def _squeezed(text: str, width: int, height: int, light: bool, plate: bool) -> Image.Image:
    label = _lettering(text, height, light, plate)
    return label.resize((width, label.height), Image.Resampling.LANCZOS)


@lru_cache(maxsize=1024)
def _lettering(text: str, height: int, light: bool, plate: bool) -> Image.Image:
    """Dark letters with a light rim, or the reverse; with `plate`, light letters on a dark background."""
    scale = 2
    font = ImageFont.load_default(height * scale)
    width = font.getlength(text)
    margin = (5 if plate else 2) * scale
    size = (round(width) + 2 * margin, round(height * 1.25 * scale))
    board = Image.new("RGBA", size)
    draw = ImageDraw.Draw(board)
    ink, rim = (PAPER, INK) if light or plate else (INK, PAPER)
    if plate:
        draw.rounded_rectangle((0, 0, size[0] - 1, size[1] - 1), 4 * scale, (*INK, 235))
    middle = (size[0] / 2, size[1] / 2)
    draw.text(middle, text, ink, font, anchor="mm", stroke_width=0 if plate else scale, stroke_fill=rim)
    return board.resize((math.ceil(size[0] / scale), size[1] // scale), Image.Resampling.LANCZOS)


@lru_cache(maxsize=8)
def _background(room: str) -> Image.Image:
    wall, pattern, floor = ROOMS[room]
    picture = Image.new("RGB", (SIZE, SIZE), wall)
    draw = ImageDraw.Draw(picture)
    line = darker(wall, 0.07)
    for place in range(0, SIZE, 30):
        draw.line((place, 0, place, FLOOR), line, 2 if pattern == "tiles" else 10)
        if pattern == "tiles":
            draw.line((0, place, SIZE, place), line, 2)
    draw.rectangle((0, FLOOR, SIZE, SIZE), floor)
    draw.rectangle((0, FLOOR - 4, SIZE, FLOOR), darker(wall, 0.3))
    return picture.filter(ImageFilter.GaussianBlur(0.6))
