"""File formats for the state of a run's components. Loading them never executes code."""

from __future__ import annotations

import gzip
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import plain_data
from .files import link_or_copy

_READ_ERRORS = (OSError, EOFError, ValueError, RuntimeError, zlib.error, pickle.UnpicklingError)


class StateFormat(NamedTuple):
    """How a component's state is written to a file and read back."""

    suffix: str
    write: Callable[[Path, Any], None]
    parse: Callable[[Path], Any]

    def read(self, path: Path) -> Any:
        try:
            return self.parse(path)
        except _READ_ERRORS as error:
            raise ValueError(f"{path.parent} is damaged: {path.name} can't be read ({error!r}).") from error


def _write_plain(path: Path, state: Any) -> None:
    with gzip.open(path, "wt", compresslevel=1) as file:
        json.dump(plain_data.encode(state), file)


def _parse_plain(path: Path) -> Any:
    return plain_data.decode(json.loads(gzip.decompress(path.read_bytes())))


def _write_tensors(path: Path, state: Any) -> None:
    torch.save(state, path)


def _parse_tensors(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _write_links(path: Path, state: Any) -> None:
    path.mkdir()
    for name, file in state.items():
        link_or_copy(file, path / name)


def _parse_links(path: Path) -> Any:
    return {file.name: file for file in sorted(path.iterdir())}


PLAIN = StateFormat(".json.gz", _write_plain, _parse_plain)
"""Anything `plain_data` can encode."""
TENSORS = StateFormat(".pt", _write_tensors, _parse_tensors)
"""Dictionaries and lists of tensors and numbers."""
LINKED_FILES = StateFormat("", _write_links, _parse_links)
"""A folder of files that exist already and never change: file names → paths."""
