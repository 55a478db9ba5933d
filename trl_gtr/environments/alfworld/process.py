"""A guard for the process while Fast Downward's translator runs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def translating() -> Iterator[None]:
    """Put `sys.argv` back, which the translator overwrites to talk to its own option parser.

    Garbage collection pauses: the translator makes a hundred thousand small objects that live to its end, and looking
    through them again and again would take a seventh of its time.
    """
    argv, collecting = sys.argv, gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        sys.argv = argv
        if collecting:
            gc.enable()
