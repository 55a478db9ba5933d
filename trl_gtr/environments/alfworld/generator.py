"""Bundled games: `make_game(task_type, seed)` writes a whole game in ALFWorld's own language.

Rooms, things and tasks are ours; the rules (PDDL domain), the wording (grammar) and the goals' formulas are read from
the installed `alfworld` package. A game is a pure function of its task type and seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from .goals import TASK_TYPES
from .installed import import_package
from .rooms import LAYOUTS, ROOM_KINDS, UNSEEN_LAYOUTS, Layout, make_layout

SEEDS = 60
"""Bundled games of each task type."""
SPLITS = ("train", "valid_seen", "valid_unseen")

OPENABLE = {"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"}
_EVERYWHERE = ("kitchen", "living room", "bedroom", "bathroom")
_ROOMS = {
    "pick_and_place_simple": _EVERYWHERE,
    "pick_two_obj_and_place": _EVERYWHERE,
    "look_at_obj_in_light": ("bedroom", "living room"),
    "pick_clean_then_place_in_recep": ("kitchen", "bathroom"),
    "pick_heat_then_place_in_recep": ("kitchen",),
    "pick_cool_then_place_in_recep": ("kitchen",),
}
_PROPERTY = {
    "pick_clean_then_place_in_recep": "Cleanable",
    "pick_heat_then_place_in_recep": "Heatable",
    "pick_cool_then_place_in_recep": "Coolable",
}
_LAMPS = {"bedroom": "DeskLamp", "living room": "FloorLamp"}
_LAMP_STANDS = {"Desk", "SideTable", "Dresser", "CoffeeTable", "Shelf", "TVStand"}
# What nobody would put a thing into for good, though the rules allow it.
_ODD_TARGETS = {"SinkBasin", "BathtubBasin", "StoveBurner", "HandTowelHolder", "ToiletPaperHanger"}


def split_of(seed: int) -> str:
    """The split of a bundled game: by its layout, and among seen layouts by its seed."""
    if seed % LAYOUTS in UNSEEN_LAYOUTS:
        return "valid_unseen"
    return "valid_seen" if seed // LAYOUTS == SEEDS // LAYOUTS - 1 else "train"


def bundled_games(split: str) -> list[tuple[str, int]]:
    """Task type and seed of every bundled game of a split."""
    return [(task_type, seed) for task_type in TASK_TYPES for seed in range(SEEDS) if split_of(seed) == split]


def layout_of(task_type: str, seed: int) -> Layout:
    rooms = _ROOMS[task_type]
    return make_layout(rooms[(seed + seed // LAYOUTS) % len(rooms)], seed % LAYOUTS)


@dataclass(frozen=True)
class Rules:
    """What the installed package lays down."""

    domain: str
    grammar: str
    goals: dict[str, Any]
    holds: dict[str, set[str]]
    """Kind of receptacle → kinds of things that go into it."""
    properties: dict[str, set[str]]


@lru_cache(maxsize=1)
def rules() -> Rules:
    import_package()
    from alfworld.gen import constants, goal_library

    data = resources.files("alfworld") / "data"
    return Rules(
        domain=(data / "alfred.pddl").read_text(),
        grammar=(data / "alfred.twl2").read_text(),
        goals=goal_library.gdict,
        holds={kind: set(things) for kind, things in constants.VAL_RECEPTACLE_OBJECTS.items()},
        properties=constants.VAL_ACTION_OBJECTS,
    )


@lru_cache(maxsize=256)
def make_game(task_type: str, seed: int) -> dict[str, Any]:
    """A game in the form of a `game.tw-pddl` file. `seed` may be any number; the bundled ones are below `SEEDS`."""
    if task_type not in TASK_TYPES:
        raise ValueError(f"There is no task type {task_type!r}; the six are {', '.join(TASK_TYPES)}.")
    game_rules, layout = rules(), layout_of(task_type, seed)
    rng = random.Random(f"{task_type}/{seed}")
    target, receptacle = _choose_task(task_type, layout, rng)
    toggle = _LAMPS[layout.kind] if task_type == "look_at_obj_in_light" else ""
    things = _furnish(layout, target, receptacle, toggle, 2 if task_type == "pick_two_obj_and_place" else 1, rng)
    words = {"obj": target, "recep": receptacle, "toggle": toggle}
    goal = game_rules.goals[task_type]["pddl"].format(**words).replace("#", "-")
    template = rng.choice(sorted(game_rules.goals[task_type]["templates"]))
    task = template.format(**{key: word.lower() for key, word in words.items()})
    return {
        "pddl_domain": game_rules.domain,
        "grammar": game_rules.grammar.replace("UNKNOWN GOAL", task),
        "pddl_problem": _problem(f"{task_type}_{seed}", layout, things) + goal,
        "solvable": True,
        "walkthrough": None,
    }


def _choose_task(task_type: str, layout: Layout, rng: random.Random) -> tuple[str, str]:
    """The thing that the task is about, and the kind of receptacle it belongs into."""
    game_rules = rules()
    wanted = game_rules.properties.get(_PROPERTY.get(task_type, ""), set(ROOM_KINDS[layout.kind].objects))
    choices = [
        (thing, receptacle)
        for thing in ROOM_KINDS[layout.kind].objects
        for receptacle in sorted(layout.kinds - _ODD_TARGETS)
        # The thing must have somewhere else to be at first.
        if thing in wanted and thing in game_rules.holds[receptacle] and len(_homes(layout, thing, {receptacle})) >= 2
    ]
    thing = rng.choice(sorted({thing for thing, _ in choices}))
    receptacle = rng.choice([receptacle for name, receptacle in choices if name == thing])
    return thing, "" if task_type == "look_at_obj_in_light" else receptacle


def _homes(layout: Layout, thing: str, without: set[str]) -> list[str]:
    """The receptacles that a thing may be in."""
    holds = rules().holds
    return [
        receptacle_id(kind, number)
        for kind, number, _ in layout.receptacles
        if kind not in without and thing in holds[kind]
    ]


def _furnish(
    layout: Layout, target: str, receptacle: str, toggle: str, count: int, rng: random.Random
) -> list[tuple[str, str, str]]:
    """The things of the room: kind, id and the receptacle that each is in."""
    others = [thing for thing in ROOM_KINDS[layout.kind].objects if thing != target]
    kinds = rng.sample(others, rng.randint(5, min(8, len(others))))
    kinds += rng.sample(kinds, 2) + [target] * (count + rng.randint(0, 1))
    things, numbers = [], dict.fromkeys(kinds, 0)
    for kind in kinds:
        homes = _homes(layout, kind, {receptacle} if kind == target else set())
        if homes:
            numbers[kind] += 1
            things.append((kind, f"{kind}_bar_{numbers[kind]}", rng.choice(homes)))
    if toggle:
        stands = [receptacle_id(kind, number) for kind, number, _ in layout.receptacles if kind in _LAMP_STANDS]
        things.append((toggle, f"{toggle}_bar_1", rng.choice(stands)))
    return things


def receptacle_id(kind: str, number: int) -> str:
    """ALFWorld makes names of ids; a basin is written as part of its sink or tub."""
    if kind.endswith("Basin"):
        return f"{kind.removesuffix('Basin')}_bar_{number}_bar_{kind}"
    return f"{kind}_bar_{number}"


def _problem(name: str, layout: Layout, things: list[tuple[str, str, str]]) -> str:
    """The game's state at the start in PDDL, up to its goal."""
    game_rules = rules()
    places = {receptacle_id(kind, number): f"loc_bar_{place}" for kind, number, place in layout.receptacles}
    kinds = {receptacle_id(kind, number): kind for kind, number, _ in layout.receptacles}
    # The domain's actions name some types, whether the room has any or not.
    receptacle_kinds = sorted({*kinds.values(), "SinkBasin", "Microwave", "Fridge"})
    thing_kinds = sorted({kind for kind, _, _ in things} | {"Knife", "ButterKnife"})
    objects = [
        "agent1 - agent",
        *(f"{kind}Type - rtype" for kind in receptacle_kinds),
        *(f"{kind}Type - otype" for kind in thing_kinds),
        *(f"{place} - location" for place in sorted({"loc_bar_0", *places.values()})),
        *(f"{receptacle} - receptacle" for receptacle in places),
        *(f"{thing} - object" for _, thing, _ in things),
    ]
    facts = ["(= (total-cost) 0)", "(atLocation agent1 loc_bar_0)"]
    for receptacle, place in places.items():
        facts += [
            f"(receptacleType {receptacle} {kinds[receptacle]}Type)",
            f"(receptacleAtLocation {receptacle} {place})",
        ]
        if kinds[receptacle] in OPENABLE:
            facts.append(f"(openable {receptacle})")
    facts += [
        f"(canContain {receptacle}Type {thing}Type)"
        for receptacle in receptacle_kinds
        for thing in thing_kinds
        if thing in game_rules.holds[receptacle]
    ]
    for kind, thing, receptacle in things:
        facts += [
            f"(objectType {thing} {kind}Type)",
            f"(inReceptacle {thing} {receptacle})",
            f"(objectAtLocation {thing} {places[receptacle]})",
            f"({'toggleable' if kind in game_rules.properties['Toggleable'] else 'pickupable'} {thing})",
        ]
        for predicate in ("cleanable", "heatable", "coolable", "sliceable"):
            if kind in game_rules.properties[predicate.capitalize()]:
                facts.append(f"({predicate} {thing})")
    lines = [f"(define (problem {name})", "(:domain alfred)", "(:objects", *objects, ")", "(:init", *facts, ")"]
    return "\n".join(lines) + "\n"
