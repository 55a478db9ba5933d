"""What every file of a run needs: it is written whole or not at all, and it can't hold half characters."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HALF_CHARACTER = re.compile("[\ud800-\udfff]")
"""A lone surrogate: JSON can spell it, a model can write it, no file or tokenizer takes it."""


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Gives a name to write to, beside `path`, which it becomes at the end. Folders are made as needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    unfinished.unlink(missing_ok=True)  # of a crash, or a link that somebody has laid to another file
    yield unfinished
    os.replace(unfinished, path)
