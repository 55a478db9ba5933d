"""Guards for a process that runs ALFWorld's packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def argv_kept() -> Iterator[None]:
    """Fast Downward's translator overwrites `sys.argv` to talk to its own option parser; put it back."""
    argv = sys.argv
    try:
        yield
    finally:
        sys.argv = argv
