"""One update: PPO epochs over a rollout, and thought cloning in the same steps or as a phase of its own.

A mini-batch is `per_device_train_batch_size × gradient_accumulation_steps` steps on each process, in micro-batches of
the former. Losses are means over samples, so how a mini-batch is cut does not change its gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import reduce
from torch import Tensor, nn

from . import ppo
from .config import GTRConfig
from .metrics import Means
from .policy import ScoredBatch, VLMPolicy
from .thought_cloning import CorrectionBuffer, cloning_loss
from .types import Transition

logger = logging.getLogger(__name__)

RATIO_TOLERANCE = 1e-2


@dataclass
class Experience:
    """A rollout as the update sees it. Tensors are (steps,), in the rollout's order."""

    transitions: list[Transition]
    action_starts: list[int]
    """First token of each action, see `SpanFinder.action_start`."""
    logprob: Tensor
    thought_logprob: Tensor
    action_logprob: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    token_logprobs: list[Tensor]
    """Of each step's response, (tokens,)."""
    cloning_coef: float
    """Weight of the cloning loss in this update; 0 drops it."""
    reference: list[Tensor] | None = None
    """Token log-probs under the starting policy, one tensor per step, where `kl_coef` asks for them."""

    def __len__(self) -> int:
        return len(self.transitions)


class Updater:
    """Turns experience and corrections into optimizer steps.

    Args:
        args: The hyper-parameters.
        accelerator: Prepared `module` and `optimizer`.
        module: Policy and value head, wrapped by DDP or DeepSpeed where there are several processes.
        optimizer: Of the module's parameters.
        policy: How the module is asked.
        buffer: The corrections so far.
    """

    def __init__(
        self,
        args: GTRConfig,
        accelerator: Accelerator,
        module: nn.Module,
        optimizer: Any,
        policy: VLMPolicy,
        buffer: CorrectionBuffer,
    ) -> None:
        self.args, self.accelerator, self.module, self.optimizer = args, accelerator, module, optimizer
        self.policy, self.buffer = policy, buffer

    def update(self, experience: Experience, number: int, means: Means) -> None:
        """The `number`-th update of the run; what happened is counted in `means`."""
        args, joint = self.args, self.args.update_schedule == "joint"
        self.processes_with_labels = self._sum_over_processes(int(len(self.buffer) > 0))
        self.clones = experience.cloning_coef > 0 and self.processes_with_labels > 0
        self.trains_policy = args.ppo_coef > 0 and number >= args.value_warmup_updates
        means.add("loss/cloning_coef", experience.cloning_coef if self.clones else 0.0)
        if args.ppo_coef > 0 or (joint and self.clones):
            epochs = 0
            for epoch in range(args.num_ppo_epochs):
                epochs += 1
                if not self._epoch(experience, [args.seed, number, epoch], means, first=epoch == 0):
                    break
            means.add("policy/epochs", epochs)
        if not joint and self.clones:
            with self._cloning_learning_rate():
                for _ in range(args.cloning_steps * args.gradient_accumulation_steps):
                    with self.accelerator.accumulate(self.module):
                        self._step(self._cloning_term(experience, means), means)

    def score(
        self,
        steps: Sequence[Transition],
        starts: Sequence[int],
        module: nn.Module | None = None,
        with_entropy: bool = False,
    ) -> ScoredBatch:
        """Log-probs and values as the loss sees them. Old log-probs come from here too: ratios start at 1."""
        return self.policy.score(
            module or self.module,
            [t.prompt for t in steps],
            [t.image for t in steps],
            [t.response_ids for t in steps],
            starts,
            self.args.thought_prob_coef,
            with_entropy=with_entropy,
        )

    def _epoch(self, experience: Experience, seed: Sequence[int], means: Means, first: bool) -> bool:
        """One pass over the rollout; `False` once a mini-batch shows that the policy has gone too far."""
        args = self.args
        for mini_batch in self._mini_batches(experience, seed):
            drift: list[Tensor] = []
            for micro_batch in mini_batch:
                with self.accelerator.accumulate(self.module):
                    loss: Tensor | float = 0.0
                    if args.ppo_coef > 0:
                        loss = loss + self._ppo_terms(experience, micro_batch, means, drift, first)
                    if self.clones and args.update_schedule == "joint":
                        loss = loss + self._cloning_term(experience, means)
                    self._step(loss, means)
            first = False
            if args.target_kl is not None and self.trains_policy and self._mean(drift) > args.target_kl:
                return False
        return True

    def _mini_batches(self, experience: Experience, seed: Sequence[int]) -> Iterator[list[np.ndarray]]:
        """Shuffled mini-batches, each as micro-batches of like lengths: less padding, the same gradient."""
        micro = self.args.per_device_train_batch_size
        size = micro * self.args.gradient_accumulation_steps
        order = np.random.default_rng([*seed, self.accelerator.process_index]).permutation(len(experience))
        lengths = np.array([len(t.response_ids) for t in experience.transitions])
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            chosen = chosen[np.argsort(lengths[chosen], kind="stable")]
            yield [chosen[i : i + micro] for i in range(0, len(chosen), micro)]

    def _ppo_terms(
        self, experience: Experience, chosen: np.ndarray, means: Means, drift: list[Tensor], first: bool
    ) -> Tensor | float:
        """Policy, value and KL loss of a micro-batch. A term that is off is left out, never multiplied by zero:
        the optimizer would go on moving on its momentum."""
        args = self.args
        scored = self.score([experience.transitions[i] for i in chosen], [experience.action_starts[i] for i in chosen])
        policy_losses, stats = ppo.policy_loss(
            scored.logprob, experience.logprob[chosen], experience.advantages[chosen], args.cliprange, args.dual_clip
        )
        value_losses = ppo.value_loss(
            scored.value, experience.returns[chosen], experience.values[chosen], args.cliprange_value
        )
        loss: Tensor | float = 0.0
        if self.trains_policy:
            loss = loss + args.ppo_coef * policy_losses.mean()
        if args.vf_coef > 0:
            loss = loss + args.vf_coef * value_losses.mean()
        if experience.reference is not None and self.trains_policy:
            kl = _reference_kl(scored, [experience.reference[i] for i in chosen])
            loss = loss + args.kl_coef * kl.mean()
            means.add("loss/kl", kl)
        drift.append(stats.approx_kl)
        means.add("loss/policy", policy_losses)
        means.add("loss/value", value_losses)
        self._count_drift(experience, chosen, scored, stats, means, first)
        return loss

    def _count_drift(
        self,
        experience: Experience,
        chosen: np.ndarray,
        scored: ScoredBatch,
        stats: ppo.PolicyStats,
        means: Means,
        first: bool,
    ) -> None:
        """How far the policy has moved from the one that acted; thought and action apart."""
        means.add("policy/ratio", stats.ratio)
        means.add("policy/clipfrac", stats.clipped)
        means.add("policy/approx_kl", stats.approx_kl)
        for part, new, old in (
            ("thought", scored.thought_logprob, experience.thought_logprob[chosen]),
            ("action", scored.action_logprob, experience.action_logprob[chosen]),
        ):
            part_stats = ppo.policy_stats(new.detach(), old, self.args.cliprange)
            means.add(f"policy/clipfrac_{part}", part_stats.clipped)
            means.add(f"policy/approx_kl_{part}", part_stats.approx_kl)
            means.add(f"policy/ratio_{part}", part_stats.ratio)
        if first:
            deviation = float((stats.ratio - 1).abs().max())
            means.maximum("policy/ratio_start_max_dev", deviation)
            low_precision = self.accelerator.mixed_precision != "no"
            tolerance = self.args.cliprange / 2 if low_precision else RATIO_TOLERANCE
            if deviation > tolerance:
                logger.warning(
                    "Before the first step of this update a ratio is off 1 by %.3g (more than %.3g): the scored "
                    "distribution isn't the old one. %s",
                    deviation,
                    tolerance,
                    "Train in float32 (bf16=False)." if low_precision else "Is something random left in the model?",
                )

    def _cloning_term(self, experience: Experience, means: Means) -> Tensor:
        """Cross-entropy on a uniform draw from every label so far.

        A process whose buffer is still empty runs the same passes on a filler without labels, so that all stay in
        step; the others' weight makes up for it.
        """
        if len(self.buffer):
            samples = self.buffer.sample(self.args.per_device_train_batch_size)
            prompts, images = [s.prompt for s in samples], [s.image for s in samples]
            ids, labels = [s.target_ids for s in samples], [s.num_labels for s in samples]
        else:
            filler = experience.transitions[0]
            prompts, images, ids, labels = [filler.prompt], [filler.image], [filler.response_ids], [0]
        logprobs, mask = self.policy.score_tokens(self.module, prompts, images, ids)
        positions = torch.arange(mask.shape[1], device=mask.device)
        losses = cloning_loss(logprobs, positions[None] < torch.tensor(labels, device=mask.device)[:, None])
        if len(self.buffer):
            means.add("loss/cloning", losses)
        weight = self.accelerator.num_processes / self.processes_with_labels
        return experience.cloning_coef * weight * losses.mean()

    def _step(self, loss: Tensor | float, means: Means) -> None:
        """One backward; at the end of a mini-batch one clipped optimizer step."""
        if not isinstance(loss, Tensor):
            return  # every term is off
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"The loss is {loss.item()}. Look for rewards that aren't finite, lower the learning rate, or train "
                "in float32 or bfloat16: float16 overflows."
            )
        means.add("loss/total", loss[None])
        self.accelerator.backward(loss)
        if self.accelerator.sync_gradients and self.args.max_grad_norm > 0:
            norm = self.accelerator.clip_grad_norm_(self.module.parameters(), self.args.max_grad_norm)
            if norm is not None:
                means.add("optim/grad_norm", float(norm))
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextmanager
    def _cloning_learning_rate(self) -> Iterator[None]:
        """`cloning_learning_rate` on the run's schedule, for the separate phase only."""
        before = [group["lr"] for group in self.optimizer.param_groups]
        if self.args.cloning_learning_rate:
            factor = self.args.cloning_learning_rate / self.args.learning_rate
            for group in self.optimizer.param_groups:
                group["lr"] *= factor
        try:
            yield
        finally:
            for group, lr in zip(self.optimizer.param_groups, before, strict=True):
                group["lr"] = lr

    def _mean(self, parts: Sequence[Tensor]) -> float:
        """Mean over these samples of all processes."""
        values = torch.cat(list(parts))
        total, count = reduce(torch.stack([values.sum(), values.new_tensor(len(values))]), reduction="sum")
        return float(total / count)

    def _sum_over_processes(self, number: int) -> int:
        return int(reduce(torch.tensor([number], device=self.accelerator.device), reduction="sum"))


def _reference_kl(scored: ScoredBatch, reference: Sequence[Tensor]) -> Tensor:
    """k3 KL to the starting policy, mean over each response's tokens; (B,)."""
    padded = torch.nn.utils.rnn.pad_sequence(list(reference), batch_first=True)
    kl = ppo.kl_k3(scored.token_logprobs, padded)
    return torch.where(scored.mask, kl, kl.new_zeros(())).sum(1) / scored.mask.sum(1)
