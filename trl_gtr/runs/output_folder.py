"""The folder that a run writes into: what an earlier run has left there, and when that may go.

Only what bears a name that a run gives is ever removed, and only if `overwrite` asks for it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..policy.weights import VALUE_HEAD_FILE
from ..responses.safe_text import printable
from . import episode_log
from .manifest import FIRST_CONTENTS_FILE, MANIFEST_FILE
from .run_log import CARD_FILE, METRICS_FILE

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_CHECKPOINT = re.compile(r"checkpoint-\d+")


def earlier_run(folder: Path) -> Iterator[Path]:
    """What another run has written here."""
    for name in (METRICS_FILE, CARD_FILE, *_adapter_files(folder)):
        if (folder / name).is_file():
            yield folder / name
    yield from (shard for _, shard in episode_log.shards(folder / episode_log.FOLDER))
    if folder.is_dir():
        yield from sorted(path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name) and path.is_dir())


def _adapter_files(folder: Path) -> tuple[str, ...]:
    """An adapter that a run has saved here: a model that is saved beside it would be loaded as that adapter."""
    # A manifest, or version 0.1's value head, tells it from an adapter that somebody else has put here.
    marks = (MANIFEST_FILE, VALUE_HEAD_FILE)
    has_adapter = any((folder / name).is_file() for name in ADAPTER_FILES)
    by_run = any((folder / name).is_file() for name in marks)
    return (*ADAPTER_FILES, *marks) if has_adapter and by_run else ()


def problem(folder: str | Path, overwrite: bool) -> str | None:
    """Why no fresh run may begin here; `None` if one may."""
    folder = Path(folder)
    found = list(earlier_run(folder))
    if found and not overwrite:
        names = ", ".join(path.name for path in found[:3]) + (", …" if len(found) > 3 else "")
        return printable(
            f"{folder} holds an earlier run ({names}). Set `overwrite=True` (--overwrite) to replace it, resume it "
            "with `resume_from_checkpoint=True` (--resume_from_checkpoint true), or choose another `output_dir`."
        )
    for path in found:
        if path.is_dir() and not any((path / name).is_file() for name in (MANIFEST_FILE, FIRST_CONTENTS_FILE)):
            return printable(
                f"{path} is not a checkpoint of this trainer, so it isn't overwritten: move it away, or choose "
                "another `output_dir`."
            )
    return None


def remove_earlier_run(folder: str | Path) -> None:
    """Everything that `earlier_run` names; other files stay."""
    for path in list(earlier_run(Path(folder))):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
