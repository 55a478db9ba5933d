"""Icons of everyday objects: each kind has its own shape and colour.

An icon is a list of shapes on a 100 × 100 grid, drawn large, scaled down smoothly and cached.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any, TypeAlias

from PIL import Image, ImageDraw, ImageFilter, ImageFont

Colour: TypeAlias = tuple[int, int, int]
Shape: TypeAlias = tuple[Any, ...]
"""("ellipse", x0, y0, x1, y1, colour), ("box", x0, y0, x1, y1, colour[, corner]), ("shape", points, colour), ("line",
points, colour, width) or ("bow", x0, y0, x1, y1, start, end, colour, width)."""

SUPERSAMPLE = 4
OUTLINE = 4  # of 100

WHITE: Colour = (248, 248, 245)
SILVER: Colour = (186, 192, 200)
GREY: Colour = (126, 132, 140)
DARK: Colour = (52, 54, 62)
BROWN: Colour = (139, 92, 52)
WOOD: Colour = (190, 134, 78)
RED: Colour = (214, 48, 49)
ORANGE: Colour = (240, 140, 40)
YELLOW: Colour = (250, 208, 62)
GREEN: Colour = (76, 160, 70)
LIME: Colour = (154, 208, 96)
TEAL: Colour = (32, 158, 152)
SKY: Colour = (120, 196, 240)
BLUE: Colour = (52, 108, 210)
NAVY: Colour = (38, 56, 120)
PURPLE: Colour = (140, 84, 190)
LILAC: Colour = (196, 164, 228)
PINK: Colour = (246, 150, 180)
CREAM: Colour = (252, 238, 208)
GOLD: Colour = (216, 172, 58)

_HANDLE_DOWN = ("box", 46, 40, 54, 96)
_SHAKER = ("shape", ((30, 34), (70, 34), (78, 94), (22, 94)))

ICONS: dict[str, list[Shape]] = {
    # food
    "apple": [
        ("ellipse", 14, 26, 58, 92, RED),
        ("ellipse", 42, 26, 86, 92, RED),
        ("line", ((50, 32), (56, 10)), BROWN, 7),
        ("ellipse", 56, 8, 84, 26, GREEN),
    ],
    "tomato": [
        ("ellipse", 10, 26, 90, 92, (232, 74, 42)),
        ("shape", ((50, 20), (58, 34), (78, 32), (62, 42), (50, 48), (38, 42), (22, 32), (42, 34)), GREEN),
    ],
    "potato": [
        ("ellipse", 6, 30, 94, 82, (196, 150, 92)),
        ("ellipse", 30, 44, 38, 50, BROWN),
        ("ellipse", 56, 60, 64, 66, BROWN),
        ("ellipse", 66, 42, 73, 48, BROWN),
    ],
    "egg": [("ellipse", 24, 12, 76, 90, CREAM)],
    "bread": [
        ("box", 8, 34, 92, 86, (214, 156, 84), 24),
        ("line", ((30, 40), (26, 58)), BROWN, 6),
        ("line", ((50, 40), (46, 58)), BROWN, 6),
        ("line", ((70, 40), (66, 58)), BROWN, 6),
    ],
    "lettuce": [
        ("ellipse", 6, 28, 62, 90, GREEN),
        ("ellipse", 38, 28, 94, 90, GREEN),
        ("ellipse", 20, 12, 80, 76, LIME),
        ("line", ((50, 88), (50, 36)), WHITE, 6),
    ],
    # crockery and cutlery
    "mug": [("bow", 52, 32, 96, 78, -90, 90, BLUE, 12), ("box", 12, 22, 70, 90, BLUE, 8)],
    "cup": [("shape", ((20, 14), (80, 14), (68, 92), (32, 92)), SKY), ("box", 26, 26, 74, 36, WHITE)],
    "bowl": [("bowl", 6, 4, 94, 90, YELLOW), ("box", 34, 84, 66, 94, GOLD)],
    "plate": [("ellipse", 4, 24, 96, 80, WHITE), ("ellipse", 22, 36, 78, 68, SKY)],
    "pan": [("box", 56, 48, 98, 62, DARK, 6), ("ellipse", 4, 26, 66, 86, DARK), ("ellipse", 14, 36, 56, 76, GREY)],
    "pot": [
        ("box", 4, 44, 96, 56, DARK, 4),
        ("box", 16, 34, 84, 90, SILVER, 8),
        ("box", 12, 24, 88, 38, GREY, 4),
        ("box", 44, 14, 56, 24, DARK),
    ],
    "kettle": [
        ("bow", 26, 4, 74, 56, 180, 360, DARK, 9),
        ("shape", ((66, 50), (98, 34), (88, 68)), TEAL),
        ("ellipse", 16, 32, 84, 92, TEAL),
    ],
    "glassbottle": [("box", 38, 4, 62, 40, LIME, 4), ("box", 24, 34, 76, 96, LIME, 16)],
    "winebottle": [
        ("box", 40, 2, 60, 40, (92, 22, 48), 3),
        ("box", 28, 34, 72, 98, (92, 22, 48), 12),
        ("box", 30, 56, 70, 80, CREAM),
    ],
    "fork": [
        (*_HANDLE_DOWN, SILVER),
        ("box", 32, 30, 68, 48, SILVER, 8),
        ("box", 32, 4, 40, 34, SILVER),
        ("box", 46, 4, 54, 34, SILVER),
        ("box", 60, 4, 68, 34, SILVER),
    ],
    "spoon": [(*_HANDLE_DOWN, SILVER), ("ellipse", 30, 2, 70, 50, SILVER)],
    "knife": [("shape", ((40, 60), (40, 4), (66, 36), (62, 60)), SILVER), ("box", 40, 58, 62, 98, DARK, 6)],
    "butterknife": [("box", 40, 4, 60, 60, SILVER, 10), ("box", 42, 56, 58, 98, GOLD, 6)],
    "ladle": [("line", ((60, 4), (54, 60)), GREY, 10), ("bowl", 22, 26, 82, 92, GREY)],
    "spatula": [
        ("box", 46, 40, 54, 98, DARK),
        ("box", 28, 2, 72, 50, ORANGE, 6),
        ("line", ((50, 10), (50, 40)), DARK, 5),
    ],
    "saltshaker": [(*_SHAKER, WHITE), ("bowl-down", 28, 10, 72, 60, SILVER)],
    "peppershaker": [(*_SHAKER, (96, 74, 60)), ("bowl-down", 28, 10, 72, 60, SILVER)],
    # washing
    "dishsponge": [("box", 8, 34, 92, 80, YELLOW, 8), ("box", 8, 34, 92, 50, GREEN, 6)],
    "scrubbrush": [("box", 8, 36, 92, 56, WOOD, 8), ("box", 16, 56, 84, 82, SKY)],
    "soapbar": [("box", 8, 36, 92, 82, PINK, 20), ("box", 28, 50, 72, 68, WHITE, 8)],
    "soapbottle": [
        ("line", ((26, 14), (52, 14), (52, 36)), DARK, 9),
        ("box", 26, 34, 78, 96, LILAC, 10),
        ("box", 34, 54, 70, 80, WHITE),
    ],
    "spraybottle": [
        ("shape", ((20, 6), (70, 6), (70, 22), (40, 22), (20, 16)), RED),
        ("box", 44, 20, 60, 40, DARK),
        ("shape", ((36, 38), (68, 38), (82, 96), (24, 96)), SKY),
    ],
    "cloth": [("shape", ((8, 24), (92, 16), (84, 88), (16, 82)), ORANGE), ("line", ((20, 50), (86, 46)), WHITE, 7)],
    "handtowel": [("box", 22, 8, 78, 94, TEAL, 4), ("box", 22, 68, 78, 80, WHITE)],
    "towel": [("box", 10, 6, 90, 96, PURPLE, 4), ("box", 10, 66, 90, 80, CREAM)],
    "papertowel": [
        ("box", 22, 10, 78, 94, WHITE, 12),
        ("ellipse", 22, 4, 78, 26, CREAM),
        ("ellipse", 42, 11, 58, 19, BROWN),
    ],
    "toiletpaper": [
        ("ellipse", 8, 14, 80, 86, WHITE),
        ("box", 62, 44, 94, 94, WHITE),
        ("ellipse", 32, 38, 56, 62, BROWN),
    ],
    "tissuebox": [("shape", ((34, 50), (50, 8), (60, 26), (70, 50)), WHITE), ("box", 8, 46, 92, 92, SKY, 4)],
    "candle": [
        ("ellipse", 40, 2, 60, 34, ORANGE),
        ("line", ((50, 28), (50, 42)), DARK, 4),
        ("box", 32, 40, 68, 96, CREAM, 3),
    ],
    "plunger": [("box", 45, 4, 55, 60, WOOD), ("bowl-down", 18, 48, 82, 134, RED)],
    # desk and sofa
    "book": [("box", 14, 10, 86, 92, (178, 52, 60), 4), ("box", 26, 10, 30, 92, DARK), ("box", 40, 28, 76, 44, GOLD)],
    "newspaper": [
        ("box", 8, 12, 92, 90, (226, 224, 214)),
        ("box", 16, 20, 84, 32, DARK),
        ("box", 16, 42, 46, 82, GREY),
        ("line", ((54, 46), (84, 46)), GREY, 5),
        ("line", ((54, 62), (84, 62)), GREY, 5),
        ("line", ((54, 78), (84, 78)), GREY, 5),
    ],
    "pen": [("line", ((16, 88), (80, 18)), BLUE, 15), ("line", ((70, 28), (90, 8)), NAVY, 15)],
    "pencil": [("line", ((24, 78), (88, 12)), YELLOW, 15), ("shape", ((10, 94), (18, 72), (32, 86)), CREAM)],
    "cd": [("ellipse", 8, 8, 92, 92, SILVER), ("ellipse", 26, 26, 74, 74, LILAC), ("ellipse", 40, 40, 60, 60, WHITE)],
    "keychain": [
        ("bow", 8, 8, 52, 52, 0, 360, GOLD, 9),
        ("line", ((44, 44), (90, 90)), GOLD, 11),
        ("line", ((72, 72), (86, 58)), GOLD, 9),
    ],
    "cellphone": [("box", 26, 4, 74, 96, DARK, 10), ("box", 32, 16, 68, 80, SKY)],
    "creditcard": [("box", 6, 22, 94, 78, GREEN, 8), ("box", 6, 34, 94, 46, DARK), ("box", 16, 56, 44, 68, GOLD)],
    "remotecontrol": [
        ("box", 34, 4, 66, 96, DARK, 10),
        ("ellipse", 42, 12, 58, 28, RED),
        ("box", 41, 38, 59, 46, WHITE),
        ("box", 41, 54, 59, 62, WHITE),
        ("box", 41, 70, 59, 78, WHITE),
    ],
    "laptop": [
        ("box", 16, 14, 84, 66, DARK, 4),
        ("box", 22, 20, 78, 60, SKY),
        ("shape", ((4, 88), (16, 68), (84, 68), (96, 88)), SILVER),
    ],
    "alarmclock": [
        ("ellipse", 14, 6, 42, 32, GOLD),
        ("ellipse", 58, 6, 86, 32, GOLD),
        ("ellipse", 12, 18, 88, 94, RED),
        ("ellipse", 22, 28, 78, 84, WHITE),
        ("line", ((50, 56), (50, 36)), DARK, 6),
        ("line", ((50, 56), (64, 62)), DARK, 6),
    ],
    "watch": [("box", 38, 2, 62, 98, BROWN, 6), ("ellipse", 24, 26, 76, 76, GOLD), ("ellipse", 34, 36, 66, 66, WHITE)],
    "pillow": [("shape", ((6, 24), (50, 32), (94, 24), (86, 54), (94, 86), (50, 78), (6, 86), (14, 54)), LILAC)],
    "basketball": [
        ("ellipse", 8, 8, 92, 92, ORANGE),
        ("line", ((50, 8), (50, 92)), DARK, 5),
        ("line", ((8, 50), (92, 50)), DARK, 5),
    ],
    "baseballbat": [("line", ((14, 88), (50, 50)), WOOD, 11), ("line", ((46, 54), (86, 14)), WOOD, 22)],
    "tennisracket": [
        ("line", ((52, 52), (86, 92)), BROWN, 11),
        ("bow", 8, 4, 68, 64, 0, 360, RED, 8),
        ("ellipse", 16, 12, 60, 56, WHITE),
    ],
    "teddybear": [
        ("ellipse", 18, 4, 42, 28, BROWN),
        ("ellipse", 58, 4, 82, 28, BROWN),
        ("ellipse", 22, 46, 78, 98, WOOD),
        ("ellipse", 22, 8, 78, 60, BROWN),
        ("ellipse", 38, 34, 62, 54, CREAM),
    ],
    "box": [
        ("box", 10, 38, 90, 92, WOOD),
        ("shape", ((10, 38), (0, 18), (40, 26), (50, 38)), (220, 172, 112)),
        ("shape", ((90, 38), (100, 18), (60, 26), (50, 38)), (220, 172, 112)),
    ],
    "statue": [
        ("ellipse", 32, 4, 68, 40, GOLD),
        ("shape", ((40, 36), (60, 36), (78, 74), (22, 74)), GOLD),
        ("box", 18, 74, 82, 94, DARK),
    ],
    "vase": [("shape", ((36, 6), (64, 6), (58, 26), (82, 60), (64, 94), (36, 94), (18, 60), (42, 26)), PURPLE)],
    "houseplant": [
        ("ellipse", 6, 12, 54, 52, GREEN),
        ("ellipse", 46, 12, 94, 52, GREEN),
        ("ellipse", 30, 2, 70, 54, LIME),
        ("shape", ((26, 54), (74, 54), (66, 96), (34, 96)), (198, 96, 58)),
    ],
    "wateringcan": [
        ("bow", 40, 6, 92, 66, 180, 360, GREEN, 8),
        ("line", ((40, 66), (8, 26)), GREEN, 10),
        ("box", 36, 40, 90, 92, GREEN, 6),
    ],
    "television": [("box", 4, 12, 96, 76, DARK, 4), ("box", 12, 20, 88, 68, NAVY), ("box", 36, 78, 64, 90, DARK)],
    "desklamp": [
        ("box", 22, 84, 78, 96, DARK, 5),
        ("line", ((50, 86), (30, 50), (52, 22)), GREY, 8),
        ("shape", ((46, 8), (74, 22), (92, 54), (40, 34)), TEAL),
    ],
    "floorlamp": [
        ("box", 26, 88, 74, 98, DARK, 4),
        ("box", 46, 34, 54, 90, GREY),
        ("shape", ((34, 4), (66, 4), (82, 40), (18, 40)), TEAL),
    ],
}
ICONS["toiletpaperroll"] = ICONS["toiletpaper"]
ICONS["papertowelroll"] = ICONS["papertowel"]

LIT: dict[str, list[Shape]] = {
    "desklamp": [
        ("shape", ((42, 36), (90, 56), (96, 84), (6, 84)), (255, 240, 130)),
        *ICONS["desklamp"][:2],
        (*ICONS["desklamp"][2][:2], YELLOW),
    ],
    "floorlamp": [
        ("shape", ((18, 42), (82, 42), (98, 96), (2, 96)), (255, 240, 130)),
        *ICONS["floorlamp"][:2],
        (*ICONS["floorlamp"][2][:2], YELLOW),
    ],
}

# badges for an object's states
BADGES: dict[str, list[Shape]] = {
    "hot": [
        ("ellipse", 0, 0, 100, 100, RED),
        ("shape", ((50, 8), (76, 50), (66, 84), (34, 84), (24, 50), (40, 44)), YELLOW),
    ],
    "cool": [
        ("ellipse", 0, 0, 100, 100, BLUE),
        ("line", ((50, 12), (50, 88)), WHITE, 11),
        ("line", ((17, 31), (83, 69)), WHITE, 11),
        ("line", ((83, 31), (17, 69)), WHITE, 11),
    ],
    "clean": [
        ("ellipse", 0, 0, 100, 100, TEAL),
        ("shape", ((50, 6), (60, 40), (94, 50), (60, 60), (50, 94), (40, 60), (6, 50), (40, 40)), WHITE),
    ],
    "sliced": [
        ("ellipse", 0, 0, 100, 100, DARK),
        ("line", ((30, 20), (30, 80)), WHITE, 11),
        ("line", ((50, 20), (50, 80)), WHITE, 11),
        ("line", ((70, 20), (70, 80)), WHITE, 11),
    ],
}


def darker(colour: Colour, share: float = 0.45) -> Colour:
    red, green, blue = (round(channel * (1 - share)) for channel in colour)
    return red, green, blue


@lru_cache(maxsize=512)
def icon(kind: str, size: int, lit: bool = False) -> Image.Image:
    """The object as an RGBA image of `size` × `size`."""
    shapes = LIT.get(kind, ICONS.get(kind)) if lit else ICONS.get(kind)
    return _render(tuple(shapes) if shapes else _unknown(kind), size)


@lru_cache(maxsize=64)
def badge(state: str, size: int) -> Image.Image:
    return _render(tuple(BADGES[state]), size)


def _unknown(kind: str) -> tuple[Shape, ...]:
    """A box in the kind's own colour with its first letter, for kinds without an icon."""
    code = zlib.crc32(kind.encode())
    colour = (90 + code % 130, 90 + code // 7 % 130, 90 + code // 49 % 130)
    return (("box", 10, 10, 90, 90, colour, 12), ("letter", kind[:1].upper() or "?"))


def _render(shapes: tuple[Shape, ...], size: int) -> Image.Image:
    scale = size * SUPERSAMPLE / 100
    board = Image.new("RGBA", (size * SUPERSAMPLE, size * SUPERSAMPLE))
    draw = ImageDraw.Draw(board)
    for shape in shapes:
        draw_shape(draw, shape, scale)
    # A light rim, i.e. a slightly larger outline, makes the object stand out from any background.
    small = board.resize((size, size), Image.Resampling.LANCZOS)
    halo = small.getchannel("A").filter(ImageFilter.MaxFilter(3)).point(lambda alpha: round(alpha * 0.8))
    rim = Image.new("RGBA", small.size, (*WHITE, 0))
    rim.putalpha(halo)
    rim.alpha_composite(small)
    return rim


def draw_shape(draw: ImageDraw.ImageDraw, shape: Shape, scale: float) -> None:
    name, *rest = shape
    width = max(1, round(OUTLINE * scale))
    if name == "letter":
        font = ImageFont.load_default(round(56 * scale))
        draw.text((50 * scale, 50 * scale), rest[0], WHITE, font, anchor="mm")
    elif name == "shape":
        points, colour = rest
        scaled = [(x * scale, y * scale) for x, y in points]
        draw.polygon(scaled, fill=colour)
        draw.line([*scaled, *scaled[:2]], fill=darker(colour), width=width, joint="curve")
    elif name == "line":
        points, colour, thickness = rest
        scaled = [(x * scale, y * scale) for x, y in points]
        outer = round((thickness + OUTLINE) * scale)
        draw.line(scaled, fill=darker(colour), width=outer, joint="curve")
        draw.line(scaled, fill=colour, width=max(1, outer - 2 * width), joint="curve")
    else:
        box, colour, more = [value * scale for value in rest[:4]], rest[4], rest[5:]
        if name == "ellipse":
            draw.ellipse(box, colour, darker(colour), width)
        elif name == "box":
            draw.rounded_rectangle(box, (more[0] if more else 0) * scale, colour, darker(colour), width)
        elif name == "bowl":
            draw.chord(box, 0, 180, colour, darker(colour), width)
        elif name == "bowl-down":
            draw.chord(box, 180, 360, colour, darker(colour), width)
        else:
            start, end, colour, thickness = rest[4:]
            draw.arc(box, start, end, darker(colour), round((thickness + OUTLINE) * scale))
            inset = width
            inner = [box[0] + inset, box[1] + inset, box[2] - inset, box[3] - inset]
            draw.arc(inner, start, end, colour, max(1, round((thickness + OUTLINE) * scale) - 2 * inset))
