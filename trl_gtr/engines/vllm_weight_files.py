"""Weights as files for other processes, in memory if possible."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

_IN_MEMORY = "/dev/shm"


def sync_folder(chosen: str | None) -> str:
    """The folder for weight files: the chosen one, or one in this machine's memory."""
    if chosen is not None:
        Path(chosen).mkdir(parents=True, exist_ok=True)
        return chosen
    return _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else tempfile.gettempdir()


def write_weights(weights: Iterable[tuple[str, torch.Tensor]], path: Path) -> Path:
    """Write weights as a safetensors file."""
    save_file({name: weight.cpu().contiguous() for name, weight in weights}, path)
    return path
