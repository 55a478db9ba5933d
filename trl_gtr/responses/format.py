"""The JSON response format: instructions, parsing and rendering.

A response is one JSON object whose last key is the action; everything before that key is the *thought segment*:

    {"cards": ["4", "9", "A", "K"], "formula": "4+9", "thoughts": "I aim at 4+9+1+10=24 ...", "action": "+"}

`parse` accepts any text and never raises. Unambiguous slips are repaired; anything else is invalid, with a reason:

- text or code fences around the object are allowed; of several objects, the last complete one with an action key
  counts;
- single quotes, trailing commas, `True`/`None`, `( )` lists, bare words (`[4, K]`, `{action: hit}`), line breaks in
  strings, unknown escapes and key variants (`Action`, `current_number`) are repaired;
- a missing final brace is repaired if the action's value is complete, since nothing else can follow;
- duplicate keys are allowed if their values are equal; unknown keys before the action are ignored;
- a key after the action makes the response invalid: the thought must come first.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field as dataclass_field
from typing import Any, Literal

from ..types import Response
from .lenient_json import ReadObject, find_objects, key_pattern

Kind = Literal["text", "number", "list"]

_KIND_NAMES = {"text": "a text", "number": "a number", "list": "a list of texts"}
_PLACEHOLDERS: dict[str, Any] = {"text": "...", "number": 0, "list": ["..."]}
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_MAX_NUMBER_LENGTH = 64  # far more than any game needs, and well below the digit limit of int()


@dataclass(frozen=True)
class Field:
    """One part of the thought."""

    key: str
    kind: Kind = "text"
    help: str = ""
    """What to write here: one line of the instructions."""


def no_conclusion(thought: Mapping[str, Any]) -> str | None:
    """Default for formats whose thoughts name no action or aren't read."""
    return None


@dataclass(frozen=True)
class ThoughtFormat:
    """The keys of a response: `fields` in order, then the action. Stateless and picklable."""

    fields: Sequence[Field]
    action_key: str = "action"
    action_help: str = "your action"
    conclusion: Callable[[Mapping[str, Any]], str | None] = dataclass_field(default=no_conclusion, compare=False)
    """Maps the thought's parts to the action its text concludes with ("…, so I hit."), legal or not; `None` if there
    is none. A thought that concludes with a wrong action is never taught (`tasks.base.contradicts`)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", tuple(self.fields))
        names = [_normal(key) for key in (*(field.key for field in self.fields), self.action_key)]
        if len(set(names)) < len(names) or "" in names:
            raise ValueError(f"The keys of a ThoughtFormat must be non-empty and differ by more than case: {names}.")
        for field in self.fields:
            if field.kind not in _KIND_NAMES:
                raise ValueError(
                    f'Field "{field.key}": kind must be one of {sorted(_KIND_NAMES)}, not {field.kind!r}.'
                )

    # -- writing ---------------------------------------------------------------------------------------------------

    def instructions(self) -> str:
        """The schema in words, for the prompt. The example object is itself a valid response."""
        example = self.render({field.key: _PLACEHOLDERS[field.kind] for field in self.fields}, "...")
        lines = [
            "Answer with one JSON object, its keys in this order:" if self.fields else "Answer with one JSON object:"
        ]
        lines.append(example)
        lines += [f'"{field.key}": {field.help or _KIND_NAMES[field.kind]}' for field in self.fields]
        lines.append(f'"{self.action_key}": {self.action_help}')
        return "\n".join(lines)

    def render(self, thought: Mapping[str, Any], action: str) -> str:
        """One line of JSON. Raises `ValueError` if the thought doesn't match the schema."""
        if not isinstance(action, str):
            raise ValueError(f"The action must be a string, not {action!r}.")
        return f"{self.render_thought(thought)}{_dumps(self.action_key)}: {_dumps(action)}}}"

    def respond(self, thought: Mapping[str, Any], action: str) -> Response:
        """Same as `parse(render(thought, action))`, but faster."""
        text, fields = self.render(thought, action), self.check_thought(thought)
        action = action.strip()
        error = None if action else f'"{self.action_key}" is empty'
        return self._response(text, error, len(self.render_thought(thought)), fields, action)

    def render_thought(self, thought: Mapping[str, Any]) -> str:
        """The thought segment: everything `render` writes before the action key."""
        values = self.check_thought(thought)
        return "{" + "".join(f"{_dumps(key)}: {_dumps(value)}, " for key, value in values.items())

    def check_thought(self, thought: Mapping[str, Any]) -> dict[str, Any]:
        """The thought's parts in the schema's order and types.

        Raises `ValueError` if a key is missing or unknown or a value has the wrong kind: labels must match the schema
        exactly.
        """
        unknown = [key for key in thought if key not in {field.key for field in self.fields}]
        if unknown:
            raise ValueError(f"Unknown keys in the thought: {unknown}; the schema has {[f.key for f in self.fields]}.")
        values: dict[str, Any] = {}
        for field in self.fields:
            if field.key not in thought:
                raise ValueError(f'The thought has no "{field.key}".')
            values[field.key] = _coerce(field, thought[field.key])
        return values

    # -- reading ---------------------------------------------------------------------------------------------------

    def parse(self, text: str) -> Response:
        """Parse any text into a response: its parts, the spans of thought and action, and the error if it is invalid.

        The thought span starts at 0, including any preamble, and ends where the action key starts; the action span
        runs from there to the end of the text. If no object can be parsed, the last `"action":` counts as the key.
        """
        found = self._choose(find_objects(text))
        if found is None:
            return self._response(text, "there is no JSON object in the text", start=self._last_mention(text, 0))
        start = next((pair.start for pair in found.pairs if self._is_action(pair.key)), None)
        if start is None and found.status == "broken":
            start = self._last_mention(text, found.start)
        values, error = self._values(found)
        action = values.pop(self.action_key, None)
        fields = {field.key: values[field.key] for field in self.fields if field.key in values}
        return self._response(text, error, start, fields, action)

    def _choose(self, objects: list[ReadObject]) -> ReadObject | None:
        """The object to use: the last complete one with an action, else the last with an action, else the last."""
        with_action = [o for o in objects if any(self._is_action(pair.key) for pair in o.pairs)]
        whole = [o for o in with_action if o.status == "complete" or self._only_brace_missing(o)]
        for group in (whole, with_action, objects):
            if group:
                return group[-1]
        return None

    def _only_brace_missing(self, found: ReadObject) -> bool:
        last = found.pairs[-1] if found.pairs else None
        return found.status == "truncated" and last is not None and last.read and self._is_action(last.key)

    def _is_action(self, key: str) -> bool:
        return key == self.action_key or _normal(key) == _normal(self.action_key)

    def _last_mention(self, text: str, start: int) -> int | None:
        mentions = [match.start() for match in key_pattern(self.action_key).finditer(text, start)]
        return mentions[-1] if mentions else None

    def _values(self, found: ReadObject) -> tuple[dict[str, Any], str | None]:
        """The values by schema key, and the first error."""
        specs = {_normal(field.key): field for field in self.fields}
        specs[_normal(self.action_key)] = Field(self.action_key)
        raw: dict[str, Any] = {}
        errors: list[str] = []
        if found.status != "complete" and not self._only_brace_missing(found):
            errors.append(found.error)
        for pair in found.pairs:
            field = specs.get(_normal(pair.key))
            if self.action_key in raw and (field is None or field.key != self.action_key):
                errors.append(f'"{self.action_key}" must be the last key')
            if field is None or not pair.read:
                continue
            if field.key in raw and raw[field.key] != pair.value:
                errors.append(f'the key "{field.key}" is there twice with different values')
            raw.setdefault(field.key, pair.value)
        values: dict[str, Any] = {}
        for field in specs.values():
            if field.key not in raw:
                errors.append(f'the key "{field.key}" is missing')
                continue
            try:
                values[field.key] = _coerce(field, raw[field.key])
            except ValueError as fault:
                errors.append(str(fault))
        if self.action_key in values:
            values[self.action_key] = values[self.action_key].strip()
            if not values[self.action_key]:
                errors.append(f'"{self.action_key}" is empty')
        return values, errors[0] if errors else None

    def _response(
        self,
        text: str,
        error: str | None,
        start: int | None,
        fields: Mapping[str, Any] | None = None,
        action: str | None = None,
    ) -> Response:
        return Response(
            text=text,
            fields=fields or {},
            action=action or None,
            thought_span=(0, len(text) if start is None else start),
            action_span=None if start is None else (start, len(text)),
            error=error,
        )


def _normal(key: str) -> str:
    """Normalise a key: case, spaces, `_` and `-` don't matter."""
    return " ".join(re.sub(r"[\s_-]+", " ", key).split()).casefold()


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _coerce(field: Field, value: Any) -> Any:
    """Convert the value to the field's kind; numbers are accepted as text, and numeric text as numbers."""
    if field.kind == "number":
        number = _to_number(value)
        if number is not None:
            return number
    elif field.kind == "list":
        if isinstance(value, (list, tuple)):
            texts = [_to_text(item) for item in value]
            if None not in texts:
                return texts
    else:
        text = _to_text(value)
        if text is not None:
            return text
    raise ValueError(f'"{field.key}" must be {_KIND_NAMES[field.kind]}')


def _to_text(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e16:
        return str(value)
    return None


def _to_number(value: Any) -> int | float | None:
    if isinstance(value, str):
        text = value.strip()
        if len(text) > _MAX_NUMBER_LENGTH or not (match := _NUMBER.fullmatch(text)):
            return None
        value = float(text) if match.group(1) or match.group(2) else int(text)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, int):
        return value if abs(value) < 10 ** (_MAX_NUMBER_LENGTH - 1) else None
    return value if math.isfinite(value) else None
