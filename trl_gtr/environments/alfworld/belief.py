"""What an agent can know about a room from the game's text alone.

THOR provides frames and text but no facts. `Belief` follows the text, command by command, and produces a `World`, so
that the planner and the judge work as they do for the text games.
"""

from __future__ import annotations

import re

from .commands import as_move
from .world import World, kind_of, natural

NOTHING = "Nothing happens."

_NAME = r"[\w-]+ \d+"
_ROOM = re.compile(r"you see (.*?)\.?\s*(?:\n|$)")
_CONTENTS = re.compile(rf"(?:[Oo]n the (?P<place>{_NAME})|[Ii]n it), you see (?P<things>.*?)\.(?:\s|$)")
_DOOR = re.compile(rf"\b[Tt]he (?P<place>{_NAME}) is (?P<state>open|closed)\b")
_THING = re.compile(rf"\ban? ({_NAME})")
_COMMAND = re.compile(
    rf"^(?P<verb>go to|open|close|take|move|heat|cool|clean|use) (?P<first>{_NAME})(?: \w+ (?P<second>{_NAME}))?$"
)
_TREATED = {"heat": ("hot", "cool"), "cool": ("cool", "hot"), "clean": ("clean", "")}


class Belief:
    """The room as far as the text has revealed it.

    Args:
        intro: The game's first text, which lists the receptacles.
        openable: Kinds of receptacles that have a door.
        can_contain: Compatible pairs of receptacle kind and object kind.
    """

    def __init__(self, intro: str, openable: frozenset[str], can_contain: frozenset[tuple[str, str]]) -> None:
        match = _ROOM.search(intro)
        self.room = sorted(_THING.findall(match[1]) if match else [], key=natural)
        self.openable = frozenset(name for name in self.room if kind_of(name) in openable)
        self.can_contain = can_contain
        self.here = ""
        self.opened: set[str] = set()
        self.seen: dict[str, list[str]] = {}
        self.holding: str | None = None
        self.states: dict[str, set[str]] = {}
        self._refused: dict[str, tuple[bool, tuple[str, ...]]] = {}
        """Command → the receptacle's state when nothing happened."""

    def follow(self, command: str, feedback: str) -> None:
        """Update the belief with the outcome of a command."""
        match = _COMMAND.match(as_move(command))
        if match is None:
            return
        verb, first, second = match["verb"], match["first"], match["second"]
        nothing = feedback.strip() == NOTHING
        if nothing:
            self._refused[match[0]] = self._receptacle(match[0])
        if verb in ("heat", "cool"):
            # Both leave the door closed, even when they fail, which they do if it is open.
            self.opened.discard(second)
        if nothing:
            return
        if verb == "go to":
            self.here = first
        elif verb == "open":
            self.opened.add(first)
        elif verb == "close":
            self.opened.discard(first)
        elif verb == "take":
            self.holding = first
            for things in self.seen.values():
                if first in things:
                    things.remove(first)
        elif verb == "move":
            self.holding = None
            self.seen.setdefault(second, []).append(first)
        elif verb == "use":
            self.states.setdefault(first, set()).add("on")
        else:
            gained, lost = _TREATED[verb]
            self.states.setdefault(first, set()).add(gained)
            self.states[first].discard(lost)
        self._read(feedback)

    def refused(self) -> frozenset[str]:
        """Commands that did nothing and would do nothing again, because their receptacle hasn't changed."""
        return frozenset(command for command, state in self._refused.items() if state == self._receptacle(command))

    def _receptacle(self, command: str) -> tuple[bool, tuple[str, ...]]:
        """Whether the command's receptacle is open, and its known contents. Constant for a lamp."""
        match = _COMMAND.match(command)
        assert match is not None
        place = match["second"] or match["first"]
        return place in self.opened, tuple(self.seen.get(place, ()))

    def _read(self, feedback: str) -> None:
        for door in _DOOR.finditer(feedback):
            (self.opened.add if door["state"] == "open" else self.opened.discard)(door["place"])
        contents = _CONTENTS.search(feedback)
        if contents:
            self.seen[contents["place"] or self.here] = sorted(_THING.findall(contents["things"]), key=natural)
        elif self.here and (self.here not in self.openable or self.here in self.opened):
            self.seen.setdefault(self.here, [])

    def world(self) -> World:
        """The belief as a `World` in which every receptacle has its own place, named after it."""
        return World(
            location=self.here,
            locations={name: name for name in self.room},
            contents={name: list(self.seen.get(name, ())) for name in self.room},
            openable=self.openable,
            opened=frozenset(self.opened),
            holding=self.holding,
            states={thing: frozenset(words) for thing, words in self.states.items() if words},
            can_contain=self.can_contain,
        )
