"""An ALFWorld task's goal, and how much of it is achieved."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .world import World, kind_of

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)

TREATMENTS = {
    "pick_clean_then_place_in_recep": ("clean", "clean", "sinkbasin"),
    "pick_heat_then_place_in_recep": ("heat", "hot", "microwave"),
    "pick_cool_then_place_in_recep": ("cool", "cool", "fridge"),
}
"""Task type → the verb, the resulting state, and the kind of receptacle used."""

_OBJECT = re.compile(r"\(objectType \?(\w+) (\w+)Type\)")
_RECEPTACLE = re.compile(r"\(receptacleType \?\w+ (\w+)Type\)")
_TOGGLED = re.compile(r"\(isToggled \?(\w+)\)")


@dataclass(frozen=True)
class Goal:
    """A task in the game's terms: kinds are lower case without spaces ("remotecontrol")."""

    task_type: str
    object: str
    receptacle: str = ""
    """Where to put it; empty for `look_at_obj_in_light`."""
    toggle: str = ""
    """The lamp of `look_at_obj_in_light`."""

    @property
    def treatment(self) -> tuple[str, str, str] | None:
        return TREATMENTS.get(self.task_type)

    @property
    def count(self) -> int:
        """How many objects to put there."""
        return 2 if self.task_type == "pick_two_obj_and_place" else 1


def read_goal(problem: str) -> Goal:
    """The goal of a PDDL problem. Raises `ValueError` for tasks outside the six types."""
    goal = problem[problem.rfind("(:goal") :]
    objects = dict(_OBJECT.findall(goal))
    receptacles = {name.lower() for name in _RECEPTACLE.findall(goal)}
    toggled = _TOGGLED.search(goal)
    unsupported = [word for word in ("isSliced", "isReceptacleObject", "isOn") if f"({word} " in goal]
    if unsupported or not objects:
        raise ValueError(
            f"The game's goal ({', '.join(unsupported) or 'unknown'}) is not supported; the six task types are "
            f"{', '.join(TASK_TYPES)}. Leave this game out."
        )
    if toggled:
        toggle = objects.pop(toggled[1])
        return Goal("look_at_obj_in_light", next(iter(objects.values())).lower(), toggle=toggle.lower())
    name, receptacle = next(iter(objects.values())).lower(), min(receptacles)
    if len(objects) == 2:
        return Goal("pick_two_obj_and_place", name, receptacle)
    for task_type, word in zip(TREATMENTS, ("isClean", "isHot", "isCool"), strict=True):
        if f"({word} " in goal:
            return Goal(task_type, name, receptacle)
    return Goal("pick_and_place_simple", name, receptacle)


def goal_conditions(world: World, goal: Goal) -> tuple[int, int]:
    """How many of the task's conditions hold, and how many there are; counted as in ALFWorld's THOR environment.

    They are equal exactly when the game is won. A lamp only counts if the agent is in front of it.
    """
    placed = [
        (name, receptacle)
        for receptacle, contents in world.contents.items()
        if kind_of(receptacle) == goal.receptacle
        for name in contents
        if kind_of(name) == goal.object
    ]
    if goal.toggle:
        holding = world.holding is not None and kind_of(world.holding) == goal.object
        lamps = [name for receptacle in world.here for name in world.contents[receptacle]]
        lit = any(kind_of(lamp) == goal.toggle and "on" in world.states.get(lamp, ()) for lamp in lamps)
        return int(holding) + int(lit), 2
    if goal.count == 2:
        counts = [sum(place == receptacle for _, place in placed) for receptacle in world.contents]
        return min(2, max(counts, default=0)), 2
    if goal.treatment is None:
        return int(bool(placed)), 1
    _, state, _ = goal.treatment
    treated = [name for name, words in world.states.items() if state in words and kind_of(name) == goal.object]
    return int(bool(placed)) + int(bool(treated)) + int(any(name in treated for name, _ in placed)), 3
