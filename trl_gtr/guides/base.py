"""The `Guide` interface: provides labels for thought cloning, and may shape advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..config import GTRConfig
from ..correctors.base import Corrector
from ..distributed.means import Means
from ..distributed.processes import Processes
from ..policy.scores import Scores
from ..policy.scoring import VLMPolicy
from ..tasks.base import Task
from ..tasks.contract import Contract
from ..types import Rollout, Transition
from .buffer import CorrectionBuffer


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
    """Scores steps, in order, under any network with the trained one's inputs, using the update's own code. Must be
    called on all processes."""


class Guide(Contract):
    """Teaches thoughts. Override what your guide needs; the base class does nothing (PPO only).

    The trainer calls `check`, then `attach` once the model is loaded. Each update calls `labels`, `shaping` and
    `after_update`, in this order, on all processes.
    """

    corrector: Corrector | None = None
    """Judges every parsable thought while the rollout is collected; `None` for no corrections."""
    buffer: CorrectionBuffer | None = None
    """The labels so far, from which updates draw cloning samples; `None` if the guide provides none."""

    def check(self, task: Task) -> None:
        """Raise a `ValueError` if the guide can't teach this task. Called before anything is loaded."""

    def attach(self, run: GuidedRun) -> None:
        """Prepare to guide this run."""

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

    def shaping(self, rollout: Rollout, scores: Scores) -> Tensor | None:
        """A term to add to each step's advantage, (steps,), before normalisation; `None` for nothing.

        Args:
            rollout: This process's rollout.
            scores: Scores of its steps under the policy that acted.
        """
        return None

    def after_update(self, model: nn.Module) -> None:
        """Called when an update is done.

        Args:
            model: The trained vision-language model, possibly with an adapter. Under ZeRO-3 its weights are sharded.
        """

    def metrics(self) -> dict[str, float]:
        """This process's totals since the run began. They are summed over processes, a `Share` by its parts."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """State that the rest of the run depends on: plain values and tensors, in dicts and lists."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a [`state_dict`]."""

    def close(self) -> None:
        """The run was interrupted: abort pending work."""
