"""What a run says of itself on disk while it runs: `metrics.jsonl`, a line a log, and `run.json`, its card.

Both are complete at every moment, so that a report can be made of a run that goes on or has crashed.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import os
import platform
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from ..config import GTRConfig, refused_fields
from ..storage.files import writing_log, written_whole
from .manifest import package_versions

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
CARD_FILE = "run.json"
MOST_WARNINGS = 100
LIBRARY = "trl_gtr"
"""The logger whose warnings are kept."""


class RunLog(TrainerCallback):
    """Keeps `metrics.jsonl` and `run.json`. Everything is left to the first process.

    Args:
        args: The settings, which the card shows.
        about: More for the card: task, model, corrector.
    """

    def __init__(self, args: GTRConfig, about: dict[str, Any]) -> None:
        self.folder, self.about = Path(args.output_dir), about
        self.warnings = _WarningList()
        self.began = False
        self.card: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.warnings.listen()
        self.began = True
        self.card = run_card(args) | self.about
        earlier = self.folder / CARD_FILE
        if state.global_step and earlier.is_file():
            try:
                old = json.loads(earlier.read_text("utf-8"))
                kept = [w for w in old["warnings"] if w["update"] <= state.global_step]
                self.card["started"], self.warnings.entries = old["started"], kept
            except (ValueError, KeyError, TypeError) as error:
                logger.warning("%s can't be read (%r): the run begins a new one.", earlier, error)
        # The history of a resumed run ends at its checkpoint: what a crash has left behind that is gone.
        metrics = self.folder / METRICS_FILE
        with writing_log(metrics), written_whole(metrics) as file:
            file.write_text("".join(map(_line, state.log_history)), "utf-8")
        self._write_card()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.warnings.update = state.global_step

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Before training there is nobody to write for; what was logged until then is in the history.
        if self.began:
            metrics = self.folder / METRICS_FILE
            with writing_log(metrics), metrics.open("a", encoding="utf-8") as file:
                file.write(_line(state.log_history[-1]))
            self._write_card()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.began:
            self.warnings.stop()
            self._write_card()

    def _write_card(self) -> None:
        self.card |= {"warnings": self.warnings.entries, "updated": _now()}
        card = self.folder / CARD_FILE
        with writing_log(card), written_whole(card) as file:
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
    return {
        "started": _now(),
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


def _is_set(name: str, value: Any, defaults: dict[str, Any]) -> bool:
    """Whether somebody chose this value; not what the arguments work out by themselves or hide."""
    if name not in defaults or name in (*refused_fields(), "accelerator_config") or name.endswith("_token"):
        return False
    return value != defaults[name] and bool(value or defaults[name])


class _WarningList(logging.Handler):
    """The library's warnings, each with the update after which it came; the same words once, with their count."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.entries: list[dict[str, Any]] = []
        self.update = 0

    def listen(self) -> None:
        library = logging.getLogger(LIBRARY)
        for other in [handler for handler in library.handlers if isinstance(handler, _WarningList)]:
            library.removeHandler(other)  # of a run that ended in an error
        library.addHandler(self)

    def stop(self) -> None:
        logging.getLogger(LIBRARY).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if logging.lastResort is not None and not logging.getLogger().handlers:
            logging.lastResort.handle(record)  # which prints warnings only as long as nobody listens
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
