"""A run's log on disk: `metrics.jsonl`, one line per log, and `run.json`, its card.

Both are always valid, so a run can be reported while it is running or after a crash. The card records the process, so
readers can tell the two apart.
"""

from __future__ import annotations

import atexit
import dataclasses
import datetime
import json
import logging
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from .. import tiny_llava
from ..config import GTRConfig, refused_fields
from ..responses.safe_text import one_line
from ..storage.files import atomic_write, writing_log
from .manifest import package_versions

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
CARD_FILE = "run.json"
MOST_WARNINGS = 100
SECRETS = ("token", "key", "password", "secret")
"""Suffixes of options whose values are hidden in the card."""
TRAIN_SCRIPT = ("trl_gtr", "scripts", "train.py")
"""What `trl-gtr train` runs."""
LIBRARY = "trl_gtr"
"""The logger whose warnings are kept."""


class RunLog(TrainerCallback):
    """Writes `metrics.jsonl` and `run.json`, on rank 0 only.

    Args:
        args: The settings, shown in the card.
        about: Further card entries: task, model, corrector.
    """

    def __init__(self, args: GTRConfig, about: dict[str, Any]) -> None:
        self.folder, self.about = Path(args.output_dir), about
        self.warnings = _WarningList()
        self.card: dict[str, Any] = {}
        """Empty before training, and on all ranks but 0."""
        self.earlier_seconds, self.begun_at = 0.0, 0.0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.warnings.listen()
        self.earlier_seconds, self.begun_at = 0.0, time.monotonic()
        self.card = run_card(args) | self.about | {"state": "running", "updates": state.max_steps}
        self.card["model"] = tiny_llava.name_of(self.card["model"])
        earlier = self.folder / CARD_FILE
        if state.global_step and earlier.is_file():
            try:
                old = json.loads(earlier.read_text("utf-8"))
                kept = [w for w in old["warnings"] if w["update"] <= state.global_step]
                self.card["started"], self.warnings.entries = old["started"], kept
                self.earlier_seconds = float(old.get("seconds", 0.0))
            except (ValueError, KeyError, TypeError) as error:
                logger.warning("%s can't be read (%r): starting a new one.", earlier, error)
        # A resumed run's history ends at its checkpoint; drop anything logged after it.
        metrics = self.folder / METRICS_FILE
        with writing_log(metrics), atomic_write(metrics) as file:
            file.write_text("".join(map(_line, state.log_history)), "utf-8")
        self._write_card()
        atexit.register(self._note_crash)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.warnings.update = state.global_step
        if self.card:
            self.card["updates"] = state.max_steps  # with groups, an estimate that changes

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Anything logged before training is in the history, which is written when training begins.
        if self.card:
            metrics = self.folder / METRICS_FILE
            with writing_log(metrics), metrics.open("a", encoding="utf-8") as file:
                file.write(_line(state.log_history[-1]))
            self._write_card()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.card:
            self.warnings.stop()
            atexit.unregister(self._note_crash)
            self.card["state"] = "finished" if state.global_step >= state.max_steps else "stopped"
            self._write_card()

    def _note_crash(self) -> None:
        """Called if the interpreter exits before training ends: record the crash, and the error if known."""
        card = self.folder / CARD_FILE
        if not card.is_file() or json.loads(card.read_text("utf-8")).get("updated") != self.card["updated"]:
            return  # removed, or written by a later run
        error = getattr(sys, "last_value", None)
        self.card |= {"state": "crashed", "error": None if error is None else one_line(repr(error), 500)}
        self._write_card()

    def _write_card(self) -> None:
        seconds = self.earlier_seconds + time.monotonic() - self.begun_at
        self.card |= {"warnings": self.warnings.entries, "updated": _now(), "seconds": round(seconds, 1)}
        card = self.folder / CARD_FILE
        with writing_log(card), atomic_write(card) as file:
            file.write_text(json.dumps(self.card, indent=1, default=str), "utf-8")


def run_card(args: GTRConfig) -> dict[str, Any]:
    """Settings, versions and hardware. Tokens of hubs are hidden by `to_dict`."""
    config = args.to_dict()
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(args):
        if field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
    process = psutil.Process()
    return {
        "started": _now(),
        "command": command_line(sys.argv),
        "process": {"host": platform.node(), "pid": process.pid, "created": process.create_time()},
        "config": config,
        "changed": sorted(name for name, value in config.items() if _is_set(name, value, defaults)),
        "versions": package_versions(),
        "hardware": {
            "machine": platform.platform(),
            "cpu_cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "processes": args.world_size,
            "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "float32",
        },
    }


def command_line(words: Sequence[str]) -> str:
    """A command as typed, without secrets and local folders: it is published with the agent."""
    program, *given = words
    shown = ["trl-gtr train" if Path(program).parts[-3:] == TRAIN_SCRIPT else shlex.quote(_without_folder(program))]
    hide_next = False
    for word in given:
        name, equals, value = word.partition("=")
        secret = name.startswith("--") and name.lower().endswith(SECRETS)
        plain = f"{name}={_without_folder(value)}" if equals else _without_folder(word)
        shown.append("[hidden]" if hide_next else f"{name}=[hidden]" if secret and equals else shlex.quote(plain))
        hide_next = secret and not equals
    return " ".join(shown)


def _without_folder(word: str) -> str:
    """The last part of an absolute path; any other word unchanged."""
    return (Path(word).name if Path(word).is_absolute() else word) or word


def _is_set(name: str, value: Any, defaults: dict[str, Any]) -> bool:
    """Whether the user chose this value; excludes derived and hidden fields."""
    if name not in defaults or name in (*refused_fields(), "accelerator_config") or name.endswith("_token"):
        return False
    return value != defaults[name] and bool(value or defaults[name])


class _WarningList(logging.Handler):
    """Collects the library's warnings with their update; repeats are counted, not listed again."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.entries: list[dict[str, Any]] = []
        self.update = 0

    def listen(self) -> None:
        library = logging.getLogger(LIBRARY)
        for other in [handler for handler in library.handlers if isinstance(handler, _WarningList)]:
            library.removeHandler(other)  # left by a run that failed
        library.addHandler(self)

    def stop(self) -> None:
        logging.getLogger(LIBRARY).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if logging.lastResort is not None and not logging.getLogger().handlers:
            logging.lastResort.handle(record)  # it would print the warning if this handler weren't installed
        message = record.getMessage()
        for entry in self.entries:
            if entry["message"] == message:
                entry["count"] += 1
                return
        if len(self.entries) < MOST_WARNINGS:
            self.entries.append({"update": self.update, "message": message, "count": 1})


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry) + "\n"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
