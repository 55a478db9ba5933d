"""Saves and restores everything that the rest of a run depends on.

`Trainer` writes and reads the policy, optimizer, scheduler, random states and its own counters. A [`RunCheckpointer`]
adds the state of the run's other parts and a manifest, all in the same folder. A checkpoint is atomic: it is written
under another name, which becomes its own once every process has written its part.
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
from ..storage.files import sync
from ..storage.state_files import PLAIN, StateFormat
from . import output_folder
from .manifest import MANIFEST_FILE, Manifest, find_checkpoint

logger = logging.getLogger(__name__)

INCOMPLETE = "incomplete_checkpoint"
"""Folder in the output folder for a checkpoint that is being written."""


class Stateful(Protocol):
    """A part of a run that has state."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


@dataclass(frozen=True)
class Part:
    """A stateful part, and how it is saved.

    Args:
        owner: Who has the state.
        format: Of its file.
        shared: Its state is the same on all processes, so the first one saves it for all.
    """

    owner: Stateful
    format: StateFormat = PLAIN
    shared: bool = False

    def file(self, name: str, rank: int) -> str:
        return f"{name}{self.format.suffix}" if self.shared else f"{name}_{rank}{self.format.suffix}"


@dataclass
class RunCounters:
    """What a run counts beside its updates and episodes.

    Args:
        env_steps: Steps of all environments since the run began.
    """

    env_steps: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"env_steps": self.env_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.env_steps = state["env_steps"]


class RunCheckpointer:
    """Writes, rotates, checks and loads the checkpoints of one run. Every method must be called by all processes.

    Args:
        args: Output folder, how many checkpoints to keep, whether settings may have changed.
        processes: All processes of the run.
        manifest: Describes the run.
        parts: What has state beside what `Trainer` saves, by name. They are loaded in this order.
    """

    def __init__(self, args: GTRConfig, processes: Processes, manifest: Manifest, parts: Mapping[str, Part]) -> None:
        self.args, self.processes, self.manifest, self.parts = args, processes, manifest, dict(parts)
        self.output_dir = Path(args.output_dir)
        self.writes_into = self.output_dir
        """Where `Trainer` must put a checkpoint's folder: elsewhere while one is being saved."""
        self._incomplete = self.output_dir / INCOMPLETE
        self._claimed = False
        self._latest: Path | None = None
        """The checkpoint that this run has last saved, or continues."""

    def folder(self, step: int) -> Path:
        """The checkpoint after update `step`."""
        return self.output_dir / f"checkpoint-{step}"

    def is_saved(self, step: int) -> bool:
        """Whether this run has a checkpoint after update `step`; one of that name may be an earlier run's."""
        return self._latest == self.folder(step).resolve()

    def find(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """The checkpoint to resume from. With `overwrite`, a run that has saved nothing yet starts afresh: what a
        scheduler that restarts it needs."""
        return find_checkpoint(resume_from_checkpoint, self.args.output_dir, required=not self.args.overwrite)

    def claim_output_dir(self, checkpoint: str | None) -> None:
        """Refuse to mix two runs in one folder, or clear it with `overwrite`. A run that resumes from its own folder
        goes on there."""
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
        """Write the checkpoint after update `step`, then remove those beyond `save_total_limit`.

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
        with self.writing(f"{final} is written, but older ones could not be removed"):
            if first:
                rotate_checkpoints(self.args.output_dir, self.args.save_total_limit, use_mtime=True)
                shutil.rmtree(self._incomplete)

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """An error here is raised on all processes, and an incomplete checkpoint is removed."""
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
        """Give a complete checkpoint its own name."""
        manifest = self.manifest.listing(folder)
        manifest.write(folder)
        for name in (*(manifest.files or ()), MANIFEST_FILE, "."):
            sync(folder / name)
        if final.exists():  # of an earlier run in this folder
            final.rename(folder.parent / "replaced")
        folder.rename(final)
        sync(final.parent)

    def load(self, checkpoint: str, load_trainer: Callable[[str], None]) -> None:
        """Check a checkpoint and put every part into the state that it holds.

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
        states = self._read_parts(
            Path(checkpoint), saved
        )  # a file that can't be read is known before anything changes
        load_trainer(checkpoint)
        for name, state in states.items():
            self.parts[name].owner.load_state_dict(state)
        self._latest = Path(checkpoint).resolve()

    def _read_parts(self, folder: Path, saved: Manifest) -> dict[str, Any]:
        states = {}
        for name, part in self.parts.items():
            file = part.file(name, self.processes.rank)
            if file in (saved.files or {}):
                states[name] = part.format.read(folder / file)
            elif part.owner.state_dict():  # only where `allow_changed_config` let another corrector in
                logger.warning("%s holds no state of the %s, which starts afresh.", folder, name)
        return states

    def _compare_versions(self, checkpoint: str, saved: Manifest) -> None:
        now = self.manifest.versions
        changed = [
            f"{name} {was} (now {now.get(name)})" for name, was in saved.versions.items() if was != now.get(name)
        ]
        if changed:
            logger.warning(
                "%s was written with %s: the run may not continue to the last bit.", checkpoint, ", ".join(changed)
            )
