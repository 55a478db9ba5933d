"""Which admissible command does a text name?

ALFWorld speaks two dialects: games up to 0.3 and THOR say "put mug 1 in/on desk 1", games of 0.4 say "move mug 1 to
desk 1". Both are understood everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

_PUT = re.compile(r"\bput (?:the )?(?P<thing>\w+ \d+) (?:in/on|in|on|into|onto) (?:the )?(?P<place>\w+ \d+)\b")
_MOVE = re.compile(r"^move (?P<thing>.+) to (?P<place>.+)$")
_AROUND = " \t\r\n\"'`“”‘’.,;:!"


def project(text: str, admissible: Sequence[str]) -> str | None:
    """The one admissible command that the text names, or `None`.

    The text is the command, or holds it as whole words; of several the longest counts. "drawer 1" is never "drawer
    10", nor any of "drawer 1-12", and where two different commands are equally long none of them is taken. Commands
    that name nothing (look, help, inventory) are words of any sentence: they must be all that is said.
    """
    said = _plain(text)
    commands = {_plain(command): command for command in admissible}
    if said in commands:
        return commands[said]
    named = [name for name in commands if name[-1:].isdecimal() and name in said and _whole(name).search(said)]
    longest = max((len(name) for name in named), default=0)
    best = [name for name in named if len(name) == longest]
    return commands[best[0]] if len(best) == 1 else None


def as_put(command: str) -> str:
    """A command in the dialect that THOR's controller reads."""
    return _MOVE.sub(r"put \g<thing> in/on \g<place>", command)


def as_move(command: str) -> str:
    """A command in the dialect of the text games of 0.4."""
    return _PUT.sub(r"move \g<thing> to \g<place>", command)


def _plain(text: str) -> str:
    """Lower case, single spaces, nothing around it, and one dialect."""
    return as_move(" ".join(text.split()).strip(_AROUND).casefold())


@lru_cache(maxsize=4096)
def _whole(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(name)}(?![\w-]|\.\d)")
