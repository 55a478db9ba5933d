"""What every file of a run needs: it is written whole or not at all, and it can't hold half characters."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""A lone surrogate: JSON can spell it, a model can write it, no file or tokenizer takes it."""


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Gives a name to write a file or folder to, beside `path`, which it becomes at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    _remove(unfinished)  # left by a crash, or a link that somebody has laid to another file
    try:
        yield unfinished
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):  # the first error is the one to tell
            _remove(unfinished)
        raise


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def writing_log(path: Path) -> Iterator[None]:
    """A disk that is full or read-only ends the run with the file's name and what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} could not be written ({error}). Earlier checkpoints are intact: fix this and resume."
        ) from error


def sync(path: Path) -> None:
    """Onto the disk: a name must not be there before what it stands for."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
