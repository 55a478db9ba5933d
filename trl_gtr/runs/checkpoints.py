"""What a resumed run needs beside the policy: value head, guide, environments, counters.

`Trainer` writes policy (an ordinary `from_pretrained` folder), optimizer, scheduler, random states and its own
counters; the rest is here, in the same checkpoint folder. A checkpoint is written under another name and gets its own
when it is whole; a list of its files and settings is in it, by which a damaged or foreign one is refused.

A checkpoint is data: nothing in it is executed (DeepSpeed's own files and `pickle_environments=True` excepted).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.trainer_utils import get_last_checkpoint

from ..storage import plain_data
from ..storage.files import sync
from ..policy.loading import unwrap_adapter
from ..rollouts.collector import RolloutCollector
from ..guides.base import Guide

VALUE_HEAD_FILE = "value_head.safetensors"
CLONING_FILE = "cloning_optimizer.pt"
GUIDE_FILE = "guide_{rank}.pt"
ENVIRONMENTS_FILE = "environments_{rank}.json.gz"
STATE_FILE = "gtr_state_{rank}.json"
CONTENTS_FILE = "gtr_contents.json"
FORMAT = 2
"""Which kind of checkpoint this is; 1 held its environments as pickles."""
INCOMPLETE = "incomplete_checkpoint"
"""Folder in the output folder for a checkpoint that is being written."""


def publish(folder: Path, final: Path, settings: Mapping[str, Any]) -> None:
    """Give a checkpoint that is whole its own name, at once."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    contents = {
        "format": FORMAT,
        "settings": dict(settings),
        "files": {path.relative_to(folder).as_posix(): [path.stat().st_size, _checksum(path)] for path in files},
    }
    (folder / CONTENTS_FILE).write_text(json.dumps(contents, indent=2))
    for path in (*files, folder / CONTENTS_FILE, folder):
        sync(path)
    if final.exists():  # of an earlier run in this folder
        final.rename(folder.parent / "replaced")
    folder.rename(final)
    sync(final.parent)


def check(folder: str | Path, settings: Mapping[str, Any], allow_changes: bool = False) -> str | None:
    """What keeps this checkpoint from being resumed with these settings; `None` if nothing does."""
    folder = Path(folder)
    try:
        contents = json.loads((folder / CONTENTS_FILE).read_text())
        files = [(name, size, checksum) for name, (size, checksum) in contents["files"].items()]
        then, found = dict(contents["settings"]), contents.get("format", 1)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{folder} is damaged: {CONTENTS_FILE} can't be read ({error!r})."
    if found != FORMAT:
        return (
            f"{folder} is a checkpoint of format {found!r}, and this version of trl-gtr reads format {FORMAT} only: "
            "finish that run with the version that started it, or start a new one with this folder as the model."
        )
    for name, size, checksum in files:
        path = folder / name
        if not path.is_file():
            return f"{folder} is damaged: {name} is missing."
        if path.stat().st_size != size:
            return f"{folder} is damaged: {name} has {path.stat().st_size} bytes, not {size}."
        if _checksum(path) != checksum:
            return f"{folder} is damaged: the contents of {name} have changed."
    try:
        check_task(folder, settings["task"])
    except ValueError as error:
        return str(error)
    now = json.loads(json.dumps(dict(settings)))
    changed = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    if "processes" in changed:
        return (
            f"{folder} is of a run with {then['processes']} processes, not {now['processes']}: each has environments "
            "and corrections of its own. Launch as many."
        )
    if changed and not allow_changes:
        listed = "; ".join(f"{name} was {_short(then.get(name))} and is {_short(now.get(name))}" for name in changed)
        return f"{folder} is of another run: {listed}. Set them back, or set `allow_changed_config=True`."
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}…"


def _checksum(path: Path) -> str:
    checksum = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            checksum.update(block)
    return checksum.hexdigest()


def random_states() -> dict[str, Any]:
    """Every global random generator, for [`set_random_states`]."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else {})


def set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])


def save_value_head(folder: str | Path, state: Mapping[str, torch.Tensor], task: str) -> None:
    """The head, and beside it what it values: the name of the task."""
    save_file(dict(state), Path(folder) / VALUE_HEAD_FILE, metadata={"task": task})


def saved_task(folder: str | Path) -> str | None:
    """The task that the agent in this folder was trained on; `None` if no GTR run has written it."""
    file = Path(folder) / VALUE_HEAD_FILE
    if not file.is_file():
        return None
    try:
        with safe_open(file, "pt") as stored:
            return (stored.metadata() or {}).get("task")
    except SafetensorError as error:
        raise ValueError(f"{folder} is damaged: {VALUE_HEAD_FILE} can't be read ({error}).") from error


def check_task(checkpoint: str | Path, task: str) -> None:
    """A run can be resumed on its own task only."""
    saved = saved_task(checkpoint)
    if saved is None:
        raise ValueError(f"{checkpoint} is damaged: {VALUE_HEAD_FILE} is missing.")
    if saved != task:
        raise ValueError(
            f"{checkpoint} is of a run on {saved!r}, not on {task!r}: resume it on {saved!r}, or start a new run in "
            "another --output_dir with this folder as --model_name_or_path."
        )


def load_value_head(folder: str | Path, value_head: nn.Module) -> None:
    value_head.load_state_dict(load_file(Path(folder) / VALUE_HEAD_FILE))


def save_run_state(
    folder: str | Path, rank: int, guide: Guide, collector: RolloutCollector, state: dict[str, Any]
) -> None:
    """What each process has for itself; `state` is plain JSON values."""
    folder = Path(folder)
    torch.save(guide.state_dict(), folder / GUIDE_FILE.format(rank=rank))
    with gzip.open(folder / ENVIRONMENTS_FILE.format(rank=rank), "wt", compresslevel=1) as file:
        json.dump(plain_data.encode(collector.state_dict()), file)
    (folder / STATE_FILE.format(rank=rank)).write_text(json.dumps(state, indent=2))


def read_run_state(folder: str | Path, rank: int) -> dict[str, Any]:
    return json.loads((Path(folder) / STATE_FILE.format(rank=rank)).read_text())


def load_run_state(
    folder: str | Path, rank: int, guide: Guide, collector: RolloutCollector, exact: bool = True
) -> None:
    """For `exact` see `RolloutCollector.load_state_dict`."""
    folder = Path(folder)
    guide.load_state_dict(torch.load(folder / GUIDE_FILE.format(rank=rank), map_location="cpu", weights_only=True))
    file = folder / ENVIRONMENTS_FILE.format(rank=rank)
    try:
        environments = plain_data.decode(json.loads(gzip.decompress(file.read_bytes())))
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise ValueError(f"{folder} is damaged: {file.name} can't be read ({error!r}).") from error
    collector.load_state_dict(environments, exact)


def load_policy_weights(folder: str | Path, policy: nn.Module) -> None:
    """Put a checkpoint's weights, or its adapter, into `policy`."""
    if hasattr(policy, "peft_config"):
        from peft import load_peft_weights, set_peft_model_state_dict

        weights = load_peft_weights(str(folder), device="cpu")
        outcome = set_peft_model_state_dict(policy, weights, adapter_name=policy.active_adapter)
        trained = {name for name, weight in policy.named_parameters() if weight.requires_grad}
        foreign = [*outcome.unexpected_keys, *trained.intersection(outcome.missing_keys)]
        if foreign:
            raise ValueError(f"{folder} holds an adapter of another shape: {foreign[:3]} …")
        return
    model = unwrap_adapter(policy)
    # Through from_pretrained, not load_state_dict: a checkpoint's keys may be named otherwise than the module's.
    saved = type(model).from_pretrained(folder, dtype=next(model.parameters()).dtype)
    with torch.no_grad():
        model.load_state_dict(saved.state_dict())


def resolve_checkpoint(
    resume_from_checkpoint: str | bool | None, output_dir: str, required: bool = True
) -> str | None:
    """The folder to resume from: a given path, the newest one in `output_dir` for `True`, `None` for a fresh run.

    Where none is in `output_dir`, `True` is an error if one is `required`, and a fresh run otherwise.
    """
    if not resume_from_checkpoint:
        return None
    folder = None if resume_from_checkpoint is True else str(resume_from_checkpoint)
    if folder is None:
        folder = get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
        if folder is None and not required:
            return None
        if folder is None:
            raise ValueError(f"`resume_from_checkpoint=True`, but {output_dir} holds no checkpoint-* folder.")
    if not (Path(folder) / CONTENTS_FILE).is_file():
        raise ValueError(
            f"{folder} is no checkpoint of this trainer ({CONTENTS_FILE} is missing). Name a checkpoint-* folder of a "
            "GTR run, or load the folder as the model and start afresh."
        )
    return folder
