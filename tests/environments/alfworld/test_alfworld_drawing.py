"""The drawn scene: what is there can be told apart, what is hidden isn't there."""

from __future__ import annotations

import statistics
import time
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from trl_gtr.environments.alfworld import drawing
from trl_gtr.environments.alfworld.drawing import draw_scene, room_kind
from trl_gtr.environments.alfworld.furniture import LOOKS
from trl_gtr.environments.alfworld.icons import ICONS, icon
from trl_gtr.environments.alfworld.world import World

ROOM = ["countertop 1", "fridge 1", "microwave 1"]


def view(here: list[Any], holding: str = "", states: list[Any] | None = None) -> dict[str, Any]:
    return {"room": ROOM, "here": here, "holding": holding, "states": states or []}


def differ(first: np.ndarray, second: np.ndarray) -> int:
    """Pixels that differ clearly."""
    return int((np.abs(first.astype(int) - second.astype(int)).max(axis=-1) > 40).sum())


def test_picture_is_an_rgb_array_of_its_own() -> None:
    scene = view([["countertop 1", "", ["mug 1"]]])
    picture = draw_scene(scene)
    assert (picture.shape, picture.dtype) == ((300, 300, 3), np.uint8)
    picture[:] = 0
    assert draw_scene(scene).any()


def world(fridge: list[str], opened: bool, location: str = "b") -> World:
    return World(
        location=location,
        locations={"countertop 1": "a", "fridge 1": "b", "microwave 1": "c"},
        contents={"countertop 1": ["mug 1"], "fridge 1": fridge, "microwave 1": []},
        openable=frozenset({"fridge 1", "microwave 1"}),
        opened=frozenset({"fridge 1"} if opened else ()),
        holding=None,
        states={"egg 1": frozenset({"hot"})},
        can_contain=frozenset(),
    )


def test_nothing_that_is_closed_or_elsewhere_is_in_the_picture() -> None:
    closed = draw_scene(world(["egg 1", "apple 1"], opened=False).view())
    assert np.array_equal(closed, draw_scene(world([], opened=False).view()))
    elsewhere = [draw_scene(world(things, True, "c").view()) for things in ([], ["egg 1", "apple 1"])]
    assert np.array_equal(*elsewhere)
    assert differ(draw_scene(world(["egg 1"], opened=True).view()), draw_scene(world([], opened=True).view())) > 200
    assert "egg 1" not in str(world(["egg 1"], opened=False).view())


def test_open_and_closed_look_different() -> None:
    for kind in ("cabinet", "drawer", "fridge", "microwave", "safe"):
        pictures = [draw_scene(view([[f"{kind} 1", door, []]])) for door in ("open", "closed")]
        assert differ(*pictures) > 3000, kind


def test_the_hand_and_what_was_done_to_a_thing_are_shown() -> None:
    empty = draw_scene(view([]))
    full = draw_scene(view([], "apple 1"))
    assert differ(empty[:250], full[:250]) == 0
    assert differ(empty[250:], full[250:]) > 300
    pictures = [full] + [draw_scene(view([], "apple 1", [["apple 1", [word]]])) for word in ("hot", "cool", "clean")]
    for first, second in combinations(pictures, 2):
        assert differ(first[250:], second[250:]) > 100
    lamps = [
        draw_scene(view([["desk 1", "", ["desklamp 1"]]], "", states)) for states in ([], [["desklamp 1", ["on"]]])
    ]
    assert differ(*lamps) > 300


def test_every_two_things_look_different_even_when_small() -> None:
    """At a third of the size, which is what a small model sees."""
    same = {frozenset(pair) for pair in (("toiletpaper", "toiletpaperroll"), ("papertowel", "papertowelroll"))}
    ground = np.array([176, 180, 184])
    small = {}
    for kind in ICONS:
        pixels = np.asarray(icon(kind, 24)).astype(float)
        alpha = pixels[..., 3:] / 255
        small[kind] = alpha * pixels[..., :3] + (1 - alpha) * ground
    for first, second in combinations(small, 2):
        if frozenset((first, second)) not in same:
            assert np.abs(small[first] - small[second]).mean() > 6, (first, second)


def test_every_two_receptacles_look_different() -> None:
    pictures = {kind: draw_scene(view([[f"{kind} 1", "", []]]))[24:] for kind in LOOKS}
    for first, second in combinations(pictures, 2):
        assert differ(pictures[first], pictures[second]) > 400, (first, second)


def test_unknown_kinds_are_drawn_too() -> None:
    scenes = [draw_scene(view([["gizmo 1", "", [thing]]])) for thing in ("widget 1", "doodad 1")]
    assert differ(*scenes) > 500


@pytest.mark.parametrize(
    ("receptacles", "kind"),
    [
        (["bed 1", "desk 1"], "bedroom"),
        (["toilet 1", "cabinet 1"], "bathroom"),
        (["fridge 1"], "kitchen"),
        (["sofa 1"], "living room"),
    ],
)
def test_room_kind(receptacles: list[str], kind: str) -> None:
    assert room_kind(receptacles) == kind


def test_a_crowded_scene_is_drawn_in_less_than_five_milliseconds() -> None:
    things = [f"{kind} 1" for kind in list(ICONS)[:16]]
    scenes = [
        view([["countertop 1", "", things]], "mug 1", [["mug 1", ["hot", "clean"]]]),
        view([["cabinet 1", "open", things[:3]], ["drawer 1", "closed", []], ["desk 1", "", things[3:8]]]),
        {**view([]), "room": [f"cabinet {number}" for number in range(1, 40)]},
    ]
    times = []
    for _ in range(15):
        for scene in scenes:
            start = time.perf_counter()
            draw_scene(scene)
            times.append(time.perf_counter() - start)
    assert statistics.median(times) < 0.005


def test_no_name_is_squeezed_to_less_than_three_fifths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenes as crowded as those of real games: 16 things on a countertop, and a kitchen of 39 receptacles."""
    squeezed = []
    label = drawing._label

    def measured(text: str, max_width: int, height: int, light: bool = False, plate: bool = False) -> Any:
        whole = drawing._lettering(text, height, light, plate).width
        squeezed.append((min(1.0, max_width / whole), text))
        return label(text, max_width, height, light, plate)

    monkeypatch.setattr(drawing, "_label", measured)
    long = ["papertowelroll", "remotecontrol", "peppershaker", "houseplant", "butterknife"]
    things = [f"{kind} {number}" for number in range(1, 5) for kind in long][:16]
    kitchen = ["coffeemachine 1", *(f"{kind} {n}" for kind in ("cabinet", "stoveburner") for n in range(1, 20))]
    bathroom = ["toiletpaperhanger 1", "handtowelholder 1", *(f"cabinet {n}" for n in range(1, 15)), "toilet 1"]
    draw_scene(view([["countertop 3", "", things]]))
    for room in (kitchen, bathroom):
        draw_scene({**view([]), "room": room})
    assert min(squeezed)[0] >= 0.6, min(squeezed)
    assert drawing.broken("papertowelroll 1") == ("papertowel", "roll 1")
    assert drawing.broken("television 12") == ("television", "12")
