"""A run's output folder: finds what an earlier run left there and removes it on request.

Only files and folders with names that runs use are ever removed, and only with `overwrite`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..guides import merging
from ..policy.weights import VALUE_HEAD_FILE
from ..responses.safe_text import printable
from . import episode_log
from .manifest import FIRST_CONTENTS_FILE, MANIFEST_FILE
from .run_log import CARD_FILE, METRICS_FILE

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_CHECKPOINT = re.compile(r"checkpoint-\d+")


def earlier_run(folder: Path) -> Iterator[Path]:
    """Files and folders written by an earlier run."""
    for name in (METRICS_FILE, CARD_FILE, *_adapter_files(folder)):
        if (folder / name).is_file():
            yield folder / name
    yield from sorted((folder / merging.FOLDER).glob("*.safetensors"))
    yield from (shard for _, shard in episode_log.shards(folder / episode_log.FOLDER))
    if folder.is_dir():
        yield from sorted(path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name) and path.is_dir())


def _adapter_files(folder: Path) -> tuple[str, ...]:
    """An adapter saved here by a run. If left, a full model saved next to it would be loaded as that adapter."""
    # A manifest (or version 0.1's value head) marks an adapter as saved by a run.
    marks = (MANIFEST_FILE, VALUE_HEAD_FILE)
    has_adapter = any((folder / name).is_file() for name in ADAPTER_FILES)
    by_run = any((folder / name).is_file() for name in marks)
    return (*ADAPTER_FILES, *marks) if has_adapter and by_run else ()


def problem(folder: str | Path, overwrite: bool) -> str | None:
    """Why a new run can't start here; `None` if it can."""
    folder = Path(folder)
    found = list(earlier_run(folder))
    if found and not overwrite:
        names = ", ".join(path.name for path in found[:3]) + (", …" if len(found) > 3 else "")
        can_resume = any((path / MANIFEST_FILE).is_file() for path in found)
        resume = " resume it with `resume_from_checkpoint=True` (--resume_from_checkpoint true)," if can_resume else ""
        return printable(
            f"{folder} contains an earlier run ({names}). Set `overwrite=True` (--overwrite) to replace it,{resume} "
            "or choose another `output_dir`."
        )
    for path in found:
        if path.is_dir() and not any((path / name).is_file() for name in (MANIFEST_FILE, FIRST_CONTENTS_FILE)):
            return printable(
                f"{path} is not a checkpoint of this trainer, so it won't be overwritten: move it, or choose "
                "another `output_dir`."
            )
    return None


def remove_earlier_run(folder: str | Path) -> None:
    """Remove everything that `earlier_run` finds; other files stay."""
    for path in list(earlier_run(Path(folder))):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
