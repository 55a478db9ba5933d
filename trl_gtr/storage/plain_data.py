"""Values to JSON and back, so that environment state in a checkpoint is readable, comparable and safe to load.

JSON values are stored as they are. Any other value is an object with a single key that names its type, such as
`{"!tuple": [1, 2]}`; only the types below can be loaded from a file.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ..types import Response, Transition, Turn

_RECORDS: dict[str, type[Any]] = {"Response": Response, "Transition": Transition, "Turn": Turn}
_SEQUENCES: dict[str, type[Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_ARRAY_KINDS = "biufcSUmM"
"""NumPy dtype kinds for plain numbers, strings and times; no objects or structured dtypes."""


def encode(value: Any, pack: Callable[[bytes], str] = lambda data: base64.b64encode(data).decode()) -> Any:
    """Encode a value for `json.dumps`; [`decode`] restores an equal value of the same types.

    Args:
        pack: Turns an array's bytes into a string.
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
        # Set order differs between processes.
        return {f"!{kind.__name__}": items if kind is tuple else sorted(items, key=json.dumps)}
    if kind is bytes:
        return {"!bytes": pack(value)}
    if (kind is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in _ARRAY_KINDS:
        return {
            "!array" if kind is np.ndarray else "!scalar": [value.dtype.str, list(value.shape), pack(value.tobytes())]
        }
    if kind in _RECORDS.values():
        return {f"!{kind.__name__}": {each.name: encode(getattr(value, each.name), pack) for each in fields(value)}}
    raise ValueError(
        f"{kind.__module__}.{kind.__qualname__} is not plain data (numbers, strings, lists, dicts, arrays)"
    )


def decode(value: Any) -> Any:
    """Reverse [`encode`]. Raises a `ValueError` for input that `encode` can't have produced."""
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
            raise ValueError(f"an array of {dtype} is not plain data")
        array: np.ndarray = np.ndarray(shape, dtype, base64.b64decode(data, validate=True)).copy()
        return array if kind == "array" else array[()]
    return _RECORDS[kind](**{key: decode(each) for key, each in stored.items()})


def fingerprint(value: Any) -> str:
    """SHA-256 of a value, the same for equal values in every process and on every machine."""
    text = json.dumps(encode(value, pack=lambda data: hashlib.sha256(data).hexdigest()), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_yaml(file: str | Path) -> Any:
    """The contents of a configuration file; raises a `ValueError` if it can't be read or isn't YAML."""
    try:
        return yaml.safe_load(Path(file).read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"The configuration file {file} can't be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from error


def json_options(given: dict[str, Any] | str | None, name: str, example: str) -> dict[str, Any]:
    """Options given as a dictionary or, on the command line, as JSON.

    Args:
        given: The options; `None` means no options.
        name: The field's name, for errors.
        example: A valid value, for errors.
    """
    try:
        options = json.loads(given) if isinstance(given, str) else given or {}
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not a JSON object ({error}): write e.g. '{example}'.") from error
    if not isinstance(options, dict):
        raise ValueError(f"{name} must be a dictionary of options such as {example}, not {options!r}.")
    return options
