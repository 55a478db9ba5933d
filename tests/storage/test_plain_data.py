"""Plain data: everything comes back as it was, and nothing else comes out of a file."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest

from trl_gtr.storage.plain_data import decode, encode, fingerprint
from trl_gtr.types import Response, Transition

VALUES: list[Any] = [
    None,
    True,
    -7,
    2**127 + 1,  # the state of a random generator
    0.1,
    -0.0,
    math.inf,
    "\ud800 half a character, \x00 and “quotes”",
    [1, [2.5, []]],
    (1, "A", ("H",)),
    {"a": {"b": [None]}},
    {"!tuple": [1], 3: "three", (1, 2): None},
    {"x", "y"},
    frozenset({1, (2, 3)}),
    b"\x00\xff",
    np.arange(6, dtype=np.int64).reshape(2, 3),
    np.zeros((0, 0, 3), np.uint8),
    np.array(["", "words"]),
    np.array([True, False])[::-1],
    np.arange(4, dtype=">f4")[::2],
    np.float32(0.1),
    np.int64(3),
    np.bool_(True),
    np.str_("text"),
    np.str_(""),
    np.datetime64("2026-01-01"),
    np.random.default_rng(5).bit_generator.state,
    dict(np.random.Generator(np.random.MT19937(5)).bit_generator.state),
]


def same(one: Any, other: Any) -> bool:
    """Equal, of the same types down to the last element."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool(np.all(one == other))
    return bool(one == other)


def through_json(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value))))


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)  # a set has no fixed `repr`
def test_a_value_comes_back_with_its_types(value: Any) -> None:
    assert same(through_json(value), value)
    assert fingerprint(through_json(value)) == fingerprint(value)


def test_not_a_number_comes_back() -> None:
    assert math.isnan(through_json(math.nan))
    assert fingerprint(math.nan) == fingerprint(through_json(math.nan))


def test_arrays_that_come_back_can_be_written_to() -> None:
    array = through_json(np.zeros(3))
    array[0] = 1.0
    assert array.tolist() == [1.0, 0.0, 0.0]


def test_a_step_comes_back() -> None:
    response = Response("{}", {"thoughts": "it is red", "cards": ["H4"]}, "red", (0, 5), (5, 9))
    step = Transition(
        env_index=1,
        step=2,
        image=np.zeros((0, 0, 3), np.uint8),
        prompt="Which?",
        response=response,
        response_ids=np.arange(5),
        reward=-1.0,
        terminated=False,
        truncated=False,
        bootstrap=False,
        legal=True,
        info={"hand": [(1, "A", "H")]},
    )
    back = through_json([step])[0]
    assert isinstance(back, Transition)
    assert back.response == response
    assert all(same(getattr(back, name), value) for name, value in vars(step).items() if name != "response")


class Point(NamedTuple):
    x: int


@pytest.mark.parametrize(
    "value", [object(), Point(1), np.array([None]), np.zeros(2, [("a", "i4")]), len, {"inner": [object()]}]
)
def test_values_that_are_not_plain_data_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="not plain data"):
        encode(value)


@pytest.mark.parametrize(
    "text",
    [
        '{"!Popen": {"args": "true"}}',
        '{"!object": []}',
        '{"!tuple": 3}',
        '{"!set": [[1]]}',
        '{"!dict": [1]}',
        '{"!bytes": "*"}',
        '{"!array": ["|O", [1], "AAAAAAAAAAA="]}',
        '{"!array": ["<i8", [1000000], "AAAA"]}',
        '{"!array": [["a", "O"], [1], "AAAAAAAAAAA="]}',
        '{"!array": []}',
        '{"!Response": {"text": "", "more": 1}}',
        '{"!Transition": []}',
    ],
)
def test_what_nobody_wrote_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="can't be read"):
        decode(json.loads(text))


def test_fingerprints_tell_values_apart() -> None:
    assert len({fingerprint(value) for value in VALUES}) == len(VALUES)
    assert fingerprint([1]) != fingerprint((1,))
    assert fingerprint(np.zeros(2)) != fingerprint(np.zeros(2, np.float32))
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})


def test_fingerprints_are_the_same_in_every_process() -> None:
    """The order of a set depends on the process."""
    code = "from trl_gtr.storage.plain_data import fingerprint; print(fingerprint({'a', 'b', 'c', 'd', 'e'}))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1
