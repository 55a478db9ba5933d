"""Images of the receptacles, open or closed, with the area for their contents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from PIL import Image, ImageDraw

from .icons import CREAM, DARK, GOLD, GREY, SILVER, SKY, WHITE, Colour, darker

SUPERSAMPLE = 2
INSIDE: Colour = (58, 50, 48)
"""The dark inside of an open cupboard."""

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Furniture:
    image: Image.Image
    """RGBA."""
    inside: tuple[int, int, int, int]
    """Left, top, right, bottom of the area for the contents, in pixels."""
    dark: bool
    """Whether the contents are on a dark background."""


class Board:
    """Draws in percent of its width and height."""

    def __init__(self, width: int, height: int) -> None:
        self.size = (width * SUPERSAMPLE, height * SUPERSAMPLE)
        self.image = Image.new("RGBA", self.size)
        self.draw = ImageDraw.Draw(self.image)
        self.line = max(2, round(min(self.size) / 70))

    def at(self, *percents: float) -> list[float]:
        return [percent / 100 * (self.size[i % 2] - 1) for i, percent in enumerate(percents)]

    def box(self, left: float, top: float, right: float, bottom: float, colour: Colour, corner: float = 0) -> None:
        radius = corner / 100 * min(self.size)
        self.draw.rounded_rectangle(self.at(left, top, right, bottom), radius, colour, darker(colour), self.line)

    def ellipse(self, left: float, top: float, right: float, bottom: float, colour: Colour) -> None:
        self.draw.ellipse(self.at(left, top, right, bottom), colour, darker(colour), self.line)

    def shape(self, colour: Colour, *points: float) -> None:
        scaled = self.at(*points)
        pairs = list(zip(scaled[::2], scaled[1::2], strict=True))
        self.draw.polygon(pairs, colour)
        self.draw.line([*pairs, *pairs[:2]], darker(colour), self.line, joint="curve")

    def stroke(self, colour: Colour, thickness: float, *points: float) -> None:
        self.draw.line(self.at(*points), colour, max(1, round(thickness / 100 * min(self.size))), joint="curve")

    def ring(self, left: float, top: float, right: float, bottom: float, colour: Colour, thickness: float) -> None:
        width = max(1, round(thickness / 100 * min(self.size)))
        self.draw.ellipse(self.at(left, top, right, bottom), None, colour, width)


# -- tables, seen from above -----------------------------------------------------------------------------------------


def _top(board: Board, colour: Colour) -> None:
    board.shape(colour, 12, 6, 88, 6, 99, 74, 1, 74)
    board.box(1, 74, 99, 81, darker(colour, 0.2))


def _legs(board: Board, colour: Colour, inset: float = 4) -> None:
    for left in (inset, 92 - inset):
        board.box(left, 80, left + 8, 99, darker(colour, 0.3))


def _fronts(board: Board, colour: Colour, columns: int, rows: int = 1, bottom: float = 99) -> None:
    """Doors or drawers below a table top, each with a knob."""
    width, height = 94 / columns, (bottom - 81) / rows
    for column in range(columns):
        for row in range(rows):
            left, top = 3 + column * width, 81 + row * height
            board.box(left, top, left + width, top + height, colour)
            board.ellipse(left + width / 2 - 2, top + height / 2 - 2, left + width / 2 + 2, top + height / 2 + 2, GOLD)


def _countertop(board: Board) -> None:
    _fronts(board, (236, 226, 206), 3)
    _top(board, (176, 180, 184))


def _dining_table(board: Board) -> None:
    _legs(board, (176, 112, 60))
    _top(board, (196, 130, 72))


def _desk(board: Board) -> None:
    _legs(board, (112, 78, 54), 40)
    _fronts(board, (150, 106, 72), 2, 1, 95)
    _top(board, (166, 118, 80))


def _side_table(board: Board) -> None:
    _legs(board, (220, 184, 130), 18)
    board.box(22, 80, 78, 90, (206, 168, 112))
    _top(board, (232, 200, 148))


def _coffee_table(board: Board) -> None:
    _legs(board, (84, 54, 38), 8)
    _top(board, (112, 74, 52))
    board.shape((168, 204, 206), 20, 12, 80, 12, 90, 66, 10, 66)


def _dresser(board: Board) -> None:
    _fronts(board, (198, 172, 140), 3, 2)
    _top(board, (222, 198, 166))


def _tv_stand(board: Board) -> None:
    _fronts(board, (66, 68, 80), 2)
    _top(board, (88, 90, 104))


def _cart(board: Board) -> None:
    _legs(board, SILVER, 8)
    for left in (8, 80):
        board.ellipse(left, 90, left + 12, 99, DARK)
    _top(board, (206, 218, 224))


def _shelf(board: Board) -> None:
    board.box(2, 4, 98, 96, (214, 190, 156))
    board.box(5, 8, 95, 74, (240, 226, 202))
    board.box(0, 74, 100, 84, (166, 120, 76))
    for left in (14, 78):
        board.shape((128, 90, 56), left, 84, left + 8, 84, left, 96)


def _stove_burner(board: Board) -> None:
    board.box(2, 78, 98, 99, (210, 212, 216))
    for left in (16, 36, 56, 76):
        board.ellipse(left, 83, left + 8, 95, DARK)
    _top(board, (72, 74, 82))
    board.ring(26, 14, 74, 66, (222, 92, 60), 3)
    board.ring(36, 24, 64, 56, (222, 92, 60), 3)


# -- with a door or a drawer front ----------------------------------------------------------------------------------


def _cabinet_closed(board: Board) -> None:
    colour = (182, 122, 68)
    board.box(4, 2, 96, 98, colour)
    for left, knob in ((8, 43), (51, 53)):
        board.box(left, 6, left + 41, 94, (204, 146, 90))
        board.box(left + 7, 14, left + 34, 86, (190, 130, 76))
        board.ellipse(knob, 46, knob + 4, 54, GOLD)


def _cabinet_open(board: Board) -> None:
    board.shape((204, 146, 90), 0, 12, 14, 2, 14, 98, 0, 90)
    board.shape((204, 146, 90), 100, 12, 86, 2, 86, 98, 100, 90)
    board.box(14, 2, 86, 98, (182, 122, 68))
    board.box(17, 6, 83, 94, INSIDE)


def _drawer_closed(board: Board) -> None:
    board.box(3, 8, 97, 94, (150, 106, 70))
    board.box(8, 28, 92, 74, (196, 150, 104))
    board.box(38, 45, 62, 56, GOLD, 4)


def _drawer_open(board: Board) -> None:
    """Pulled out, seen from above."""
    board.shape(INSIDE, 12, 4, 88, 4, 97, 80, 3, 80)
    board.shape((150, 106, 70), 12, 4, 3, 80, 0, 80, 9, 4)
    board.shape((150, 106, 70), 88, 4, 97, 80, 100, 80, 91, 4)
    board.box(0, 78, 100, 99, (196, 150, 104))
    board.box(38, 85, 62, 93, GOLD, 4)


def _fridge_closed(board: Board) -> None:
    colour = (222, 232, 238)
    board.box(14, 1, 86, 99, colour, 5)
    board.stroke(GREY, 2, 14, 34, 86, 34)
    board.box(20, 12, 26, 30, GREY, 2)
    board.box(20, 40, 26, 66, GREY, 2)


def _fridge_open(board: Board) -> None:
    board.box(6, 1, 82, 99, (222, 232, 238), 4)
    board.box(10, 5, 78, 95, (196, 224, 240))
    for level in (34, 64):
        board.stroke(WHITE, 2, 10, level, 78, level)
    board.shape((206, 218, 226), 82, 1, 99, 9, 99, 91, 82, 99)


def _microwave_closed(board: Board) -> None:
    board.box(2, 14, 98, 90, (70, 72, 80), 5)
    board.box(8, 22, 70, 82, (36, 38, 48), 4)
    board.box(74, 24, 94, 38, (90, 220, 140))
    for row in (46, 58, 70):
        board.box(76, row, 92, row + 7, SILVER)


def _microwave_open(board: Board) -> None:
    board.box(12, 8, 99, 94, (70, 72, 80), 4)
    board.box(18, 14, 80, 88, (150, 142, 120), 3)
    board.box(83, 16, 97, 30, (90, 220, 140))
    board.shape((44, 46, 56), 12, 8, 1, 16, 1, 100, 12, 94)


def _safe_closed(board: Board) -> None:
    board.box(8, 4, 92, 96, (96, 104, 116), 4)
    board.box(16, 12, 84, 88, (122, 130, 142), 3)
    board.ellipse(36, 34, 64, 66, SILVER)
    board.stroke(DARK, 4, 50, 50, 50, 36)


def _safe_open(board: Board) -> None:
    board.box(4, 3, 84, 97, (96, 104, 116), 4)
    board.box(10, 9, 78, 91, INSIDE)
    board.shape((122, 130, 142), 84, 3, 99, 12, 99, 90, 84, 97)


# -- seats and beds --------------------------------------------------------------------------------------------------


def _bed(board: Board) -> None:
    board.box(3, 2, 97, 40, (140, 92, 58), 4)
    board.shape((116, 150, 206), 8, 20, 92, 20, 99, 90, 1, 90)
    board.shape((238, 240, 246), 10, 20, 90, 20, 92, 36, 8, 36)
    board.box(1, 88, 99, 98, (92, 122, 178))


def _seat(board: Board, colour: Colour, arm: float) -> None:
    board.box(arm / 2, 2, 100 - arm / 2, 60, darker(colour, 0.15), 10)
    board.box(arm, 30, 100 - arm, 86, colour, 8)
    for left in (0.0, 100 - arm):
        board.box(left, 24, left + arm, 92, darker(colour, 0.25), 6)
    board.box(arm, 84, 100 - arm, 94, darker(colour, 0.35), 3)


def _sofa(board: Board) -> None:
    _seat(board, (92, 146, 128), 10)
    board.stroke(darker((92, 146, 128)), 1, 50, 32, 50, 84)


def _arm_chair(board: Board) -> None:
    _seat(board, (206, 110, 84), 16)


def _ottoman(board: Board) -> None:
    for left in (12, 80):
        board.box(left, 84, left + 8, 98, DARK)
    board.box(3, 8, 97, 88, (172, 130, 178), 18)


# -- water -----------------------------------------------------------------------------------------------------------


def _sink_basin(board: Board) -> None:
    board.box(0, 22, 100, 98, (206, 212, 216), 4)
    board.box(8, 30, 92, 90, (150, 170, 184), 10)
    board.ellipse(46, 78, 54, 86, DARK)
    board.stroke(GREY, 5, 50, 28, 50, 6, 66, 6, 66, 20)


def _bathtub_basin(board: Board) -> None:
    board.box(0, 14, 100, 90, WHITE, 16)
    board.box(7, 24, 93, 78, (178, 214, 232), 14)
    board.stroke(GREY, 4, 88, 22, 88, 4, 76, 4, 76, 16)
    for left in (8, 84):
        board.box(left, 88, left + 8, 99, GOLD)


def _toilet(board: Board) -> None:
    board.box(12, 2, 88, 52, WHITE, 5)
    board.box(18, 4, 82, 12, (226, 230, 234), 3)
    board.ellipse(20, 48, 80, 92, WHITE)
    board.ellipse(30, 56, 70, 84, (190, 216, 228))


# -- bins, machines, holders -----------------------------------------------------------------------------------------


def _garbage_can(board: Board) -> None:
    board.shape((94, 108, 104), 6, 14, 94, 14, 82, 98, 18, 98)
    board.ellipse(6, 4, 94, 26, (122, 136, 132))
    board.shape((62, 70, 68), 14, 20, 86, 20, 78, 92, 22, 92)


def _laundry_hamper(board: Board) -> None:
    board.shape((216, 190, 146), 6, 10, 94, 10, 86, 98, 14, 98)
    for level in (30, 50, 70):
        board.stroke((184, 154, 108), 2, 8, level, 92, level)
    board.box(2, 4, 98, 16, (196, 166, 120), 5)


def _coffee_machine(board: Board) -> None:
    board.box(10, 2, 90, 30, (54, 56, 64), 6)
    board.box(62, 28, 90, 92, (74, 76, 86))
    board.box(6, 90, 94, 99, (54, 56, 64), 4)
    board.shape((96, 98, 108), 26, 30, 46, 30, 42, 40, 30, 40)
    board.ellipse(68, 10, 78, 22, (222, 72, 60))


def _toaster(board: Board) -> None:
    board.box(6, 36, 94, 92, (206, 210, 216), 14)
    board.box(22, 30, 78, 40, (74, 76, 84), 3)
    board.box(84, 50, 98, 58, DARK, 3)


def _holder(board: Board, colour: Colour) -> None:
    board.box(12, 8, 22, 22, colour, 4)
    board.box(78, 8, 88, 22, colour, 4)
    board.box(12, 12, 88, 18, colour, 2)


def _towel_holder(board: Board) -> None:
    _holder(board, GOLD)


def _hand_towel_holder(board: Board) -> None:
    _holder(board, SILVER)


def _paper_hanger(board: Board) -> None:
    board.box(4, 8, 24, 40, SILVER, 5)
    board.box(14, 20, 96, 28, SILVER, 3)


def _other(board: Board) -> None:
    board.box(4, 6, 96, 94, CREAM, 6)
    board.box(10, 14, 90, 86, SKY, 4)


@dataclass(frozen=True)
class Look:
    draw: Callable[[Board], None]
    inside: Box = (8, 6, 92, 73)
    """Left, top, right, bottom of the area for the contents, in percent."""
    dark: bool = False
    opened: Callable[[Board], None] | None = None
    opened_inside: Box = (18, 7, 82, 93)
    opened_dark: bool = True


LOOKS = {
    "countertop": Look(_countertop),
    "diningtable": Look(_dining_table),
    "desk": Look(_desk),
    "sidetable": Look(_side_table),
    "coffeetable": Look(_coffee_table),
    "dresser": Look(_dresser),
    "tvstand": Look(_tv_stand, dark=True),
    "cart": Look(_cart),
    "shelf": Look(_shelf, (6, 8, 94, 72)),
    "stoveburner": Look(_stove_burner, dark=True),
    "cabinet": Look(_cabinet_closed, (18, 7, 82, 93), opened=_cabinet_open),
    "drawer": Look(_drawer_closed, (10, 10, 90, 90), opened=_drawer_open, opened_inside=(10, 6, 90, 78)),
    "fridge": Look(
        _fridge_closed, (14, 4, 86, 96), opened=_fridge_open, opened_inside=(11, 6, 77, 94), opened_dark=False
    ),
    "microwave": Look(
        _microwave_closed, (10, 20, 70, 84), True, _microwave_open, opened_inside=(19, 15, 79, 87), opened_dark=False
    ),
    "safe": Look(_safe_closed, (10, 9, 78, 91), opened=_safe_open, opened_inside=(11, 10, 77, 90)),
    "bed": Look(_bed, (8, 22, 92, 88)),
    "sofa": Look(_sofa, (11, 20, 89, 84)),
    "armchair": Look(_arm_chair, (17, 20, 83, 84)),
    "ottoman": Look(_ottoman, (8, 12, 92, 84)),
    "sinkbasin": Look(_sink_basin, (10, 32, 90, 88)),
    "bathtubbasin": Look(_bathtub_basin, (10, 24, 90, 78)),
    "toilet": Look(_toilet, (14, 12, 86, 50)),
    "garbagecan": Look(_garbage_can, (20, 20, 80, 92), True),
    "laundryhamper": Look(_laundry_hamper, (14, 18, 86, 94)),
    "coffeemachine": Look(_coffee_machine, (8, 38, 62, 92)),
    "toaster": Look(_toaster, (20, 4, 80, 60)),
    "towelholder": Look(_towel_holder, (14, 16, 86, 96)),
    "handtowelholder": Look(_hand_towel_holder, (14, 16, 86, 96)),
    "toiletpaperhanger": Look(_paper_hanger, (22, 8, 90, 70)),
}
_OTHER = Look(_other, (10, 14, 90, 86))


@lru_cache(maxsize=256)
def furniture(kind: str, width: int, height: int, opened: bool = False) -> Furniture:
    """The receptacle's image. `opened` only matters for receptacles that can be opened."""
    look = LOOKS.get(kind, _OTHER)
    board = Board(width, height)
    if opened and look.opened is not None:
        look.opened(board)
        box, dark = look.opened_inside, look.opened_dark
    else:
        look.draw(board)
        box, dark = look.inside, look.dark
    left, top, right, bottom = (round(percent / 100 * (width, height)[i % 2]) for i, percent in enumerate(box))
    image = board.image.resize((width, height), Image.Resampling.LANCZOS)
    return Furniture(image, (left, top, right, bottom), dark)
