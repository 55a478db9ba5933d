"""From a rollout to experience: scores from the update's own code, then advantages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..config import GTRConfig
from ..distributed.means import Means
from ..distributed.processes import Processes
from ..guides.base import Guide
from ..policy.scores import Scores
from ..policy.scoring import BatchShape, VLMPolicy
from ..types import Rollout, Transition
from .advantages import AdvantageEstimator, Values
from .cloning import cloning_coefficient
from .minibatches import learned_steps, stack
from .mismatch import importance_weights

logger = logging.getLogger(__name__)


@dataclass
class Experience:
    """A rollout, ready for the update. Tensors are (steps,), in rollout order."""

    transitions: list[Transition]
    scores: Scores
    """Under the policy that acted."""
    advantages: Tensor
    returns: Tensor | None
    """Targets for the value head; `None` without one."""
    learned: np.ndarray
    """bool, (environments of all processes, steps): which steps to learn from. See `minibatches.learned_steps`."""
    env_steps: int
    """Environment steps over all processes."""
    cloning_coef: float
    """Weight of the cloning loss in this update; 0 drops it."""
    reference: Tensor | None = None
    """(steps, T): token log-probs under the starting policy, 0 in padding; only if `kl_coef` > 0."""

    def __len__(self) -> int:
        return len(self.transitions)


class Scorer:
    """Scores steps for the loss. Old log-probs come from here too, so that every ratio starts at 1.

    Args:
        args: Batch sizes and λ.
        policy: Runs the network.
        network: The network in training: DeepSpeed's engine, or the bare module.
        processes: All processes of the run.
        autocast: Opens mixed precision. The network in training is wrapped in it already.
    """

    def __init__(
        self,
        args: GTRConfig,
        policy: VLMPolicy,
        network: nn.Module,
        processes: Processes,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.args, self.policy, self.network, self.processes = args, policy, network, processes
        self.autocast = autocast
        self.shape: BatchShape | None = None
        """The shape every batch of this update is padded to, if `one_batch_shape` is set."""

    def choose_shape(self, steps: Sequence[Transition]) -> None:
        """Choose one shape for all batches if `one_batch_shape` is set. Call it before scoring a rollout."""
        if self.args.one_batch_shape:
            samples = [t.prompt for t in steps], [t.image for t in steps], [t.response_ids for t in steps]
            self.shape = self.policy.largest_shape(*samples, rows=self.args.per_device_train_batch_size)

    def action_starts(self, steps: Sequence[Transition]) -> list[int]:
        """Index of the first action token of each step."""
        return [self.policy.spans.action_start(t.response_ids, t.response.action_span) for t in steps]

    def score(
        self,
        steps: Sequence[Transition],
        action_starts: Sequence[int],
        network: nn.Module | None = None,
        with_entropy: bool = False,
    ) -> Scores:
        """Score one batch, under the network in training or another one."""
        return self.policy.score(
            network or self.network,
            [t.prompt for t in steps],
            [t.image for t in steps],
            [t.response_ids for t in steps],
            action_starts,
            self.args.thought_prob_coef,
            with_entropy=with_entropy,
            shape=self.shape,
        )

    @torch.no_grad()
    def score_all(
        self,
        steps: Sequence[Transition],
        network: nn.Module | None = None,
        action_starts: Sequence[int] | None = None,
    ) -> Scores:
        """Score any number of steps, in batches of similar lengths; the result is in the order of `steps`.

        Args:
            action_starts: Of the steps, if they are known already.
        """
        starts = self.action_starts(steps) if action_starts is None else action_starts

        def score(chosen: list[int]) -> Scores:
            return self.score([steps[i] for i in chosen], [starts[i] for i in chosen], network, with_entropy=True)

        return score_in_batches(score, [len(t.response_ids) for t in steps], self._batches)

    def score_under(self, steps: Sequence[Transition], network: nn.Module) -> Scores:
        """Score steps under another network, in the precision of the one in training."""
        with self.autocast():
            return self.score_all(steps, network)

    @torch.no_grad()
    def values(self, rollout: Rollout, own: Tensor) -> Values:
        """All values an estimator needs, given those of the steps' `own` observations."""

        def value(prompts: Sequence[Any], images: Sequence[Any]) -> Tensor:
            batches = self._batches(np.arange(len(prompts)))
            parts = [
                self.policy.values(self.network, [prompts[i] for i in b], [images[i] for i in b]) for b in batches
            ]
            return torch.cat(parts)[: len(prompts)]

        return bootstrap_values(rollout, own, value)

    def _batches(self, order: np.ndarray) -> list[list[int]]:
        args = self.args
        size = args.per_device_train_batch_size if args.one_batch_shape else args.per_device_eval_batch_size
        return in_batches(order, size, self.processes.gather if self.processes.zero3 else None)


def in_batches(order: np.ndarray, size: int, gather: Callable[[int], list[int]] | None = None) -> list[list[int]]:
    """Split `order` into batches of `size`.

    Args:
        gather: Collects a number from every process. Given under ZeRO-3, where a forward pass needs all processes: one
            with fewer batches repeats its first at the end.
    """
    batches = [order[i : i + size].tolist() for i in range(0, len(order), size)]
    if gather is not None:
        batches += batches[:1] * (max(gather(len(batches))) - len(batches))
    return batches


def score_in_batches(
    score: Callable[[list[int]], Scores], lengths: Sequence[int], batches: Callable[[np.ndarray], list[list[int]]]
) -> Scores:
    """Scores of samples 0, 1, … in that order, computed in batches of similar lengths.

    Args:
        score: Scores one batch of samples.
        lengths: Length of each sample.
        batches: Splits samples into batches, see [`in_batches`].
    """
    order = np.argsort(lengths, kind="stable")
    scored = Scores.concatenate([score(batch) for batch in batches(order)])
    return scored.rows(np.argsort(order, kind="stable"))


def bootstrap_values(rollout: Rollout, own: Tensor, value: Callable[[Sequence[Any], Sequence[Any]], Tensor]) -> Values:
    """The values to bootstrap from: of cut episodes' true last observations, and of each environment's current one.

    Args:
        rollout: The rollout.
        own: (steps,), values of the steps' own observations.
        value: Computes the values of prompts and images.
    """
    cut = [i for i, step in enumerate(rollout.transitions) if step.bootstrap]
    following = value(
        [*(rollout.transitions[i].final_prompt for i in cut), *rollout.last_prompts],
        [*(rollout.transitions[i].final_image for i in cut), *rollout.last_images],
    )
    final = torch.zeros_like(own)
    final[cut] = following[: len(cut)]
    return Values(own, final, following[len(cut) :])


def check_shaping(guide: Guide, estimator: AdvantageEstimator) -> None:
    """Raise a `ValueError` if the guide shapes advantages that are relative to a group."""
    if guide.shapes_advantages and estimator.needs_groups:
        raise ValueError(
            "This guide (turbo_kl, or one of your own) adds a term to single steps' advantages, but a group method's "
            "are relative to the group: the term would not be centred, and groups with equal returns would lose it. "
            "Use advantage_estimator='gae', or a guide that gives labels, such as turbo_sft."
        )


def add_shaping(advantages: Tensor, shaping: Tensor | None) -> Tensor:
    """The advantages with a guide's shaping, on their own device: that of the values, or the CPU without any."""
    return advantages if shaping is None else advantages + shaping.to(advantages.device)


class NoGroupEnded(ValueError):
    """A rollout was cut before any group of episodes ended; the message says what to change."""


class ExperienceMaker:
    """Scores a rollout and estimates its advantages.

    Args:
        args: The hyper-parameters.
        scorer: Scores steps.
        estimator: Estimates advantages.
        guide: May shape them.
        processes: All processes of the run.
        reference: Opens the starting policy as a network; used if `kl_coef` is positive.
    """

    def __init__(
        self,
        args: GTRConfig,
        scorer: Scorer,
        estimator: AdvantageEstimator,
        guide: Guide,
        processes: Processes,
        reference: Callable[[], AbstractContextManager[nn.Module]],
    ) -> None:
        self.args, self.scorer, self.estimator, self.guide = args, scorer, estimator, guide
        self.processes, self.reference = processes, reference

    @torch.no_grad()
    def score(self, rollout: Rollout, means: Means) -> Scores:
        """Scores of this process's rollout under the policy that acted.

        Raises:
            SamplerMismatch: On all processes, if the engine didn't sample from that policy.
            NoGroupEnded: On all processes, if there is nothing to compare.
        """
        args, steps = self.args, rollout.transitions
        if self.estimator.needs_groups and not self.processes.sum(len(rollout.episodes)):
            raise NoGroupEnded(
                f"No group of episodes ended within `rollout_timeout` ({args.rollout_deadline:g} s), so there is "
                "nothing to compare. Raise it, or use a task with a lower step limit."
            )
        self.scorer.choose_shape(steps)
        scores = self.scorer.score_all(steps)
        return replace(scores, importance=importance_weights(steps, scores, args, self.processes, means))

    @torch.no_grad()
    def __call__(self, rollout: Rollout, scores: Scores, corrected: int, means: Means) -> Experience:
        """Experience from this process's rollout, in which the guide corrected `corrected` steps."""
        args, steps = self.args, rollout.transitions
        values = None if scores.value is None else self.scorer.values(rollout, scores.value)
        estimated = self.estimator(rollout, values)
        advantages = add_shaping(estimated.advantages, self.guide.shaping(rollout, scores, means))
        advantages = self.estimator.normalize(advantages, self.processes.gather).to(scores.logprob.device)
        if scores.entropy is not None:
            means.add("policy/entropy", scores.entropy)
        means.add("response/thought_tokens", scores.action_start)
        for name, numbers in estimated.metrics.items():
            means.add(name, numbers)
        counts = self.processes.gather((len(steps), corrected))
        env_steps, corrected = (sum(each) for each in zip(*counts, strict=True))
        return Experience(
            transitions=steps,
            scores=scores,
            advantages=advantages,
            returns=estimated.returns,
            learned=self._learned(steps, estimated.kept),
            env_steps=env_steps,
            cloning_coef=cloning_coefficient(args.cloning_weight, args.thought_cloning_coef, corrected, env_steps),
            reference=self._reference_logprobs(steps, scores) if args.kl_coef > 0 else None,
        )

    def _learned(self, steps: Sequence[Transition], kept: Tensor | None) -> np.ndarray:
        """Which steps of all processes to learn from."""
        own_envs = self.args.num_envs // self.processes.world_size
        first = self.processes.rank * own_envs
        flags = None if kept is None else kept.tolist()
        learned = stack(self.processes.gather(learned_steps(steps, range(first, first + own_envs), flags)))
        if self.estimator.needs_groups and self.processes.rank == 0 and not learned.any():
            logger.warning("No whole group has different returns, so the policy isn't trained in this update.")
        return learned

    def _reference_logprobs(self, steps: Sequence[Transition], scores: Scores) -> Tensor:
        with self.reference() as network:
            return self.scorer.score_all(steps, network, scores.action_start.tolist()).token_logprobs
