"""The files that hold the state of a run's parts. Reading one executes nothing."""

from __future__ import annotations

import gzip
import json
import pickle
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from . import plain_data

_READ_ERRORS = (OSError, EOFError, ValueError, RuntimeError, zlib.error, zipfile.BadZipFile, pickle.UnpicklingError)


class StateFormat(NamedTuple):
    """How one state is written to a file and read back."""

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


def _write_arrays(path: Path, state: Any) -> None:
    np.savez(path, **state)


def _parse_arrays(path: Path) -> Any:
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def _write_tensors(path: Path, state: Any) -> None:
    torch.save(state, path)


def _parse_tensors(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


PLAIN = StateFormat(".json.gz", _write_plain, _parse_plain)
"""Whatever `plain_data` can encode."""
ARRAYS = StateFormat(".npz", _write_arrays, _parse_arrays)
"""A flat dictionary of NumPy arrays: quicker for large ones."""
TENSORS = StateFormat(".pt", _write_tensors, _parse_tensors)
"""Dictionaries and lists of tensors and numbers."""
