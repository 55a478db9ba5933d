"""Protect process state while Fast Downward's translator runs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def translating() -> Iterator[None]:
    """Restore `sys.argv`, which the translator overwrites for its own option parser.

    Garbage collection is paused: the translator creates a hundred thousand small objects that live until it ends, and
    scanning them repeatedly would take a seventh of its time.
    """
    argv, collecting = sys.argv, gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        sys.argv = argv
        if collecting:
            gc.enable()
