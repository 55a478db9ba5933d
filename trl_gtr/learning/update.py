"""One update: PPO epochs over a rollout, and thought cloning in the same steps or as a phase of its own.

A mini-batch is `per_device_train_batch_size × gradient_accumulation_steps` steps on each process, in micro-batches of
the former. Losses are means over the samples of a whole mini-batch, so that neither how it is cut nor how many
processes share it changes its gradient. Every process runs the same passes in the same order, on a filler of weight 0
where it has nothing to learn from.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..config import GTRConfig
from ..distributed.means import Means
from ..distributed.processes import Processes
from ..guides.buffer import CorrectionBuffer, cloning_loss
from ..policy.scoring import BatchShape, ScoredBatch, VLMPolicy
from ..types import Transition
from . import ppo

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
    steps: list[int]
    """How many steps each process's environments have made: `rollout_steps`, or fewer where time ran out."""
    cloning_coef: float
    """Weight of the cloning loss in this update; 0 drops it."""
    reference: list[Tensor] | None = None
    """Token log-probs under the starting policy, one tensor per step, where `kl_coef` asks for them."""

    def __len__(self) -> int:
        return len(self.transitions)


@dataclass
class MiniBatch:
    """One optimizer step's samples, over all processes."""

    micro_batches: list[np.ndarray]
    """This process's share, as indices into its experience. Empty ones keep it in step with the others."""
    size: int
    """Samples of all processes together."""


class Updater:
    """Turns experience and corrections into optimizer steps.

    Args:
        args: The hyper-parameters.
        accelerator: Prepared `module` and `optimizer`.
        processes: Those who train with this one.
        module: Policy and value head: DeepSpeed's engine, or the bare module.
        optimizer: Of the module's parameters.
        policy: How the module is asked.
        buffer: The corrections so far.
    """

    def __init__(
        self,
        args: GTRConfig,
        accelerator: Accelerator,
        processes: Processes,
        module: nn.Module,
        optimizer: Any,
        policy: VLMPolicy,
        buffer: CorrectionBuffer,
    ) -> None:
        self.args, self.accelerator, self.processes = args, accelerator, processes
        self.module, self.optimizer, self.policy, self.buffer = module, optimizer, policy, buffer
        self._moments: dict[Any, Any] = defaultdict(dict)
        self.skipped_in_a_row = 0
        self._bad_loss = False
        self.shape: BatchShape | None = None
        """What every scored batch of this update is filled up to, where `one_batch_shape` asks for it."""
        self.not_finite: str | None = None
        """What this process last saw that was NaN or infinite."""

    def update(self, experience: Experience, number: int, means: Means) -> None:
        """The `number`-th update of the run; what happened is counted in `means`."""
        args, joint = self.args, self.args.update_schedule == "joint"
        self.skipped = 0
        self._start_deviations: list[float] = []
        self.all_labels = int(self.processes.sum(len(self.buffer)))
        self.clones = experience.cloning_coef > 0 and self.all_labels > 0
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
            with self._cloning_optimizer():
                for _ in range(args.cloning_steps):
                    if self.gave_up:
                        break
                    rounds = args.gradient_accumulation_steps
                    for i in range(rounds):
                        loss = self._cloning_term(experience, means, rounds)
                        self._backward(loss, means, rounds, last=i == rounds - 1)
        means.maximum("optim/skipped_steps", self.skipped)

    @property
    def gave_up(self) -> bool:
        """Too many steps in a row were skipped; the same on all processes."""
        return self.skipped_in_a_row >= self.args.max_skipped_steps

    def choose_shape(self, steps: Sequence[Transition]) -> None:
        """Before anything of a rollout is scored: one shape for all of its batches, if that is asked for."""
        if self.args.one_batch_shape:
            samples = [t.prompt for t in steps], [t.image for t in steps], [t.response_ids for t in steps]
            self.shape = self.policy.largest_shape(*samples, rows=self.args.per_device_train_batch_size)

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
            shape=self.shape,
        )

    def _epoch(self, experience: Experience, seed: Sequence[int], means: Means, first: bool) -> bool:
        """One pass over the rollout; `False` once a mini-batch shows that the policy has gone too far."""
        args = self.args
        for mini_batch in self._mini_batches(experience, seed):
            drift: list[float] = []
            rounds = len(mini_batch.micro_batches)
            for i, micro_batch in enumerate(mini_batch.micro_batches):
                loss: Tensor | float = 0.0
                if args.ppo_coef > 0:
                    loss = loss + self._ppo_terms(experience, micro_batch, mini_batch.size, means, drift, first)
                if self.clones and args.update_schedule == "joint":
                    loss = loss + self._cloning_term(experience, means, rounds)
                self._backward(loss, means, rounds, last=i == rounds - 1)
            if first:
                self._check_start(means)
            first = False
            if self.gave_up:
                return False
            if args.target_kl is not None and self.trains_policy and self._mean(drift) > args.target_kl:
                return False
        return True

    def _mini_batches(self, experience: Experience, seed: Sequence[int]) -> Iterator[MiniBatch]:
        """Shuffled mini-batches of all processes' steps, cut into micro-batches of like lengths: less padding.

        All steps in a row, environment by environment, make as many equal stretches as a mini-batch has samples; each
        mini-batch takes one step of every stretch. So every process holds the same share of each mini-batch, and which
        steps are learned together depends on the seed alone, not on the number of processes.
        """
        args, processes = self.args, self.processes
        micro = args.per_device_train_batch_size
        size = micro * args.gradient_accumulation_steps * processes.world_size
        local_envs = args.num_envs // processes.world_size
        stretches = np.arange(args.num_envs * args.rollout_steps).reshape(size, -1)
        order = np.random.default_rng(seed).permuted(stretches, axis=1).T
        env, step = np.divmod(order.reshape(len(order), processes.world_size, -1), args.rollout_steps)
        made = step < np.array(experience.steps)[None, :, None]  # where time ran out there is nothing
        lengths = np.array([len(t.response_ids) for t in experience.transitions])
        for batch in range(len(order)):
            counts = made[batch].sum(axis=1)
            mine = made[batch, processes.rank]
            first_env = processes.rank * local_envs
            chosen = step[batch, processes.rank][mine] * local_envs + env[batch, processes.rank][mine] - first_env
            chosen = chosen[np.argsort(lengths[chosen], kind="stable")]
            rounds = math.ceil(counts.max() / micro)
            if rounds:
                yield MiniBatch([chosen[i * micro : (i + 1) * micro] for i in range(rounds)], int(counts.sum()))

    def _ppo_terms(
        self,
        experience: Experience,
        chosen: np.ndarray,
        mini_batch_size: int,
        means: Means,
        drift: list[float],
        first: bool,
    ) -> Tensor | float:
        """Policy, value and KL loss of a micro-batch. A term that is off is left out, never multiplied by zero:
        the optimizer would go on moving on its momentum."""
        args = self.args
        # Of the mini-batch's mean; `backward` divides by the accumulation steps and the processes.
        weight = args.gradient_accumulation_steps * self.processes.world_size / mini_batch_size
        filler = len(chosen) == 0
        if filler:
            chosen, weight = np.zeros(1, np.int64), 0.0
        scored = self.score([experience.transitions[i] for i in chosen], [experience.action_starts[i] for i in chosen])
        advantages, returns = experience.advantages[chosen], experience.returns[chosen]
        policy_losses, stats = ppo.policy_loss(
            scored.logprob, experience.logprob[chosen], advantages, args.cliprange, args.dual_clip
        )
        value_losses = ppo.value_loss(scored.value, returns, experience.values[chosen], args.cliprange_value)
        loss: Tensor | float = 0.0
        if self.trains_policy:
            loss = loss + args.ppo_coef * weight * policy_losses.sum()
        if args.vf_coef > 0:
            loss = loss + args.vf_coef * weight * value_losses.sum()
        if experience.reference is not None and self.trains_policy:
            kl = _reference_kl(scored, [experience.reference[i] for i in chosen])
            loss = loss + args.kl_coef * weight * kl.sum()
            if not filler and torch.isfinite(kl).all():
                means.add("loss/kl", kl)
        bad = self._look_for_nan(
            loss,
            {
                "the rewards' advantages": advantages,
                "the returns": returns,
                "the old log-probs": experience.logprob[chosen],
                "the log-probs (logits)": scored.logprob,
                "the values": scored.value,
            },
        )
        if not (filler or bad):
            drift.extend(stats.approx_kl.tolist())
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
            self._start_deviations.append(float((stats.ratio - 1).abs().max()))

    def _check_start(self, means: Means) -> None:
        """Behind the first mini-batch's passes: old and new policy are the same there, so that ratios should be 1."""
        everybody = [deviation for each in self.processes.gather(self._start_deviations) for deviation in each]
        if not everybody:
            return
        deviation, low_precision = max(everybody), self.accelerator.mixed_precision != "no"
        means.maximum("policy/ratio_start_max_dev", deviation)
        # What rounding alone does was measured to reach the clip range (docs/models.md).
        rounding = low_precision and not self.args.one_batch_shape
        tolerance = 1.5 * self.args.cliprange if rounding else RATIO_TOLERANCE
        if deviation > tolerance and self.processes.rank == 0:
            logger.warning(
                "Before the first step of this update a ratio is off 1 by %.3g (more than %.3g): a sample's log-prob "
                "depends on the batch that it is scored in, or something random is left in the model.%s",
                deviation,
                tolerance,
                " Set one_batch_shape=True: if the warning goes, it was low precision's rounding."
                if low_precision and not self.args.one_batch_shape
                else "",
            )

    def _cloning_term(self, experience: Experience, means: Means, rounds: int) -> Tensor:
        """Cross-entropy on a uniform draw from every label so far, as one of a mini-batch's `rounds` parts.

        Each process draws from its own labels, weighted by how many of all it has; one without any runs a filler.
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
        share = len(self.buffer) / self.all_labels
        if share and torch.isfinite(losses).all():
            means.add("loss/cloning", losses, weight=share)
        weight = share * self.processes.world_size * self.args.gradient_accumulation_steps / rounds
        loss = experience.cloning_coef * weight * losses.mean()
        self._look_for_nan(loss, {"the labels' log-probs (logits)": logprobs})
        return loss

    def _look_for_nan(self, loss: Tensor | float, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the loss isn't finite; the first of `tensors` that isn't either is remembered."""
        bad = isinstance(loss, Tensor) and not torch.isfinite(loss)
        if bad:
            self.not_finite = next((k for k, v in tensors.items() if not torch.isfinite(v).all()), "the loss")
        return bad

    def _backward(self, loss: Tensor | float, means: Means, rounds: int, last: bool) -> None:
        """One backward pass of a mini-batch's `rounds`; behind the `last` one an optimizer step."""
        if not isinstance(loss, Tensor):
            return  # every term is off
        finite = bool(torch.isfinite(loss))
        if finite:
            means.add("loss/total", loss[None] * rounds / self.args.gradient_accumulation_steps)
        self._bad_loss = self._bad_loss or not finite
        self.accelerator.sync_gradients = last
        # DeepSpeed's processes go through their backward passes together, and it skips such a step by itself.
        if finite or self.processes.deepspeed:
            self.accelerator.backward(loss)
        if last:
            stepped = self._deepspeed_stepped(means) if self.processes.deepspeed else self._step(means)
            self._bad_loss = False
            self._count_step(stepped)

    def _step(self, means: Means) -> bool:
        """One clipped step; `False`, on all processes, if a loss or gradient of any of them isn't finite."""
        if self.processes.sum(self._bad_loss):
            self.optimizer.zero_grad()
            return False
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        self.processes.average_gradients(parameters)
        self.accelerator.unscale_gradients()
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        finite = bool(torch.isfinite(norm))
        if not finite:
            self.not_finite = f"the gradient of {self._name_of_bad_gradient()}"
        else:
            means.add("optim/grad_norm", float(norm))
            if self.args.max_grad_norm > 0:
                nn.utils.clip_grads_with_norm_(parameters, self.args.max_grad_norm, norm)
        if finite or self.accelerator.scaler is not None:  # float16's loss scaling skips by itself, and learns from it
            self.optimizer.step()
        self.optimizer.zero_grad()
        return finite

    def _deepspeed_stepped(self, means: Means) -> bool:
        """DeepSpeed makes its step in the last backward pass; whether it did."""
        engine: Any = self.module
        norm = float(engine.get_global_grad_norm() or 0.0)
        if math.isfinite(norm):
            means.add("optim/grad_norm", norm)
        return bool(engine.was_step_applied())

    def _name_of_bad_gradient(self) -> str:
        gradients = ((name, p.grad) for name, p in self.module.named_parameters() if p.grad is not None)
        return next((name for name, gradient in gradients if not torch.isfinite(gradient).all()), "some parameter")

    def _count_step(self, stepped: bool) -> None:
        if stepped:
            self.skipped_in_a_row, self.not_finite = 0, None
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        logger.warning("An optimizer step is skipped: %s.", self.why_skipped())

    def why_skipped(self) -> str:
        return f"{self.not_finite or 'a tensor of another process'} is not finite"

    @contextmanager
    def _cloning_optimizer(self) -> Iterator[None]:
        """The optimizer of the separate phase: `cloning_learning_rate` on the run's schedule, and its own moments."""
        before = [group["lr"] for group in self.optimizer.param_groups]
        if self.args.cloning_learning_rate:
            factor = self.args.cloning_learning_rate / self.args.learning_rate
            for group in self.optimizer.param_groups:
                group["lr"] *= factor
        try:
            with self._cloning_moments():
                yield
        finally:
            for group, lr in zip(self.optimizer.param_groups, before, strict=True):
                group["lr"] = lr

    @contextmanager
    def _cloning_moments(self) -> Iterator[None]:
        """PPO's gradients are much larger. In shared moments they would shrink the steps that cloning takes, and each
        phase would begin in the direction of the other. (DeepSpeed's optimizer can't change its moments.)"""
        if self.processes.deepspeed:
            yield
            return
        ppo_moments, self.optimizer.state = self.optimizer.state, self._moments
        try:
            yield
        finally:
            self._moments, self.optimizer.state = self.optimizer.state, ppo_moments

    def state_dict(self) -> dict[str, Any]:
        """The moments of the cloning phase (PPO's are the optimizer's), and how many steps in a row were skipped."""
        # A run that was given up begins to count anew, or it would end again at once.
        state: dict[str, Any] = {"skipped_in_a_row": 0 if self.gave_up else self.skipped_in_a_row}
        if not self.processes.deepspeed:
            with self._cloning_moments():
                state["moments"] = self.optimizer.state_dict()["state"]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped_in_a_row = state["skipped_in_a_row"]
        if not self.processes.deepspeed:
            with self._cloning_moments():
                self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state["moments"]})

    def _mean(self, values: Sequence[float]) -> float:
        """Mean over these samples of all processes."""
        sums = self.processes.gather((sum(values), len(values)))
        return sum(total for total, _ in sums) / max(1, sum(count for _, count in sums))


def _reference_kl(scored: ScoredBatch, reference: Sequence[Tensor]) -> Tensor:
    """k3 KL to the starting policy, mean over each response's tokens; (B,)."""
    padded = torch.nn.utils.rnn.pad_sequence(list(reference), batch_first=True)
    kl = ppo.kl_k3(scored.token_logprobs, padded)
    return torch.where(scored.mask, kl, kl.new_zeros(())).sum(1) / scored.mask.sum(1)
