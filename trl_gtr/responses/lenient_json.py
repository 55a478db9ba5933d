"""Read JSON objects as language models write them: anywhere in a text, slightly broken, or cut off.

`find_objects` never raises and takes time linear in the text: after a fault the search goes on where the fault was,
and nesting deeper than `MAX_DEPTH` is a fault.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

MAX_DEPTH = 32  # no answer nests deeper, and the reader's recursion stays far from Python's limit

_SPACE = re.compile(r"\s*")
_BARE_KEY = re.compile(r"[A-Za-z_](?:[\w ]{0,62}\w)?(?=\s*:)")
_BARE_VALUE = re.compile(r"""[^\s,:{}\[\]()"']{1,64}""")
_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_ESCAPES = {'"': '"', "'": "'", "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX4 = re.compile(r"[0-9A-Fa-f]{4}")
_STOPS = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}


@dataclass
class Pair:
    """One key of an object and its value."""

    key: str
    start: int
    """Where the key starts, its quote included."""
    value: Any = None
    read: bool = False
    """Whether the value was read to its end."""


@dataclass
class ReadObject:
    """What was read of one object; `pairs` are its own keys, not those of objects inside."""

    start: int
    pairs: list[Pair] = field(default_factory=list)
    status: Literal["complete", "truncated", "broken"] = "complete"
    error: str = ""


class _Fault(Exception):
    """The text is no JSON at `position`, even read leniently."""

    def __init__(self, position: int, message: str) -> None:
        super().__init__(message)
        self.position = position


class _EndOfText(Exception):
    """The text ends before the object does."""


def find_objects(text: str) -> list[ReadObject]:
    """Every outermost `{...}` of the text, in order; the last may be cut off by the text's end."""
    objects: list[ReadObject] = []
    position = text.find("{")
    while position >= 0:
        reader, found = _Reader(text, position + 1), ReadObject(position)
        objects.append(found)
        try:
            reader.read_pairs(found.pairs, depth=1)
        except _EndOfText:
            found.status, found.error = "truncated", "the text ends before the object does"
            break
        except _Fault as fault:
            found.status, found.error = "broken", f"no JSON at character {fault.position}: {fault}"
            reader.position = max(fault.position, position + 1)
        position = text.find("{", reader.position)
    return objects


def key_pattern(key: str) -> re.Pattern[str]:
    """Matches what looks like `"key":` where no object can be read."""
    return re.compile(rf"""["']{re.escape(key)}["']\s*:""", re.IGNORECASE)


class _Reader:
    """A recursive-descent reader over one text; `position` is the next character."""

    def __init__(self, text: str, position: int) -> None:
        self.text = text
        self.position = position

    def read_pairs(self, pairs: list[Pair], depth: int) -> None:
        """Keys and values after a `{` up to its `}`; `pairs` keeps what was read if an exception ends it."""
        while (char := self._peek()) != "}":
            if char in "\"'":
                pair = Pair(key="", start=self.position)
                pair.key = self._read_string(char)
            elif match := _BARE_KEY.match(self.text, self.position):
                pair = Pair(match.group(), self.position)
                self.position = match.end()
            else:
                raise _Fault(self.position, "a key is expected")
            pairs.append(pair)
            if self._peek() != ":":
                raise _Fault(self.position, 'a ":" is expected')
            self.position += 1
            pair.value = self._read_value(depth)
            pair.read = True
            self._read_comma("}")
        self.position += 1

    def _read_value(self, depth: int) -> Any:
        char = self._peek()
        if char in "\"'":
            return self._read_string(char)
        if char in "{[(":
            if depth >= MAX_DEPTH:
                raise _Fault(self.position, "nested too deeply")
            self.position += 1
            if char == "{":
                pairs: list[Pair] = []
                self.read_pairs(pairs, depth + 1)
                return {pair.key: pair.value for pair in pairs}
            return self._read_items("]" if char == "[" else ")", depth + 1)
        if match := _BARE_VALUE.match(self.text, self.position):
            if match.end() == len(self.text):
                raise _EndOfText  # it may have been going on: 1 or 10
            self.position = match.end()
            return _CONSTANTS.get(match.group(), match.group())
        raise _Fault(self.position, "a value is expected")

    def _read_items(self, closing: str, depth: int) -> list[Any]:
        items: list[Any] = []
        while self._peek() != closing:
            items.append(self._read_value(depth))
            self._read_comma(closing)
        self.position += 1
        return items

    def _read_comma(self, closing: str) -> None:
        """A comma, or nothing before the closing bracket."""
        char = self._peek()
        if char == ",":
            self.position += 1
        elif char != closing:
            raise _Fault(self.position, f'a "," or "{closing}" is expected')

    def _peek(self) -> str:
        """The next character that is no white space."""
        self.position = _SPACE.match(self.text, self.position).end()  # type: ignore[union-attr]
        if self.position == len(self.text):
            raise _EndOfText
        return self.text[self.position]

    def _read_string(self, quote: str) -> str:
        """A quoted string. Single-quoted ones may hold apostrophes: only a quote before `, : } ] )` closes them."""
        text, stops = self.text, _STOPS[quote]
        parts: list[str] = []
        start = position = self.position + 1
        while match := stops.search(text, position):
            position = match.end()
            if match.group() == "\\":
                parts.append(text[start : position - 1])
                part, position = self._read_escape(position)
                parts.append(part)
                start = position
            elif quote == '"' or self._closes(position):
                parts.append(text[start : position - 1])
                self.position = position
                return "".join(parts)
        raise _EndOfText

    def _closes(self, position: int) -> bool:
        position = _SPACE.match(self.text, position).end()  # type: ignore[union-attr]
        return position == len(self.text) or self.text[position] in ",:}])"

    def _read_escape(self, position: int) -> tuple[str, int]:
        """What `\\` + the text at `position` stands for, and where it ends. Unknown escapes stand for themselves."""
        text = self.text
        if position == len(text):
            raise _EndOfText
        char = text[position]
        if char != "u":
            return _ESCAPES.get(char, "\\" + char), position + 1
        if not (match := _HEX4.match(text, position + 1)):
            return "\\u", position + 1
        code, end = int(match.group(), 16), match.end()
        if 0xD800 <= code < 0xDC00 and text.startswith("\\u", end) and (low := _HEX4.match(text, end + 2)):
            second = int(low.group(), 16)
            if 0xDC00 <= second < 0xE000:
                return chr(0x10000 + ((code - 0xD800) << 10) + (second - 0xDC00)), low.end()
        return chr(code), end
