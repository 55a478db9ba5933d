"""Helpers for writing a run's files: atomic writes, links, and a pattern for lone surrogates, which no file holds."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""JSON can escape one and a model can produce one, but no file or tokenizer accepts it."""


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path` to write a file or folder to; it is renamed to `path` on success."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    _remove(unfinished)  # left over from a crash, or a symlink to some other file
    try:
        yield unfinished
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):  # report the original error
            _remove(unfinished)
        raise


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def writing_log(path: Path) -> Iterator[None]:
    """Turn write errors, e.g. on a full disk, into one that names the file and what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} could not be written ({error}). Earlier checkpoints are intact: fix this and resume."
        ) from error


def sync(path: Path) -> None:
    """Flush a file or folder to disk, so that a rename can't become durable before the contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link, which takes no space, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
