"""The cards: names, numbers, and faces that can be told apart even when the picture is scaled down."""

import itertools

import numpy as np
import pytest
from PIL import Image

from trl_gtr.environments.cards import canvas, cards

NAMES = [suit + rank for suit in "HSDC" for rank in "A23456789TJQK"]


@pytest.mark.parametrize(
    ("name", "rank", "printed", "words"),
    [
        ("HA", 1, "A", "ace of hearts"),
        ("S2", 2, "2", "2 of spades"),
        ("DT", 10, "10", "10 of diamonds"),
        ("CJ", 11, "J", "jack of clubs"),
        ("HQ", 12, "Q", "queen of hearts"),
        ("SK", 13, "K", "king of spades"),
    ],
)
def test_names(name, rank, printed, words):
    assert cards.check_card(name) == name
    assert cards.card_rank(name) == rank
    assert cards.card_name(name[0], rank) == name
    assert cards.printed_rank(name) == printed
    assert cards.in_words(name) == words


def test_there_are_52_cards():
    assert sorted(cards.card_name(suit, rank) for suit in cards.SUITS for rank in range(1, 14)) == sorted(NAMES)


@pytest.mark.parametrize("name", ["", "H", "H1", "H10", "4H", "h4", "XA", "HTT", 4, None, ["H4"]])
def test_no_such_card(name):
    with pytest.raises(ValueError, match=r"A card is its suit \(H, S, D, C\) and its rank \(A, 2, .*, K\)"):
        cards.check_card(name)


def shrunk(picture):
    """As a card looks when the 300×300 observation is scaled to 96×96."""
    height, width = picture.shape[:2]
    size = (round(width * 96 / 300), round(height * 96 / 300))
    return np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC)).astype(int)


def test_all_faces_differ_clearly_even_when_shrunk():
    faces = {name: shrunk(cards.card_face(name)) for name in NAMES}
    assert faces["HA"].shape == (35, 22, 3)
    for one, other in itertools.combinations(NAMES, 2):
        clearly = (np.abs(faces[one] - faces[other]).max(axis=2) > 80).sum()
        assert clearly >= 15, (one, other, clearly)


@pytest.mark.parametrize("name", NAMES)
def test_hearts_and_diamonds_are_red_the_others_black(name):
    face = cards.card_face(name).astype(int)
    red, green = face[..., 0], face[..., 1]
    reds = ((red - green) > 120).sum()
    blacks = (face.max(axis=2) < 60).sum()
    assert (reds > 800 and blacks < 20) if name[0] in "HD" else (blacks > 800 and reds == 0)


def test_the_back_tells_nothing_and_looks_like_no_face():
    back = cards.card_back()
    assert back.shape == cards.card_face("HA").shape == (108, 69, 3)
    blue = (back[..., 2].astype(int) - back[..., 0] > 60).mean()
    assert blue > 0.6
    assert all(((face := cards.card_face(name))[..., 2].astype(int) - face[..., 0] > 60).sum() == 0 for name in NAMES)


def test_faces_can_be_had_in_any_size():
    for width, height in [(86, 134), (46, 72), (27, 43), (12, 20)]:
        assert cards.card_face("ST", width, height).shape == (height, width, 3)
        assert cards.card_back(width, height).shape == (height, width, 3)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: cards.card_face("HA"),
        lambda: cards.card_back(),
        lambda: canvas.blank(canvas.FELT),
        lambda: canvas.words("Target:", 36, canvas.BLACK, canvas.WHITE),
        lambda: canvas.formula_cell("8", 26, 54),
    ],
)
def test_what_is_kept_is_drawn_once_and_cant_be_changed(draw):
    picture = draw()
    assert picture is draw()
    with pytest.raises(ValueError, match="read-only"):
        picture[0, 0] = 0


ELEMENTS = [*map(str, range(1, 14)), "+", "-", "*", "/", "(", ")", " "]


@pytest.mark.parametrize(("width", "height"), [(26, 54), (49, 108)])
def test_formula_elements_differ_clearly_even_when_shrunk(width, height):
    cells = {element: shrunk(canvas.formula_cell(element, width, height)) for element in ELEMENTS}
    for one, other in itertools.combinations(ELEMENTS, 2):
        clearly = (np.abs(cells[one] - cells[other]).max(axis=2) > 60).sum()
        assert clearly >= 6, (one, other, clearly)


def test_lettering_has_the_height_that_was_asked_for_and_is_squeezed_to_fit():
    assert canvas.lettering("H", 40).height == pytest.approx(40, abs=1)
    assert canvas.lettering("H", 12).height == pytest.approx(12, abs=1)
    assert canvas.lettering("g", 40).height > 44  # hangs below the line
    assert canvas.lettering("8888", 40, max_width=30).width == 30
    assert canvas.lettering("8", 40, max_width=100).width < 40


def test_a_picture_in_the_terminal():
    picture = np.zeros((300, 300, 3), np.uint8)
    picture[:150] = (255, 0, 0)
    lines = canvas.in_terminal(picture).splitlines()
    assert len(lines) == 48
    assert all(line.count("▀") == 96 and line.endswith("\x1b[0m") for line in lines)
    assert "38;2;255;0;0" in lines[0]
    assert "48;2;0;0;0" in lines[-1]
