"""Saves and restores all the state a run needs to continue.

`Trainer` saves and loads the policy, optimizer, scheduler, random states and its own counters. A [`RunCheckpointer`]
adds the state of the run's other parts and a manifest, all in the same folder. A checkpoint is atomic: it is written
under a temporary name and renamed once every process has written its part.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers.trainer_utils import rotate_checkpoints

from ..config import GTRConfig
from ..distributed.processes import Processes
from ..guides.base import Guide
from ..storage.files import sync
from ..storage.state_files import PLAIN, StateFormat
from . import output_folder
from .manifest import MANIFEST_FILE, Manifest, find_checkpoint

logger = logging.getLogger(__name__)

INCOMPLETE = "incomplete_checkpoint"
"""Subfolder of the output folder that holds a checkpoint while it is being written."""


class Stateful(Protocol):
    """A part of a run that has state."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


@dataclass(frozen=True)
class Part:
    """A stateful part and how it is saved.

    Args:
        owner: The object that has the state.
        format: Its file format.
        shared: The state is the same on all processes, so only rank 0 saves it.
    """

    owner: Stateful
    format: StateFormat = PLAIN
    shared: bool = False

    def file(self, name: str, rank: int) -> str:
        return f"{name}{self.format.suffix}" if self.shared else f"{name}_{rank}{self.format.suffix}"


@dataclass(frozen=True)
class GuideFiles:
    """A guide's files as a part of their own.

    Args:
        guide: The run's guide.
    """

    guide: Guide

    def state_dict(self) -> dict[str, Path]:
        return self.guide.files()

    def load_state_dict(self, state: Mapping[str, Path]) -> None:
        self.guide.load_files(state)


@dataclass
class RunCounters:
    """Counters of a run other than updates and episodes.

    Args:
        env_steps: Environment steps so far, over all environments.
    """

    env_steps: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"env_steps": self.env_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.env_steps = state["env_steps"]


class RunCheckpointer:
    """Writes, rotates, checks and loads the checkpoints of one run. Every method must be called by all processes.

    Args:
        args: Output folder, number of checkpoints to keep, and whether settings may change on resume.
        processes: All processes of the run.
        manifest: Describes the run.
        parts: Stateful parts that `Trainer` does not save, by name. They are loaded in this order.
    """

    def __init__(self, args: GTRConfig, processes: Processes, manifest: Manifest, parts: Mapping[str, Part]) -> None:
        self.args, self.processes, self.manifest, self.parts = args, processes, manifest, dict(parts)
        self.output_dir = Path(args.output_dir)
        self.writes_into = self.output_dir
        """Where `Trainer` must create a checkpoint's folder; a temporary folder during a save."""
        self._incomplete = self.output_dir / INCOMPLETE
        self._claimed = False
        self._latest: Path | None = None
        """The checkpoint this run last saved or resumed from."""

    def folder(self, step: int) -> Path:
        """The checkpoint after update `step`."""
        return self.output_dir / f"checkpoint-{step}"

    def is_saved(self, step: int) -> bool:
        """Whether this run (not an earlier one) has a checkpoint after update `step`."""
        return self._latest == self.folder(step).resolve()

    def find(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """The checkpoint to resume from. With `overwrite`, a run without checkpoints starts from scratch, so a
        scheduler can restart it with the same command."""
        return find_checkpoint(resume_from_checkpoint, self.args.output_dir, required=not self.args.overwrite)

    def claim_output_dir(self, checkpoint: str | None) -> None:
        """Refuse to mix two runs in one folder, or clear it with `overwrite`. A run resumed from its own folder keeps
        it."""
        own = checkpoint is not None and Path(checkpoint).parent.resolve() == self.output_dir.resolve()
        if not (own or self._claimed):
            self.processes.check_on_first(self._check_output_dir)
            if self.processes.rank == 0:
                output_folder.remove_earlier_run(self.output_dir)
        self._claimed = True

    def _check_output_dir(self) -> None:
        problem = output_folder.problem(self.output_dir, self.args.overwrite)
        if problem is not None:
            raise ValueError(problem)

    def save(self, step: int, save_trainer: Callable[[], None]) -> None:
        """Write the checkpoint after update `step`, then delete the oldest ones beyond `save_total_limit`.

        Args:
            step: Updates so far.
            save_trainer: Writes what `Trainer` saves into a folder below `writes_into`.
        """
        first, final = self.processes.rank == 0, self.folder(step)
        folder = self._incomplete / final.name
        if first:
            shutil.rmtree(self._incomplete, ignore_errors=True)
        self.processes.barrier("update")
        with self.writing(f"{final} could not be written"):
            self.writes_into = self._incomplete
            try:
                save_trainer()
            finally:
                self.writes_into = self.output_dir
            self._save_parts(folder)
        with self.writing(f"{final} could not be written"):
            if first:
                self._publish(folder, final)
        self._latest = final.resolve()
        with self.writing(f"{final} was written, but older ones could not be removed"):
            if first:
                rotate_checkpoints(self.args.output_dir, self.args.save_total_limit, use_mtime=True)
                shutil.rmtree(self._incomplete)

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Raise an error in this block on all processes, and remove the incomplete checkpoint."""
        try:
            with self.processes.raise_on_all_ranks(what, "Earlier checkpoints are intact: fix this and resume."):
                yield
        except OSError:
            if self.processes.rank == 0:
                shutil.rmtree(self._incomplete, ignore_errors=True)
            raise

    def _save_parts(self, folder: Path) -> None:
        for name, part in self.parts.items():
            if not part.shared or self.processes.rank == 0:
                state = part.owner.state_dict()
                if state:  # most correctors have none
                    part.format.write(folder / part.file(name, self.processes.rank), state)

    def _publish(self, folder: Path, final: Path) -> None:
        """Rename a complete checkpoint to its final name."""
        manifest = self.manifest.listing(folder)
        manifest.write(folder)
        for name in (*(manifest.files or ()), MANIFEST_FILE, "."):
            sync(folder / name)
        if final.exists():  # from an earlier run in this folder
            final.rename(folder.parent / "replaced")
        folder.rename(final)
        sync(final.parent)

    def load(self, checkpoint: str, load_trainer: Callable[[str], None]) -> None:
        """Validate a checkpoint and restore every part from it.

        Args:
            checkpoint: Its folder.
            load_trainer: Loads what `Trainer` saved.
        """
        allow = self.args.allow_changed_config
        self.processes.check_on_first(
            lambda: Manifest.read(checkpoint).check_resumes(checkpoint, self.manifest, allow)
        )
        saved = Manifest.read(checkpoint)
        if self.processes.rank == 0:
            self._compare_versions(checkpoint, saved)
        states = self._read_parts(Path(checkpoint), saved)  # fails before anything changes
        load_trainer(checkpoint)
        for name, state in states.items():
            self.parts[name].owner.load_state_dict(state)
        self._latest = Path(checkpoint).resolve()

    def _read_parts(self, folder: Path, saved: Manifest) -> dict[str, Any]:
        states = {}
        for name, part in self.parts.items():
            file = part.file(name, self.processes.rank)
            if any(file in (name, name.split("/")[0]) for name in saved.files or ()):  # a file or a folder
                states[name] = part.format.read(folder / file)
            elif part.owner.state_dict():  # possible only if `allow_changed_config` allowed another corrector
                logger.warning("%s has no state for the %s, which starts from scratch.", folder, name)
        return states

    def _compare_versions(self, checkpoint: str, saved: Manifest) -> None:
        now = self.manifest.versions
        changed = [
            f"{name} {was} (now {now.get(name)})" for name, was in saved.versions.items() if was != now.get(name)
        ]
        if changed:
            logger.warning(
                "%s was written with %s: the resumed run may not be bit-identical.", checkpoint, ", ".join(changed)
            )
