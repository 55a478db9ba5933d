"""Match a text to an admissible command.

ALFWorld has two dialects: games up to 0.3 and THOR say "put mug 1 in/on desk 1", 0.4 games say "move mug 1 to desk 1".
Both are accepted everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

_PUT = re.compile(r"\bput (?:the )?(?P<thing>\w+ \d+) (?:in/on|in|on|into|onto) (?:the )?(?P<place>\w+ \d+)\b")
_MOVE = re.compile(r"^move (?P<thing>.+) to (?P<place>.+)$")
_AROUND = " \t\r\n\"'`“”‘’.,;:!"


def project(text: str, admissible: Sequence[str]) -> str | None:
    """The one admissible command named by the text, or `None`.

    The text is the command or contains it as whole words; of several, the longest counts. "drawer 1" never matches
    "drawer 10" or "drawer 1-12", and two different commands of equal length cancel out. Commands without an object
    (look, help, inventory) could appear in any sentence, so they must be the whole text.
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
    """The command in the dialect of THOR's controller."""
    return _MOVE.sub(r"put \g<thing> in/on \g<place>", command)


def as_move(command: str) -> str:
    """The command in the dialect of the 0.4 text games."""
    return _PUT.sub(r"move \g<thing> to \g<place>", command)


def _plain(text: str) -> str:
    """Normalise case, whitespace, surrounding characters and dialect."""
    return as_move(" ".join(text.split()).strip(_AROUND).casefold())


@lru_cache(maxsize=4096)
def _whole(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(name)}(?![\w-]|\.\d)")
