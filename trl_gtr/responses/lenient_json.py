"""Parse JSON objects as language models write them: embedded in text, slightly malformed, or truncated.

`find_objects` never raises and runs in linear time: after a syntax error the search resumes at the error, and nesting
deeper than `MAX_DEPTH` is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

MAX_DEPTH = 32  # deeper than any real answer, and far below Python's recursion limit

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
    """Where the key starts, including its quote."""
    value: Any = None
    read: bool = False
    """Whether the value was read completely."""


@dataclass
class ReadObject:
    """What was read of one object; `pairs` excludes the keys of nested objects."""

    start: int
    pairs: list[Pair] = field(default_factory=list)
    status: Literal["complete", "truncated", "broken"] = "complete"
    error: str = ""


class _Fault(Exception):
    """Not JSON at `position`, even leniently."""

    def __init__(self, position: int, message: str) -> None:
        super().__init__(message)
        self.position = position


class _EndOfText(Exception):
    """The text ends before the object does."""


def find_objects(text: str) -> list[ReadObject]:
    """Every outermost `{...}` in the text, in order; the last may be truncated."""
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
    """Matches `"key":` in text that can't be parsed as an object."""
    return re.compile(rf"""["']{re.escape(key)}["']\s*:""", re.IGNORECASE)


class _Reader:
    """A recursive-descent parser; `position` is the index of the next character."""

    def __init__(self, text: str, position: int) -> None:
        self.text = text
        self.position = position

    def read_pairs(self, pairs: list[Pair], depth: int) -> None:
        """Read keys and values between `{` and `}`; if an exception is raised, `pairs` holds what was read so far."""
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
                raise _EndOfText  # it may be incomplete: 1 or 10
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
        """Read a comma, which is optional before the closing bracket."""
        char = self._peek()
        if char == ",":
            self.position += 1
        elif char != closing:
            raise _Fault(self.position, f'a "," or "{closing}" is expected')

    def _peek(self) -> str:
        """The next non-whitespace character."""
        self.position = _SPACE.match(self.text, self.position).end()  # type: ignore[union-attr]
        if self.position == len(self.text):
            raise _EndOfText
        return self.text[self.position]

    def _read_string(self, quote: str) -> str:
        """Read a quoted string. In single quotes, only a quote before `, : } ] )` ends it; others are apostrophes."""
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
        """The character escaped by `\\` before `position`, and where it ends. Unknown escapes are kept as they are."""
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
