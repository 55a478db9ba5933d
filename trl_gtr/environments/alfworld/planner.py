"""An expert planner.

`plan` is exact for ALFWorld's six task types: it enumerates every sensible choice of objects and receptacles as a list
of commands and returns a shortest one. It plans from the current state, so it recovers from wrong steps. With `known`,
it uses only what has been seen so far and searches for the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from .goals import Goal
from .world import World, kind_of


class Subgoal(NamedTuple):
    """The purpose of the next command: `verb` is find, take, clean, heat, cool, use, put or drop."""

    verb: str
    object: str
    """The kind of object ("mug")."""
    receptacle: str = ""
    """The kind of receptacle to put it in or treat it with."""


@dataclass(frozen=True)
class Plan:
    commands: list[str]
    """To the goal or, while something must still be found, to the next place to search. Empty if there is no way."""
    subgoal: Subgoal | None
    """The first command's sub-goal."""

    def __bool__(self) -> bool:
        return bool(self.commands)


class Walk:
    """A list of commands, with the agent's place and the open receptacles after them."""

    def __init__(self, world: World) -> None:
        self.world, self.location, self.opened = world, world.location, set(world.opened)
        self.commands: list[str] = []
        self.subgoals: list[Subgoal] = []
        self.missing = 0
        """What must still be found before this walk can reach the goal."""

    def do(self, subgoal: Subgoal, command: str) -> None:
        self.commands.append(command)
        self.subgoals.append(subgoal)

    def go(self, subgoal: Subgoal, receptacle: str) -> None:
        if self.world.locations[receptacle] != self.location:
            self.do(subgoal, f"go to {receptacle}")
            self.location = self.world.locations[receptacle]

    def reach_into(self, subgoal: Subgoal, receptacle: str) -> None:
        self.go(subgoal, receptacle)
        if receptacle in self.world.openable and receptacle not in self.opened:
            self.do(subgoal, f"open {receptacle}")
            self.opened.add(receptacle)

    def take(self, thing: str, receptacle: str) -> None:
        self.reach_into(Subgoal("find", kind_of(thing)), receptacle)
        self.do(Subgoal("take", kind_of(thing)), f"take {thing} from {receptacle}")

    def put(self, thing: str, receptacle: str) -> None:
        subgoal = Subgoal("put", kind_of(thing), kind_of(receptacle))
        self.reach_into(subgoal, receptacle)
        self.do(subgoal, f"move {thing} to {receptacle}")

    def treat(self, thing: str, verb: str, receptacle: str) -> None:
        subgoal = Subgoal(verb, kind_of(thing), kind_of(receptacle))
        self.go(subgoal, receptacle)
        self.do(subgoal, f"{verb} {thing} with {receptacle}")

    def use(self, lamp: str, receptacle: str) -> None:
        self.go(Subgoal("find", kind_of(lamp)), receptacle)
        if "on" not in self.world.states.get(lamp, ()):
            self.do(Subgoal("use", kind_of(lamp)), f"use {lamp}")

    def drop(self, thing: str, receptacle: str) -> None:
        subgoal = Subgoal("drop", kind_of(thing))
        self.reach_into(subgoal, receptacle)
        self.do(subgoal, f"move {thing} to {receptacle}")


def plan(
    world: World, goal: Goal, known: Mapping[str, Sequence[str]] | None = None, refused: Collection[str] = ()
) -> Plan:
    """Plan the way to the goal.

    Args:
        known: Receptacle → what was last seen in it, without receptacles never looked into. `None`: everything is
            known.
        refused: Commands known to do nothing. Plans never contain them.
    """
    contents = world.contents if known is None else known
    held = world.holding
    if held is not None and kind_of(held) != goal.object:
        return _shortest(_drops(world, held), refused)
    wanted = goal.toggle if held is not None and goal.toggle else goal.object
    ways = _looks(world, goal, contents) if goal.toggle else _placings(world, goal, contents)
    found = _shortest(ways, refused)
    if found or (held is not None and not goal.toggle):  # with the object in hand, there is nothing to look for
        return found
    return _shortest(_searches(world, wanted, contents), refused)


def _shortest(ways: Iterator[Walk], refused: Collection[str]) -> Plan:
    possible = (way for way in ways if not any(command in refused for command in way.commands))
    best = min(possible, key=lambda way: (way.missing, len(way.commands)), default=None)
    if best is None or not best.commands:
        return Plan([], None)
    return Plan(best.commands, best.subgoals[0])


def _drops(world: World, held: str) -> Iterator[Walk]:
    """Put down an unwanted object."""
    for receptacle in world.contents:
        if world.accepts(receptacle, held):
            walk = Walk(world)
            walk.drop(held, receptacle)
            yield walk


def _searches(world: World, kind: str, contents: Mapping[str, Sequence[str]]) -> Iterator[Walk]:
    """Look into a receptacle that may contain the wanted kind; near and open ones give the shortest walks."""
    unknown = [receptacle for receptacle in world.contents if receptacle not in contents]
    likely = [receptacle for receptacle in unknown if (kind_of(receptacle), kind) in world.can_contain]
    for receptacle in likely or unknown:
        walk = Walk(world)
        walk.reach_into(Subgoal("find", kind), receptacle)
        yield walk


def _looks(world: World, goal: Goal, contents: Mapping[str, Sequence[str]]) -> Iterator[Walk]:
    """Hold the object in front of a lamp that is switched on."""
    lamps: list[tuple[str, str] | None] = [*_places(contents, goal.toggle)] or [None]
    things: list[tuple[str, str] | None] = [None] if world.holding else [*_places(contents, goal.object)]
    for thing in things:
        for lamp in lamps:
            walk = Walk(world)
            if thing is not None:
                walk.take(*thing)
            if lamp is not None:
                walk.use(*lamp)
            yield walk


def _placings(world: World, goal: Goal, contents: Mapping[str, Sequence[str]]) -> Iterator[Walk]:
    """Put the objects, treated if the task requires it, into one of the goal's receptacles."""
    treaters: list[str | None] = [None]
    if goal.treatment is not None:
        treaters = [name for name in world.contents if kind_of(name) == goal.treatment[2]]
    places = _places(contents, goal.object)
    for target in _distinct_targets(world, goal, contents):
        if goal.treatment is not None:
            there, fetched = 0, places
        else:
            there = sum(kind_of(thing) == goal.object for thing in contents.get(target, ()))
            fetched = [(thing, place) for thing, place in places if place != target]
        held = [(world.holding, "")] if world.holding else []
        wanted = max(0, goal.count - there - len(held))
        for choice in permutations(fetched, min(wanted, len(fetched))):
            for treater in treaters:
                walk = Walk(world)
                for thing, place in (*held, *choice):
                    _fetch_and_put(walk, goal, thing, place, treater, target)
                walk.missing = wanted - len(choice)
                yield walk


def _fetch_and_put(walk: Walk, goal: Goal, thing: str, place: str, treater: str | None, target: str) -> None:
    if place:
        walk.take(thing, place)
    if goal.treatment is not None and treater is not None:
        verb, state, _ = goal.treatment
        if state not in walk.world.states.get(thing, ()):
            walk.treat(thing, verb, treater)
    walk.put(thing, target)


def _places(contents: Mapping[str, Sequence[str]], kind: str) -> list[tuple[str, str]]:
    return [(thing, place) for place, things in contents.items() for thing in things if kind_of(thing) == kind]


def _distinct_targets(world: World, goal: Goal, contents: Mapping[str, Sequence[str]]) -> list[str]:
    """The goal's receptacles, keeping one of those with the same place, door state and goal objects."""
    targets: dict[tuple[str, bool, tuple[str, ...]], str] = {}
    for receptacle, place in world.locations.items():
        if kind_of(receptacle) == goal.receptacle:
            held = tuple(thing for thing in contents.get(receptacle, ()) if kind_of(thing) == goal.object)
            targets.setdefault((place, world.closed(receptacle), held), receptacle)
    return list(targets.values())
