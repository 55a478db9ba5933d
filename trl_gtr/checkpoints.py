"""What a resumed run needs beside the policy: value head, correction buffer, environments, counters.

`Trainer` writes policy (an ordinary `from_pretrained` folder), optimizer, scheduler, random states and its own
counters; the rest is here, in the same checkpoint folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.trainer_utils import get_last_checkpoint

from .models import unwrap_adapter
from .rollouts import RolloutCollector
from .thought_cloning import CorrectionBuffer

VALUE_HEAD_FILE = "value_head.safetensors"
BUFFER_FILE = "correction_buffer_{rank}.npz"
ENVIRONMENTS_FILE = "environments_{rank}.pkl"
STATE_FILE = "gtr_state_{rank}.json"


def save_value_head(folder: str | Path, value_head: nn.Module, task: str) -> None:
    """The head, and beside it what it values: the name of the task."""
    save_file(value_head.state_dict(), Path(folder) / VALUE_HEAD_FILE, metadata={"task": task})


def saved_task(folder: str | Path) -> str | None:
    """The task that the agent in this folder was trained on; `None` if no GTR run has written it."""
    file = Path(folder) / VALUE_HEAD_FILE
    if not file.is_file():
        return None
    with safe_open(file, "pt") as stored:
        return (stored.metadata() or {}).get("task")


def check_task(checkpoint: str | Path, task: str) -> None:
    """A run can be resumed on its own task only."""
    if (saved := saved_task(checkpoint)) != task:
        raise ValueError(
            f"{checkpoint} is of a run on {saved!r}, not on {task!r}: resume it on {saved!r}, or start a new run in "
            "another --output_dir with this folder as --model_name_or_path."
        )


def load_value_head(folder: str | Path, value_head: nn.Module) -> None:
    value_head.load_state_dict(load_file(Path(folder) / VALUE_HEAD_FILE))


def save_run_state(
    folder: str | Path, rank: int, buffer: CorrectionBuffer, collector: RolloutCollector, state: dict[str, Any]
) -> None:
    """What each process has for itself; `state` is plain JSON values."""
    folder = Path(folder)
    np.savez(folder / BUFFER_FILE.format(rank=rank), **buffer.state_dict())  # type: ignore[arg-type]
    (folder / ENVIRONMENTS_FILE.format(rank=rank)).write_bytes(collector.state_dict())
    (folder / STATE_FILE.format(rank=rank)).write_text(json.dumps(state, indent=2))


def read_run_state(folder: str | Path, rank: int) -> dict[str, Any]:
    return json.loads((Path(folder) / STATE_FILE.format(rank=rank)).read_text())


def load_run_state(folder: str | Path, rank: int, buffer: CorrectionBuffer, collector: RolloutCollector) -> None:
    folder = Path(folder)
    with np.load(folder / BUFFER_FILE.format(rank=rank), allow_pickle=False) as arrays:
        buffer.load_state_dict(dict(arrays))
    # A checkpoint is as trusted as the code that wrote it: environments can only be stored as pickles.
    collector.load_state_dict((folder / ENVIRONMENTS_FILE.format(rank=rank)).read_bytes())


def load_policy_weights(folder: str | Path, policy: nn.Module) -> None:
    """Put a checkpoint's weights, or its adapter, into `policy`."""
    if hasattr(policy, "peft_config"):
        from peft import load_peft_weights, set_peft_model_state_dict

        outcome = set_peft_model_state_dict(policy, load_peft_weights(str(folder), device="cpu"))
        if outcome.unexpected_keys:
            raise ValueError(f"{folder} holds an adapter of another shape: {outcome.unexpected_keys[:3]} …")
        return
    model = unwrap_adapter(policy)
    # Through from_pretrained, not load_state_dict: a checkpoint's keys may be named otherwise than the module's.
    saved = type(model).from_pretrained(folder, dtype=next(model.parameters()).dtype)
    with torch.no_grad():
        model.load_state_dict(saved.state_dict())


def resolve_checkpoint(resume_from_checkpoint: str | bool | None, output_dir: str) -> str | None:
    """The folder to resume from: a given path, the newest one in `output_dir` for `True`, `None` for a fresh run."""
    if not resume_from_checkpoint:
        return None
    if resume_from_checkpoint is True:
        found = get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
        if found is None:
            raise ValueError(f"`resume_from_checkpoint=True`, but {output_dir} holds no checkpoint-* folder.")
        return found
    if not (Path(resume_from_checkpoint) / VALUE_HEAD_FILE).is_file():
        raise ValueError(
            f"{resume_from_checkpoint} is no checkpoint of this trainer ({VALUE_HEAD_FILE} is missing). Name a "
            "checkpoint-* folder of a GTR run, or load the folder as the model and start afresh."
        )
    return str(resume_from_checkpoint)
