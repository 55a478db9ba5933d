"""Weights as files for other processes, in memory if possible."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

_IN_MEMORY = "/dev/shm"
_PREFIX = "trl-gtr-"
_LOCK = "in-use"


class ScratchFolder:
    """A folder for weight files, removed by `close`.

    Args:
        parent: Where it is created; `None`: in this machine's memory, where the next run removes it if this one is
            killed.
    """

    def __init__(self, parent: str | None = None) -> None:
        if parent is None:
            parent = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else tempfile.gettempdir()
            _remove_leftovers(Path(parent))  # not in a folder that other machines see, whose locks may not work
        Path(parent).mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent)
        self.path = Path(self._folder.name)
        new = self.path / "new"
        self._lock = new.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        new.rename(self.path / _LOCK)  # nobody sees it without its lock

    def close(self) -> None:
        self._lock.close()
        self._folder.cleanup()


def _remove_leftovers(parent: Path) -> None:
    """Remove folders of processes that were killed, which alone are not locked."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)
        except OSError:
            continue  # in use, somebody else's, or removed meanwhile


def write_weights(weights: Iterable[tuple[str, torch.Tensor]], path: Path) -> Path:
    """Write weights as a safetensors file."""
    tensors = {name: weight.cpu().contiguous() for name, weight in weights}
    size, free = sum(each.nbytes for each in tensors.values()), shutil.disk_usage(path.parent).free
    if size > free:
        raise ValueError(
            f"The weights for vLLM take {size / 2**30:.2f} GiB, and {path.parent.parent} has {free / 2**30:.2f} GiB "
            "free: set `vllm_sync_dir` to a larger folder, or `vllm_sync` to 'nccl' or 'gloo'. (Docker gives /dev/shm "
            "64 MiB unless it is started with --shm-size.)"
        )
    save_file(tensors, path)
    return path
