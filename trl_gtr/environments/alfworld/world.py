"""The state of a room, read from the engine's facts, and what is visible from inside it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STATES = {"isclean": "clean", "ishot": "hot", "iscool": "cool", "istoggled": "on", "issliced": "sliced"}
"""Predicate → the word for it. A lamp that was ever used counts as on, as in the game's texts and goals."""


def kind_of(name: str) -> str:
    """`"mug 1"` → `"mug"`."""
    return name.rsplit(" ", 1)[0]


def natural(name: str) -> tuple[str, int]:
    """Sort key that puts "drawer 2" before "drawer 10"."""
    kind, _, number = name.rpartition(" ")
    return (kind, int(number)) if number.isdigit() else (name, 0)


@dataclass(frozen=True)
class World:
    """Everything that is true in the room, hidden or not. Names are ALFWorld's ("mug 1")."""

    location: str
    locations: Mapping[str, str]
    """Receptacle → its place. Several may share a place: going to one puts the agent in front of all of them."""
    contents: Mapping[str, Sequence[str]]
    """Receptacle → objects in or on it; every receptacle is a key."""
    openable: frozenset[str]
    opened: frozenset[str]
    holding: str | None
    states: Mapping[str, frozenset[str]]
    """Object → words of `STATES`; objects without any are left out."""
    can_contain: frozenset[tuple[str, str]]
    """Compatible pairs of receptacle kind and object kind."""

    @property
    def here(self) -> list[str]:
        """The receptacles in front of the agent; none at the start."""
        return [name for name, place in self.locations.items() if place == self.location]

    def closed(self, receptacle: str) -> bool:
        return receptacle in self.openable and receptacle not in self.opened

    def accepts(self, receptacle: str, thing: str) -> bool:
        return (kind_of(receptacle), kind_of(thing)) in self.can_contain

    def view(self) -> dict[str, Any]:
        """What is visible from here, as plain values; nothing behind a closed door or elsewhere.

        - `room`: the names of all receptacles, which are visible at the start;
        - `here`: `[name, "open" | "closed" | "", contents]` of each receptacle in front, `""` if it has no door;
        - `holding`: the object in the hand, or "";
        - `states`: `[object, words]` of the objects in view or in the hand that have any.
        """
        here = [
            [name, "closed", []]
            if self.closed(name)
            else [name, "open" if name in self.openable else "", list(self.contents[name])]
            for name in self.here
        ]
        seen = [thing for _, _, contents in here for thing in contents] + ([self.holding] if self.holding else [])
        states = [[thing, sorted(self.states[thing])] for thing in seen if thing in self.states]
        return {"room": list(self.locations), "here": here, "holding": self.holding or "", "states": states}


class WorldReader:
    """Reads the world from TextWorld's state. Facts that no action can change are read once per game."""

    def __init__(self, state: Any, entities: Mapping[str, Any]) -> None:
        self._state = state
        self._names = {key: entity.name.strip() for key, entity in entities.items()}
        places = {receptacle: place for receptacle, place in self._facts("receptacleatlocation")}  # noqa: C416
        self._locations = {receptacle: places[receptacle] for receptacle in sorted(places, key=natural)}
        self._openable = frozenset(name for (name,) in self._facts("openable"))
        self._can_contain = frozenset(
            (_without_type(receptacle), _without_type(thing)) for receptacle, thing in self._facts("cancontain")
        )

    def read(self) -> World:
        contents: dict[str, list[str]] = {receptacle: [] for receptacle in self._locations}
        for thing, receptacle in self._facts("inreceptacle"):
            contents[receptacle].append(thing)
        states: dict[str, set[str]] = {}
        for predicate, word in STATES.items():
            for (thing,) in self._facts(predicate):
                states.setdefault(thing, set()).add(word)
        return World(
            location=next(place for _, place in self._facts("atlocation")),
            locations=self._locations,
            contents={receptacle: sorted(things, key=natural) for receptacle, things in contents.items()},
            openable=self._openable,
            opened=frozenset(name for (name,) in self._facts("opened")),
            holding=next((thing for _, thing in self._facts("holds")), None),
            states={thing: frozenset(words) for thing, words in states.items()},
            can_contain=self._can_contain,
        )

    def _facts(self, predicate: str) -> Iterator[tuple[str, ...]]:
        """The argument names of each fact with this predicate."""
        names = self._names
        for fact in self._state.facts_named(predicate):
            yield tuple(names[variable.name] for variable in fact.arguments)


def _without_type(name: str) -> str:
    """`"mugtype"` → `"mug"`; the facts name kinds with this suffix."""
    return re.sub(r"type$", "", name)
