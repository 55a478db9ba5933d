"""The `Guide` interface: provides labels for thought cloning, and may shape advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..config import GTRConfig
from ..correctors.base import Corrector
from ..distributed.means import Means
from ..distributed.processes import Processes
from ..engines.base import Engine
from ..policy.scores import Scores
from ..policy.scoring import VLMPolicy
from ..tasks.base import Task
from ..tasks.contract import Contract
from ..types import Rollout, Transition
from .buffer import CorrectionBuffer

GUIDE_FILES = "guide_files"
"""Subfolder of a checkpoint that holds a guide's files."""


@dataclass(frozen=True)
class GuidedRun:
    """The parts of a run that its guide may use."""

    args: GTRConfig
    task: Task
    policy: VLMPolicy
    """Encodes and decodes; contains no network."""
    model: nn.Module
    """The vision-language model in training, before the first update."""
    processes: Processes
    score: Callable[[Sequence[Transition], nn.Module], Scores]
    """Scores steps, in order, under any network with the trained one's inputs, using the update's own code and
    precision. Must be called on all processes."""
    make_engine: Callable[..., Engine]
    """Makes an engine that generates with another model, as the run's own does with the policy: same prompts, same
    tokens that must not be sampled. Takes the model, and as keywords `temperature` and `top_k`."""


class Guide(Contract):
    """Teaches thoughts. Override what your guide needs; the base class does nothing (PPO only).

    The trainer calls `check` and `check_settings`, then `attach` once the model is loaded. Each update calls `labels`,
    `shaping` and `after_update`, in this order, on all processes.
    """

    corrector: Corrector | None = None
    """Judges every parsable thought while the rollout is collected; `None` for no corrections."""
    teaches_alone: bool = False
    """Teaches without its corrector too: a run goes on if that fails or has spent its budget."""
    shapes_advantages: bool = False
    """[`shaping`] gives single steps a term. Methods that compare whole episodes in groups refuse it."""
    buffer: CorrectionBuffer | None = None
    """The labels so far, from which updates draw cloning samples; `None` if the guide provides none."""
    engine: Engine | None = None
    """Generates with the guide's own model, if it has one that can play: it is evaluated along with the policy, and
    should sample as that does."""

    @property
    def description(self) -> str:
        """What the model card says about it besides the corrector; empty for nothing."""
        return ""

    def check(self, task: Task) -> None:
        """Raise a `ValueError` if the guide can't teach this task. Called before anything is loaded."""

    def check_settings(self, args: GTRConfig) -> None:
        """Raise a `ValueError` if the guide can't teach with these settings. Called before anything is loaded."""

    def settings(self) -> dict[str, Any]:
        """Settings that a resumed run must share, as plain values."""
        return {}

    def attach(self, run: GuidedRun) -> None:
        """Prepare to guide this run. Raise a `ValueError` if that isn't possible."""

    def labels(self, rollout: Rollout, update: int, means: Means) -> int:
        """Add this rollout's labels to the buffer.

        Args:
            rollout: This process's rollout.
            update: Number of updates so far.
            means: Collects values to log.

        Returns:
            How many of the rollout's steps needed a correction. Their share may scale the cloning loss.
        """
        return 0

    def shaping(self, rollout: Rollout, scores: Scores, means: Means) -> Tensor | None:
        """A term to add to each step's advantage, (steps,), on any device, before normalisation; `None` for nothing.

        Args:
            rollout: This process's rollout.
            scores: Scores of its steps under the policy that acted.
            means: Collects values to log.
        """
        return None

    def after_update(self, model: nn.Module, means: Means) -> None:
        """Called when an update is done.

        Args:
            model: The trained vision-language model, possibly with an adapter. Under ZeRO-3 its weights are sharded.
            means: Collects values to log.
        """

    def metrics(self) -> dict[str, float]:
        """This process's totals since the run began. They are summed over processes, a `Share` by its parts."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """State that the rest of the run depends on: plain values and tensors, in dicts and lists."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a [`state_dict`]."""

    def files(self) -> dict[str, Path]:
        """Files that the rest of the run depends on, by name: for state that is too large for `state_dict`.

        A checkpoint links to those of the first process, so a file must not change once it is written.
        """
        return {}

    def load_files(self, files: Mapping[str, Path]) -> None:
        """Continue with a checkpoint's [`files`], after `load_state_dict`; called on all processes."""

    def close(self) -> None:
        """The run was interrupted: abort pending work."""

    def release(self) -> None:
        """The trainer is closed: release resources."""
        if self.engine is not None:
            self.engine.close()
