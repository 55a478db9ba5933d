"""The GTR guide: a corrector judges thoughts, and its corrections are cloned for the rest of the run (DAgger)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from ..config import GTRConfig
from ..correctors.arguments import make_corrector
from ..correctors.base import Corrector
from ..distributed.means import Means
from ..tasks.base import Task
from ..types import Rollout
from .base import Guide, GuidedRun
from .buffer import CorrectionBuffer
from .labels import Label, LabelMaker, count_labels

logger = logging.getLogger(__name__)


class CorrectedThoughts(Guide):
    """Labels from a corrector's answers.

    Args:
        corrector: Judges the agent's thoughts and corrects them.
    """

    corrector: Corrector

    def __init__(self, corrector: Corrector) -> None:
        self.corrector = Corrector.ensure(corrector)
        self.failures: Counter[str] = Counter()
        """This process's failed corrections since the run began, by kind."""
        self.buffer: CorrectionBuffer | None = None
        self._maker: LabelMaker | None = None

    def check(self, task: Task) -> None:
        self.corrector.check(task)

    def attach(self, run: GuidedRun) -> None:
        self.buffer = CorrectionBuffer(run.args.correction_buffer_size, seed=run.args.seed + run.processes.rank)
        self._maker = LabelMaker(run.args, run.task, run.policy)

    def labels(self, rollout: Rollout, update: int, means: Means) -> int:
        if self.buffer is None or self._maker is None:
            raise RuntimeError("This guide is not attached to a run: pass it to a GTRTrainer.")
        self.failures.update(count_failures(rollout))
        labels: list[Label] = []
        for step, correction in zip(rollout.transitions, rollout.corrections, strict=True):
            label = None if correction is None else self._maker.label(step, correction)
            if label is None:
                continue
            labels.append(label)
            if label.num_labels:
                self.buffer.add(step.prompt, step.image, label.ids, label.num_labels, update=update)
        count_labels(labels, means)
        return sum(c is not None and c.verdict == "corrected" for c in rollout.corrections)

    def metrics(self) -> dict[str, float]:
        return with_failures(self.corrector.metrics(), self.failures)

    def state_dict(self) -> dict[str, Any]:
        buffer = {} if self.buffer is None else self.buffer.state_dict()
        return {
            "buffer": {name: torch.from_numpy(array) for name, array in buffer.items()},
            "corrector": self.corrector.state_dict(),
            "failures": dict(self.failures),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "corrector" not in state:  # saved by a run with another guide (`allow_changed_config`)
            if state:
                logger.warning("The checkpoint's guide was another: the corrector's labels start from scratch.")
            return
        if self.buffer is not None:
            self.buffer.load_state_dict(state["buffer"])
        self.failures = Counter(state["failures"])
        if state["corrector"]:
            self.corrector.load_state_dict(state["corrector"])
        elif self.corrector.state_dict():  # another corrector, with `allow_changed_config`
            logger.warning("The checkpoint has no state for the corrector, which starts from scratch.")

    def close(self) -> None:
        """Pending corrections return at once; their threads are not joined."""
        self.corrector.close()


def choose_guide(guide: Guide | None, corrector: Corrector | str | None, args: GTRConfig) -> Guide:
    """The given guide, or one built from the trainer's `corrector`, which may be a name."""
    if isinstance(corrector, str):
        corrector = make_corrector(corrector)
    if guide is not None and corrector is not None:
        raise ValueError(
            "Pass a `corrector` or a `guide`, not both: `guide=CorrectedThoughts(corrector)` is equivalent."
        )
    if isinstance(guide, Corrector):
        raise TypeError(f"{type(guide).__name__} is a corrector: pass it as `corrector`.")
    if guide is not None:
        return Guide.ensure(guide)
    if corrector is not None:
        return CorrectedThoughts(corrector)
    if args.thought_cloning_coef > 0:
        raise ValueError(
            "Thought cloning needs a `corrector`, e.g. corrector=ExpertCorrector(). For PPO only, set "
            "`thought_cloning_coef=0`."
        )
    return Guide()


def count_failures(rollout: Rollout) -> Counter[str]:
    """Number of failed corrections in the rollout, by kind."""
    kinds = (correction.failure for correction in rollout.corrections if correction is not None)
    return Counter(kind for kind in kinds if kind is not None)


def with_failures(metrics: Mapping[str, float], failures: Mapping[str, int]) -> dict[str, float]:
    """A corrector's metrics with `corrector/failed_<kind>` counted by steps without a label.

    These replace the corrector's own counts, which miss late, cancelled and cached answers.
    """
    own = ("corrector/failed_", "corrector/fallback_failed_")
    kept = {name: value for name, value in metrics.items() if not name.startswith(own)}
    return kept | {f"corrector/failed_{kind}": float(count) for kind, count in failures.items()}
