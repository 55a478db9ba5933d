"""ALFWorld's texts: the prompt, the expert's thought, and the list of commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from ...environments.alfworld.world import kind_of, natural
from ...responses.format import Field
from ..base import Rubric

EARLIER = """\
You are a robot in a household. The picture shows what is in front of you{hand}.
Your task: {task}
{text}"""
PROMPT = f"""\
{EARLIER}Your last actions: {{previous}}
Possible actions: {{commands}}
{{instructions}}"""

DRAWN_HAND = ", and at its lower edge what your hand holds"

FIELDS = (
    Field(
        "thoughts",
        "text",
        "what you see and hold, your sub-goal now (to find, take, clean, heat, cool, use, put or put down something), "
        "and the action for it",
    ),
)

RUBRIC = Rubric(
    role="You judge one step of a robot that does a household task. It chooses one command at a time.",
    questions={
        "objects": "Which things are in view and in the robot's hand, and does its thought name only those?",
        "subgoal": "What is the right sub-goal now (to find, take, clean, heat, cool, use, put or put down "
        "something), and is it the one that the robot names?",
        "action_serves": "Is the robot's action one of the possible ones, and does it serve that sub-goal?",
    },
    advice="A thing is cleaned at a sinkbasin, heated at a microwave and cooled at a fridge, while it is in the hand; "
    "nothing has to be opened for that. The hand holds one thing. Closed places have to be opened to see into them. "
    "To look at a thing under a lamp: hold it, go to the lamp, use the lamp. A true thought names the sub-goal in the "
    'form "My sub-goal is to heat the mug, so I go to microwave 1."',
)

# The expert's last sentence; which one is used depends on the number of steps so far.
FRAMES = (
    "My sub-goal is to {subgoal}, so I {action}.",
    "Now I have to {subgoal}, so I {action}.",
    "I need to {subgoal}, so the next action is to {action}.",
)
SUBGOALS = {
    "find": "find a {object}",
    "take": "take the {object}",
    "clean": "clean the {object}",
    "heat": "heat the {object}",
    "cool": "cool the {object}",
    "use": "use the {object}",
    "put": "put the {object} in the {receptacle}",
    "drop": "put down the {object}",
}
NAMED = 3  # maximum number of visible objects named in the expert's thought


def told(info: Mapping[str, Any]) -> str:
    """The game's text on one line, without its greeting and the task, which the prompt contains anyway."""
    text = info["observation_text"].partition("Your task is to:")[0]
    return " ".join(text.replace("-= Welcome to TextWorld, ALFRED! =-", "").split())


def write_thought(info: Mapping[str, Any], action: str) -> str:
    """What is seen and held, the sub-goal, and the action towards it."""
    verb, thing, receptacle = info["subgoal"]
    subgoal = SUBGOALS[verb].format(object=thing, receptacle=receptacle)
    frame = FRAMES[len(info["previous_actions"]) % len(FRAMES)]
    return f"{_seen(info)} {_held(info)} {frame.format(subgoal=subgoal, action=action)}"


def _seen(info: Mapping[str, Any]) -> str:
    here = info["view"]["here"]
    if not here:
        return "I am in the middle of the room."
    last = next((a.removeprefix("go to ") for a in reversed(info["previous_actions"]) if a.startswith("go to ")), "")
    place = next((entry for entry in here if entry[0] == last), here[0])
    things = [thing for _, _, contents in here for thing in contents]
    wanted = {info["goal"]["object"], info["goal"]["toggle"]}
    things.sort(key=lambda thing: kind_of(thing) not in wanted)  # relevant objects first; stable otherwise
    if place[1] == "closed" and not things:
        return f"I am at {place[0]}, which is closed."
    if len(things) > NAMED:
        things[NAMED:] = [f"{len(things) - NAMED} more"]
    return f"I am at {place[0]} and see {_listed(things) if things else 'nothing'}."


def _held(info: Mapping[str, Any]) -> str:
    holding = info["view"]["holding"]
    words = {"hot", "cool", "clean"}
    states = [word for thing, found in info["view"]["states"] if thing == holding for word in found if word in words]
    if not holding:
        return "My hand is empty."
    return f"I hold {holding}" + (f", which is {_listed(states)}." if states else ".")


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


# -- the list of commands --------------------------------------------------------------------------------------------


def list_commands(commands: Sequence[str], limit: int) -> str:
    """All commands, comma-separated; folded if that takes more than `limit` characters.

    Folding merges commands that differ only in one name: "go to (cabinet 1-12, fridge 1)". It is lossless: `unfold`
    restores every command.
    """
    full = ", ".join(commands)
    return full if len(full) <= limit else fold(commands)


def fold(commands: Sequence[str]) -> str:
    groups: dict[tuple[str, str], list[str]] = {}
    for command in commands:
        groups.setdefault(_parts(command), []).append(_name(command))
    return ", ".join(_folded(head, tail, sorted(names, key=natural)) for (head, tail), names in groups.items())


def unfold(text: str) -> list[str]:
    """The commands of a folded list, sorted."""
    commands = []
    for entry in _split(text):
        head, opened, rest = entry.partition("(")
        if not opened:
            commands.append(entry)
            continue
        inner, _, tail = rest.partition(")")
        for part in inner.split(", "):
            kind, _, numbers = part.rpartition(" ")
            first, _, last = numbers.partition("-")
            commands += [f"{head}{kind} {number}{tail}" for number in range(int(first), int(last or first) + 1)]
    return sorted(commands)


def _parts(command: str) -> tuple[str, str]:
    """The text before and after the folded name: "take " and " from desk 1"."""
    name = _name(command)
    if not name:
        return command, ""
    head, _, tail = command.partition(name)
    return head, tail


def _name(command: str) -> str:
    """The first name in a command: "mug 1" in "take mug 1 from desk 1"; "" if it has none."""
    words = command.split()
    place = next((i for i, word in enumerate(words) if word.isdigit()), 0)
    return " ".join(words[place - 1 : place + 1]) if place else ""


def _folded(head: str, tail: str, names: list[str]) -> str:
    if names == [""]:
        return head
    if len(names) == 1:
        return head + names[0] + tail
    parts = []
    for kind, group in groupby(names, key=kind_of):
        numbers = [int(name.rpartition(" ")[2]) for name in group]
        # Consecutive numbers have a constant offset from their index.
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
            values = [number for _, number in run]
            parts.append(f"{kind} {values[0]}-{values[-1]}" if len(values) > 1 else f"{kind} {values[0]}")
    return f"{head}({', '.join(parts)}){tail}"


def _split(text: str) -> list[str]:
    """Split at the commas outside parentheses."""
    entries, depth, start = [], 0, 0
    for place, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if sign == "," and not depth:
            entries.append(text[start:place].strip())
            start = place + 1
    return [*entries, text[start:].strip()]
