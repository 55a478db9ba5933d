"""The `Guide` seam: who gives labels for thought cloning, and who may shape advantages."""

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
from ..types import Rollout, Transition
from .buffer import CorrectionBuffer


@dataclass(frozen=True)
class GuidedRun:
    """What a guide may use of the run that it guides."""

    args: GTRConfig
    task: Task
    policy: VLMPolicy
    """Encodes and decodes; it holds no network."""
    model: nn.Module
    """The vision-language model that is trained, as it is before the first update."""
    processes: Processes
    score: Callable[[Sequence[Transition], nn.Module], Scores]
    """Scores of steps, in their order, under any network that takes what the trained one takes; by the update's own
    code. To be called on all processes."""


class Guide:
    """Teaches thoughts. Override what your guide does; this one does nothing: PPO alone.

    The trainer calls `check`, then `attach` once the model is loaded. In each update it calls `labels`, `shaping` and
    `after_update`, in this order and on all processes.
    """

    corrector: Corrector | None = None
    """Judges every readable thought while the rollout is collected; `None` asks nobody."""
    buffer: CorrectionBuffer | None = None
    """The labels so far, from which an update draws its cloning samples; `None` if the guide gives none."""

    def check(self, task: Task) -> None:
        """Raise a `ValueError` if the guide can't teach this task. Nothing is loaded yet."""

    def attach(self, run: GuidedRun) -> None:
        """Get ready to guide this run."""

    def labels(self, rollout: Rollout, update: int, means: Means) -> int:
        """Put this rollout's labels into the buffer.

        Args:
            rollout: Of this process.
            update: Updates so far.
            means: Takes what is to be logged.

        Returns:
            How many of the rollout's steps needed a correction. Their share may weigh the cloning loss.
        """
        return 0

    def shaping(self, rollout: Rollout, scores: Scores) -> Tensor | None:
        """What to add to the advantage of each step, (steps,), before advantages are normalised; `None` for nothing.

        Args:
            rollout: Of this process.
            scores: Of its steps, under the policy that acted.
        """
        return None

    def after_update(self, model: nn.Module) -> None:
        """The model has learned.

        Args:
            model: The trained vision-language model, possibly with an adapter. Under ZeRO-3 its weights are sharded.
        """

    def metrics(self) -> dict[str, float]:
        """Totals of this process since the run began. They are added up over processes; a `Share` by its parts."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What the rest of the run depends on: plain values and tensors, in dictionaries and lists."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a [`state_dict`]."""

    def close(self) -> None:
        """The run has been interrupted: end what is under way."""
