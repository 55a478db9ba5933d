"""One update: PPO epochs over a rollout, with thought cloning in the same steps or in a separate phase.

A mini-batch is `per_device_train_batch_size × gradient_accumulation_steps` steps on each process, in micro-batches of
the former. Losses are averaged over the whole mini-batch, so its gradient doesn't depend on how it is split into
micro-batches or over processes. Every process runs the same passes in the same order, with a filler of weight 0 if it
has nothing to learn from.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..config import GTRConfig
from ..distributed.means import Means
from ..distributed.processes import Processes
from ..distributed.progress import Progress
from ..guides.buffer import CorrectionBuffer
from ..policy.scores import Scores
from .cloning import cloning_loss
from .experience import Experience, Scorer
from .losses import PolicyObjective, PolicyStats, policy_stats, reference_kl, value_loss
from .minibatches import count_mini_batches, draw_mini_batches

logger = logging.getLogger(__name__)

RATIO_TOLERANCE = 1e-2


class Updater:
    """Turns experience and corrections into optimizer steps.

    Args:
        args: The hyper-parameters.
        accelerator: Has prepared the network and the optimizer.
        processes: All processes of the run.
        scorer: Scores steps under the network in training.
        optimizer: Optimizes that network's parameters.
        objective: PPO's policy loss.
        buffer: The guide's labels so far; `None` if it provides none.
        progress: Told of every optimizer step.
    """

    def __init__(
        self,
        args: GTRConfig,
        accelerator: Accelerator,
        processes: Processes,
        scorer: Scorer,
        optimizer: Any,
        objective: PolicyObjective,
        buffer: CorrectionBuffer | None,
        progress: Progress | None = None,
    ) -> None:
        self.args, self.accelerator, self.processes = args, accelerator, processes
        self.scorer, self.module, self.optimizer = scorer, scorer.network, optimizer
        self.objective, self.buffer, self.progress = objective, buffer, progress or Progress()
        self._moments: dict[Any, Any] = defaultdict(dict)
        self.skipped_in_a_row = 0
        self.not_finite: str | None = None
        """What was last NaN or infinite on this process."""
        # State of the current update:
        self._skipped, self._bad_loss = 0, False
        self._start_deviations: list[float] = []
        self._all_labels = 0
        self._clones, self._trains_policy = False, False

    def update(self, experience: Experience, number: int, means: Means) -> None:
        """Run update `number`, counted from 0; statistics go to `means`."""
        args, joint = self.args, self.args.update_schedule == "joint"
        self._skipped, self._start_deviations = 0, []
        self._all_labels = int(self.processes.sum(self._num_labels))
        self._clones = experience.cloning_coef > 0 and self._all_labels > 0
        self.progress.begin("learn", self._most_steps(experience), "step")
        self._trains_policy = args.ppo_coef > 0 and number >= args.value_warmup_updates
        means.add("loss/cloning_coef", experience.cloning_coef if self._clones else 0.0)
        whole = True
        if args.ppo_coef > 0 or (joint and self._clones):
            epochs = 0
            for epoch in range(args.num_ppo_epochs):
                epochs += 1
                if not (whole := self._epoch(experience, [args.seed, number, epoch], means, first=epoch == 0)):
                    break
            means.add("policy/epochs", epochs)
        if not joint and self._clones:
            with self._cloning_optimizer():
                self._clone(experience, self._cloning_steps, means)
        elif self._clones and whole:
            with self._cloning_moments():  # not on PPO's momentum, which nothing would bound here
                self._clone(experience, self._left_out_steps(experience), means)
        means.maximum("optim/skipped_steps", self._skipped)

    def _clone(self, experience: Experience, steps: int, means: Means) -> None:
        """Optimizer steps on labels alone."""
        rounds = self.args.gradient_accumulation_steps
        for _ in range(steps):
            if self.gave_up:
                break
            for i in range(rounds):
                self._backward(self._cloning_term(experience, means, rounds), means, rounds, last=i == rounds - 1)

    def _most_steps(self, experience: Experience) -> int:
        """Optimizer steps of an update that isn't cut short."""
        ppo = self.args.num_ppo_epochs * self._steps_per_epoch(int(experience.learned.sum()))
        if not self._clones:
            return ppo
        separate = self.args.update_schedule == "separate"
        return ppo + (self._cloning_steps if separate else self._left_out_steps(experience))

    def _left_out_steps(self, experience: Experience) -> int:
        """Steps that a joint update lacks because of dead groups, which must not keep thoughts from being taught."""
        played, learned = experience.env_steps, int(experience.learned.sum())
        return self.args.num_ppo_epochs * (self._steps_per_epoch(played) - self._steps_per_epoch(learned))

    @property
    def _cloning_steps(self) -> int:
        """Steps of the separate cloning phase: as many as asked for, or as the labels are worth."""
        args = self.args
        if args.cloning_epochs is None:
            return args.cloning_steps
        worth = math.ceil(args.cloning_epochs * self._all_labels / (args.mini_batch_size or 1))
        return min(args.cloning_steps, worth)

    def _steps_per_epoch(self, samples: int) -> int:
        return count_mini_batches(samples, self.args.mini_batch_size or 1)

    @property
    def _num_labels(self) -> int:
        return 0 if self.buffer is None else len(self.buffer)

    @property
    def gave_up(self) -> bool:
        """Whether too many steps in a row were skipped; the same on all processes."""
        return self.skipped_in_a_row >= self.args.max_skipped_steps

    def _epoch(self, experience: Experience, seed: Sequence[int], means: Means, first: bool) -> bool:
        """One pass over the rollout; `False` if it stopped early (`target_kl`, or too many skipped steps)."""
        args = self.args
        mini_batches = draw_mini_batches(
            experience.transitions,
            experience.learned,
            micro_batch_size=args.per_device_train_batch_size,
            accumulation_steps=args.gradient_accumulation_steps,
            rank=self.processes.rank,
            world_size=self.processes.world_size,
            seed=seed,
        )
        for mini_batch in mini_batches:
            drift: list[float] = []
            rounds = len(mini_batch.micro_batches)
            for i, micro_batch in enumerate(mini_batch.micro_batches):
                loss: Tensor | float = 0.0
                if args.ppo_coef > 0:
                    loss = loss + self._ppo_terms(experience, micro_batch, mini_batch.size, means, drift, first)
                if self._clones and args.update_schedule == "joint":
                    loss = loss + self._cloning_term(experience, means, rounds)
                self._backward(loss, means, rounds, last=i == rounds - 1)
            if first:
                self._check_start(means)
            first = False
            if self.gave_up:
                return False
            if args.target_kl is not None and self._trains_policy and self._mean(drift) > args.target_kl:
                return False
        return True

    def _ppo_terms(
        self,
        experience: Experience,
        chosen: np.ndarray,
        mini_batch_size: int,
        means: Means,
        drift: list[float],
        first: bool,
    ) -> Tensor | float:
        """Policy, value and KL loss of a micro-batch. Disabled terms are left out rather than multiplied by zero, or
        the optimizer would keep moving on its momentum."""
        args = self.args
        # For the mean over the mini-batch; `backward` divides by accumulation steps and processes.
        weight = args.gradient_accumulation_steps * self.processes.world_size / mini_batch_size
        if filler := len(chosen) == 0:
            chosen, weight = np.zeros(1, np.int64), 0.0
        old, advantages = experience.scores.rows(chosen), experience.advantages[chosen]
        scored = self.scorer.score([experience.transitions[i] for i in chosen], old.action_start.tolist())
        policy_losses, stats = self.objective(scored, old, advantages)
        loss: Tensor | float = 0.0
        if self._trains_policy:
            loss = loss + args.ppo_coef * weight * policy_losses.sum()
        value_losses = self._value_losses(experience, scored, old, chosen)
        if value_losses is not None and args.vf_coef > 0:
            loss = loss + args.vf_coef * weight * value_losses.sum()
        if experience.reference is not None and self._trains_policy:
            kl = reference_kl(scored, experience.reference[chosen, : scored.mask.shape[1]])
            loss = loss + args.kl_coef * weight * kl.sum()
            if not filler and torch.isfinite(kl).all():
                means.add("loss/kl", kl)
        bad = self._look_for_nan(
            loss,
            {
                "the rewards' advantages": advantages,
                "the returns": None if experience.returns is None else experience.returns[chosen],
                "the old log-probs": old.logprob,
                "the log-probs (logits)": scored.logprob,
                "the values": scored.value,
            },
        )
        if not (filler or bad):
            drift.extend(stats.approx_kl.tolist())
            means.add("loss/policy", policy_losses)
            if value_losses is not None:
                means.add("loss/value", value_losses)
            self._count_drift(scored, old, stats, means, first)
        return loss

    def _value_losses(self, experience: Experience, scored: Scores, old: Scores, chosen: np.ndarray) -> Tensor | None:
        """Value losses of a micro-batch, (B,); `None` without a value head."""
        if scored.value is None or experience.returns is None:
            return None
        return value_loss(scored.value, experience.returns[chosen], old.value, self.args.cliprange_value)

    def _count_drift(self, scored: Scores, old: Scores, stats: PolicyStats, means: Means, first: bool) -> None:
        """Log how far the policy has moved from the one that acted, also for thought and action separately."""
        means.add("policy/ratio", stats.ratio)
        means.add("policy/clipfrac", stats.clipped)
        means.add("policy/approx_kl", stats.approx_kl)
        for part, now, then in (
            ("thought", scored.thought_logprob, old.thought_logprob),
            ("action", scored.action_logprob, old.action_logprob),
        ):
            part_stats = policy_stats(now.detach(), then, self.args.cliprange, self.args.cliprange_high)
            means.add(f"policy/clipfrac_{part}", part_stats.clipped)
            means.add(f"policy/approx_kl_{part}", part_stats.approx_kl)
            means.add(f"policy/ratio_{part}", part_stats.ratio)
        if first:
            self._start_deviations.append(float((stats.ratio - 1).abs().max()))

    def _check_start(self, means: Means) -> None:
        """Check that ratios are 1 in the first mini-batch, where old and new policy are the same."""
        deviations = [deviation for each in self.processes.gather(self._start_deviations) for deviation in each]
        if not deviations:
            return
        deviation, low_precision = max(deviations), self.accelerator.mixed_precision != "no"
        means.maximum("policy/ratio_start_max_dev", deviation)
        # Rounding alone was measured to reach the clip range (docs/models.md).
        rounding = low_precision and not self.args.one_batch_shape
        tolerance = 1.5 * self.args.cliprange if rounding else RATIO_TOLERANCE
        if deviation > tolerance and self.processes.rank == 0:
            logger.warning(
                "Before the first step of this update, a ratio is off 1 by %.3g (more than %.3g): a sample's log-prob "
                "depends on the batch it is scored in, or the model still has some randomness.%s",
                deviation,
                tolerance,
                " Set one_batch_shape=True: if the warning goes away, it was low-precision rounding."
                if low_precision and not self.args.one_batch_shape
                else "",
            )

    def _cloning_term(self, experience: Experience, means: Means, rounds: int) -> Tensor:
        """Cross-entropy on a uniform sample of all labels so far, as one of a mini-batch's `rounds` parts.

        Each process samples its own labels, weighted by its share of all labels; one without any runs a filler.
        """
        if self.buffer:
            samples = self.buffer.sample(self.args.per_device_train_batch_size)
            prompts, images = [s.prompt for s in samples], [s.image for s in samples]
            ids, labels = [s.target_ids for s in samples], [s.num_labels for s in samples]
        else:
            filler = experience.transitions[0]
            prompts, images, ids, labels = [filler.prompt], [filler.image], [filler.response_ids], [0]
        logprobs, mask = self.scorer.policy.score_tokens(self.module, prompts, images, ids)
        positions = torch.arange(mask.shape[1], device=mask.device)
        losses = cloning_loss(logprobs, positions[None] < torch.tensor(labels, device=mask.device)[:, None])
        share = self._num_labels / self._all_labels
        if share and torch.isfinite(losses).all():
            means.add("loss/cloning", losses, weight=share)
        weight = share * self.processes.world_size * self.args.gradient_accumulation_steps / rounds
        loss = experience.cloning_coef * weight * losses.mean()
        self._look_for_nan(loss, {"the labels' log-probs (logits)": logprobs})
        return loss

    def _look_for_nan(self, loss: Tensor | float, tensors: Mapping[str, Tensor | None]) -> bool:
        """Whether the loss is non-finite; records the first of `tensors` that is too."""
        bad = isinstance(loss, Tensor) and not torch.isfinite(loss)
        if bad:
            given = ((name, tensor) for name, tensor in tensors.items() if tensor is not None)
            self.not_finite = next((name for name, t in given if not torch.isfinite(t).all()), "the loss")
        return bad

    def _backward(self, loss: Tensor | float, means: Means, rounds: int, last: bool) -> None:
        """One of a mini-batch's `rounds` backward passes; the `last` is followed by an optimizer step."""
        if not isinstance(loss, Tensor):
            return  # all terms are disabled
        finite = bool(torch.isfinite(loss))
        if finite:
            means.add("loss/total", loss[None] * rounds / self.args.gradient_accumulation_steps)
        self._bad_loss = self._bad_loss or not finite
        self.accelerator.sync_gradients = last
        # DeepSpeed needs all processes in every backward pass, and skips such a step by itself.
        if finite or self.processes.deepspeed:
            self.accelerator.backward(loss)
        if last:
            stepped = self._deepspeed_stepped(means) if self.processes.deepspeed else self._step(means)
            self._bad_loss = False
            self._count_step(stepped)
            self.progress.advance()

    def _step(self, means: Means) -> bool:
        """One clipped step; `False` on all processes if any of them has a non-finite loss or gradient."""
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
        if finite or self.accelerator.scaler is not None:  # float16's scaler skips by itself and adapts
            self.optimizer.step()
        self.optimizer.zero_grad()
        return finite

    def _deepspeed_stepped(self, means: Means) -> bool:
        """Whether DeepSpeed took its step, which it does in the last backward pass."""
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
        self._skipped += 1
        self.skipped_in_a_row += 1
        logger.warning("Skipping an optimizer step: %s.", self.why_skipped())

    def why_skipped(self) -> str:
        return f"{self.not_finite or 'a tensor of another process'} is not finite"

    @contextmanager
    def _cloning_optimizer(self) -> Iterator[None]:
        """Optimizer for the separate phase: `cloning_learning_rate` on the run's schedule, with its own moments."""
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
        """Use separate moments. PPO's gradients are much larger: in shared moments they would shrink cloning's steps,
        and each phase would start in the other's direction. (DeepSpeed's optimizer can't swap its moments.)"""
        if self.processes.deepspeed:
            yield
            return
        ppo_moments, self.optimizer.state = self.optimizer.state, self._moments
        try:
            yield
        finally:
            self._moments, self.optimizer.state = self.optimizer.state, ppo_moments

    def state_dict(self) -> dict[str, Any]:
        """The cloning phase's moments (PPO's are saved with the optimizer), and the current run of skipped steps."""
        # A run that gave up starts counting from 0, or it would stop again at once.
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
        """Mean over the samples of all processes."""
        sums = self.processes.gather((sum(values), len(values)))
        return sum(total for total, _ in sums) / max(1, sum(count for _, count in sums))
