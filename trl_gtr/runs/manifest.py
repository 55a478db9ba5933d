"""`manifest.json`: the description of a checkpoint or saved agent.

It holds the task, the package versions and the settings that a resumed run must share. A checkpoint's manifest also
lists the size and SHA-256 of every file, so damaged checkpoints are detected.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from ..config import GTRConfig
from ..guides.base import Guide
from ..learning.advantages import AdvantageEstimator
from ..policy.loading import SAVED_BASE
from ..storage.files import atomic_write
from ..tasks.base import Task

MANIFEST_FILE = "manifest.json"
FIRST_CONTENTS_FILE = "gtr_contents.json"
"""The file version 0.1 wrote instead."""
FORMAT = 3
"""Checkpoint format. Version 0.1 used 1 and 2."""
PACKAGES = ("trl-gtr", "trl", "transformers", "accelerate", "peft", "torch", "datasets", "gymnasium", "numpy")


@dataclass(frozen=True)
class Manifest:
    """Contents of `manifest.json`.

    Args:
        task: The task's name.
        task_options: Its options.
        settings: Everything else that a resumed run must share.
        versions: Versions of Python and the packages the run depends on.
        files: Size and SHA-256 of each file in a checkpoint; `None` for a saved agent.
    """

    task: str
    task_options: dict[str, Any]
    settings: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, dict[str, Any]] | None = None

    def write(self, folder: str | Path) -> None:
        """Write `manifest.json` for a saved agent or checkpoint."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "task": {"name": self.task, "options": self.task_options},
            "versions": self.versions,
            "settings": self.settings,
        }
        if self.files is not None:
            content["files"] = self.files
        with atomic_write(Path(folder) / MANIFEST_FILE) as file:
            file.write_text(json.dumps(content, indent=2))

    def listing(self, folder: Path) -> Manifest:
        """This manifest with all the files in `folder` listed, for a checkpoint."""
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST_FILE)
        listed = {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": checksum(path)}
            for path in files
        }
        return replace(self, files=listed)

    @classmethod
    def read(cls, folder: str | Path) -> Manifest:
        """Read a folder's manifest. Raises a `ValueError` with advice if it is missing or unreadable."""
        file = Path(folder) / MANIFEST_FILE
        if not file.is_file():
            raise ValueError(_why_no_manifest(Path(folder)))
        try:
            content = json.loads(file.read_text())
            found = content["format"]
            if found == FORMAT:
                return cls(
                    task=str(content["task"]["name"]),
                    task_options=dict(content["task"]["options"]),
                    settings=dict(content["settings"]),
                    versions=dict(content["versions"]),
                    files=_file_list(content["files"]) if "files" in content else None,
                )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder} is damaged: {MANIFEST_FILE} can't be read ({error!r}).") from error
        raise ValueError(
            f"{folder} is a checkpoint of format {found!r}, but this version of trl-gtr reads only format {FORMAT}: "
            "finish that run with the version that started it, or start a new run with this folder as the model."
        )

    def check_files(self, folder: str | Path) -> None:
        """Raise a `ValueError` if a file of this checkpoint is missing, truncated or modified."""
        if self.files is None:
            raise ValueError(
                f"{folder} is a saved agent, not a checkpoint: resume from a checkpoint-* folder, or start a new run "
                "with this folder as the model."
            )
        for name, listed in self.files.items():
            path = Path(folder) / name
            if not path.is_file():
                raise ValueError(f"{folder} is damaged: {name} is missing.")
            if path.stat().st_size != listed["bytes"]:
                raise ValueError(
                    f"{folder} is damaged: {name} has {path.stat().st_size} bytes, not {listed['bytes']}."
                )
            if checksum(path) != listed["sha256"]:
                raise ValueError(f"{folder} is damaged: the contents of {name} have changed.")

    def check_task(self, folder: str | Path, task: str) -> None:
        """Raise a `ValueError` if the run was on a different task."""
        if self.task != task:
            raise ValueError(
                f"{folder} is from a run on {self.task!r}, not {task!r}: resume it on {self.task!r}, or start a new "
                "run in another --output_dir with this folder as --model_name_or_path."
            )

    def check_resumes(self, folder: str | Path, now: Manifest, allow_changes: bool) -> None:
        """Raise a `ValueError` if a run described by `now` can't continue this checkpoint in `folder`."""
        self.check_files(folder)
        self.check_task(folder, now.task)
        then_all, now_all = self._compared(), now._compared()
        for setting in fields(GTRConfig):
            if setting.name in now_all:  # one that an older version didn't have yet was then what is its default now
                then_all.setdefault(setting.name, setting.default)
        changed = [name for name in {**then_all, **now_all} if then_all.get(name) != now_all.get(name)]
        if "processes" in changed:
            raise ValueError(
                f"{folder} is from a run with {then_all.get('processes')} processes, not {now_all['processes']}: each "
                "has its own environments and corrections. Launch the same number."
            )
        if changed and not allow_changes:
            listed = "; ".join(
                f"{name} was {_short(then_all.get(name))} and is {_short(now_all.get(name))}" for name in changed
            )
            raise ValueError(
                f"{folder} is from a run with other settings: {listed}. Change them back, or set "
                "`allow_changed_config=True`."
            )

    def _compared(self) -> dict[str, Any]:
        options = {f"task.{name}": value for name, value in self.task_options.items()}
        return json.loads(json.dumps(options | self.settings))  # as read from a file: lists, not tuples


def describe_run(
    task: Task, guide: Guide, estimator: AdvantageEstimator, adapter: Mapping[str, Any], args: GTRConfig
) -> Manifest:
    """The manifest of a run.

    Args:
        task: The task.
        guide: Who teaches thoughts, and with which corrector, if any.
        estimator: What a step is worth; it decides whether there is a value head.
        adapter: Settings of the trained adapter; empty without one.
        args: The run's settings.
    """
    lora = {name: value for name, value in _plain(adapter).items() if name != "peft_version"}
    base = Path(lora.get("base_model_name_or_path") or "").name
    if base.startswith(SAVED_BASE):
        lora["base_model_name_or_path"] = base  # a base saved with the run: its name survives moving the run
    options = {name: value for name, value in _plain(vars(task)).items() if name[0] != "_"}
    history = {"history_turns": task.history_turns, "history_images": task.history_images}  # maybe of its class
    return Manifest(
        task=task.name,
        task_options=options | {name: value for name, value in history.items() if value},
        settings={
            "guide": type(guide).__name__,
            **{f"guide.{name}": value for name, value in guide.settings().items()},
            "corrector": None if guide.corrector is None else guide.corrector.identity,
            "estimator": type(estimator).__name__,
            **{f"adapter.{name}": value for name, value in lora.items()},
            **args.resume_settings(),
        },
        versions=package_versions(),
    )


def package_versions() -> dict[str, str]:
    """Versions of Python and the packages a run depends on."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def saved_task(folder: str | Path) -> str | None:
    """The task the agent in this folder was trained on; `None` without a manifest."""
    return Manifest.read(folder).task if (Path(folder) / MANIFEST_FILE).is_file() else None


def saved_history(folder: str | Path) -> tuple[int, int] | None:
    """How many earlier turns, and how many of these with pictures, this agent saw in training; `None` without a
    manifest."""
    if not (Path(folder) / MANIFEST_FILE).is_file():
        return None
    options = Manifest.read(folder).task_options
    return options.get("history_turns", 0), options.get("history_images", 0)


def find_checkpoint(given: str | bool | None, output_dir: str, required: bool) -> str | None:
    """The folder to resume from: the given path, for `True` the newest one in `output_dir`, `None` for a new run.

    Args:
        given: `resume_from_checkpoint`.
        output_dir: The run's output folder.
        required: With `True` and no checkpoint in `output_dir`, raise an error instead of starting a new run.
    """
    if not given:
        return None
    if given is not True:
        folder = str(given)
    else:
        newest = get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
        if newest is None and required:
            raise ValueError(f"`resume_from_checkpoint=True`, but {output_dir} holds no checkpoint-* folder.")
        if newest is None:
            return None
        folder = newest
    if not (Path(folder) / MANIFEST_FILE).is_file():
        raise ValueError(_why_no_manifest(Path(folder)))
    return folder


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _why_no_manifest(folder: Path) -> str:
    if (folder / FIRST_CONTENTS_FILE).is_file():
        return (
            f"{folder} is a checkpoint of trl-gtr 0.1, which this version can't resume: finish that run with the "
            "version that started it, or start a new run with this folder as the model."
        )
    return (
        f"{folder} is not a checkpoint of this trainer ({MANIFEST_FILE} is missing). Pass a checkpoint-* folder of a "
        "GTR run, or start a new run with this folder as the model."
    )


def _file_list(listed: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])} for name, entry in listed.items()}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keep only the values that JSON can represent."""
    plain: dict[str, Any] = {}
    for name, value in values.items():
        with suppress(TypeError, ValueError):
            plain[name] = json.loads(json.dumps(sorted(value) if isinstance(value, set | frozenset) else value))
    return plain


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}…"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
