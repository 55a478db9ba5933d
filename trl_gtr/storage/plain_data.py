"""Values as JSON and back: what a checkpoint holds of environments can be read and compared, and executes nothing.

JSON's own values stand for themselves. Of the rest each is an object with one key that names its kind, such as
`{"!tuple": [1, 2]}`; nothing but the kinds below can come back from a file.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from ..types import Response, Transition

_RECORDS: dict[str, type[Any]] = {"Response": Response, "Transition": Transition}
_SEQUENCES: dict[str, type[Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_ARRAY_KINDS = "biufcSUmM"
"""NumPy's kinds of plain numbers, texts and times; neither objects nor structures."""


def encode(value: Any, pack: Callable[[bytes], str] = lambda data: base64.b64encode(data).decode()) -> Any:
    """What `json.dumps` can write and [`decode`] turns back into an equal value of the same types.

    Args:
        pack: Makes a text of an array's bytes.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [encode(each, pack) for each in value]
    if kind is dict:
        if all(type(key) is str and key[:1] != "!" for key in value):
            return {key: encode(each, pack) for key, each in value.items()}
        return {"!dict": [[encode(key, pack), encode(each, pack)] for key, each in value.items()]}
    if kind in _SEQUENCES.values():
        items = [encode(each, pack) for each in value]
        # The order of a set is another one in every process.
        return {f"!{kind.__name__}": items if kind is tuple else sorted(items, key=json.dumps)}
    if kind is bytes:
        return {"!bytes": pack(value)}
    if (kind is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in _ARRAY_KINDS:
        return {
            "!array" if kind is np.ndarray else "!scalar": [value.dtype.str, list(value.shape), pack(value.tobytes())]
        }
    if kind in _RECORDS.values():
        return {f"!{kind.__name__}": {each.name: encode(getattr(value, each.name), pack) for each in fields(value)}}
    raise ValueError(f"{kind.__module__}.{kind.__qualname__} is no plain data (numbers, texts, lists, dicts, arrays)")


def decode(value: Any) -> Any:
    """The value that [`encode`] was given. Raises a `ValueError` where it can't have written this."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    name = next(iter(value), "")
    if name[:1] != "!":
        return {key: decode(each) for key, each in value.items()}
    try:
        return _decode_kind(name[1:], value[name])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"{name} can't be read: {error}") from error


def _decode_kind(kind: str, stored: Any) -> Any:
    if kind == "dict":
        return {decode(key): decode(each) for key, each in stored}
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(stored))
    if kind == "bytes":
        return base64.b64decode(stored, validate=True)
    if kind in ("array", "scalar"):
        name, shape, data = stored
        dtype = np.dtype(name)
        if dtype.kind not in _ARRAY_KINDS:
            raise ValueError(f"an array of {dtype} is no plain data")
        array: np.ndarray = np.ndarray(shape, dtype, base64.b64decode(data, validate=True)).copy()
        return array if kind == "array" else array[()]
    return _RECORDS[kind](**{key: decode(each) for key, each in stored.items()})


def fingerprint(value: Any) -> str:
    """SHA-256 of a value: equal for equal values, in every process and on every machine."""
    text = json.dumps(encode(value, pack=lambda data: hashlib.sha256(data).hexdigest()), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def json_options(given: dict[str, Any] | str | None, name: str, example: str) -> dict[str, Any]:
    """Options that are named in a dictionary or, as on the command line, in JSON.

    Args:
        given: The options; none if left out.
        name: Of the field that holds them.
        example: What it may hold, for the error.
    """
    try:
        options = json.loads(given) if isinstance(given, str) else given or {}
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not a JSON object ({error}): write e.g. '{example}'.") from error
    if not isinstance(options, dict):
        raise ValueError(f"{name} must name options, as in {example}, not {options!r}.")
    return options
