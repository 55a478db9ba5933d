"""PPO losses over environment steps: pure tensor functions without model or trainer.

B is the number of samples in a mini-batch. One sample is one *environment step*; its log-prob is the λ-weighted sum
over the response's tokens, unless every token has its own ratio. Losses are per sample, so that a micro-batch can be
averaged over its whole mini-batch. Tensors are never broadcast: mixing (B,) and (B, 1) is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..config import GTRConfig
from ..policy.scores import Scores


class PolicyStats(NamedTuple):
    """The effect of a policy update on each ratio; detached, one-dimensional: (B,) with one ratio per response."""

    ratio: Tensor
    """π(a|o) / π_old(a|o), with its logarithm clamped."""
    clipped: Tensor
    """bool: the ratio is outside the clip range. Its mean is the clip fraction."""
    approx_kl: Tensor
    """k3 estimate of KL(π_old ‖ π), never negative."""


class PolicyObjective(Protocol):
    """PPO's policy loss per sample, however many ratios a response has."""

    def __call__(self, new: Scores, old: Scores, advantages: Tensor) -> tuple[Tensor, PolicyStats]:
        """Loss (B,) to minimise, and its statistics.

        Args:
            new: Scores under the policy in training, with gradients.
            old: Scores of the same responses under the policy that acted. Their `importance` weighs the losses.
            advantages: (B,).
        """
        ...


@dataclass(frozen=True)
class ResponseRatio:
    """One ratio per response, from the λ-weighted sums of its token log-probs (GTR, RL4VLM).

    Args:
        cliprange: See [`policy_loss`].
        dual_clip: See [`policy_loss`].
        cliprange_high: See [`policy_loss`].
    """

    cliprange: float
    dual_clip: float | None
    cliprange_high: float | None = None

    def __call__(self, new: Scores, old: Scores, advantages: Tensor) -> tuple[Tensor, PolicyStats]:
        clip = self.cliprange, self.dual_clip, self.cliprange_high
        losses, stats = policy_loss(new.logprob, old.logprob, advantages, *clip)
        return losses if old.importance is None else losses * old.importance, stats


@dataclass(frozen=True)
class TokenRatio:
    """One ratio per token, each clipped on its own and with its step's advantage (GRPO, VL-DAC).

    A response's loss is the weighted mean over its tokens: weight 1 for action tokens, `thought_coef` for thought
    tokens. In a response without an action every token has the same weight, also with λ = 0.

    Args:
        cliprange: See [`policy_loss`].
        dual_clip: See [`policy_loss`].
        cliprange_high: See [`policy_loss`].
        thought_coef: λ, the weight of thought tokens.
    """

    cliprange: float
    dual_clip: float | None
    cliprange_high: float | None
    thought_coef: float

    def __call__(self, new: Scores, old: Scores, advantages: Tensor) -> tuple[Tensor, PolicyStats]:
        # Selected by their own masks, because the two batches may be padded differently.
        rows, places = new.mask.nonzero(as_tuple=True)
        clip = self.cliprange, self.dual_clip, self.cliprange_high
        now, then = new.token_logprobs[new.mask], old.token_logprobs[old.mask]
        losses, stats = policy_loss(now, then, advantages[rows], *clip)
        if old.importance is not None:
            losses = losses * (old.importance[rows] if old.importance.dim() == 1 else old.importance[old.mask])
        is_thought = places < new.action_start[rows]
        has_action = new.action_start < new.mask.sum(1)
        thought_coef = torch.where(has_action, self.thought_coef, self.thought_coef or 1.0)  # as `weighted_logprob`
        weights = torch.where(is_thought, thought_coef[rows], 1.0).to(losses.dtype)
        total = losses.new_zeros(len(new)).index_add(0, rows, weights * losses)
        weight = losses.new_zeros(len(new)).index_add(0, rows, weights)
        return total / torch.where(weight > 0, weight, 1.0), stats  # 0 without a token


def choose_objective(args: GTRConfig) -> PolicyObjective:
    """The policy loss that the settings name."""
    if args.ratio_level == "token":
        return TokenRatio(args.cliprange, args.dual_clip, args.cliprange_high, args.thought_prob_coef)
    return ResponseRatio(args.cliprange, args.dual_clip, args.cliprange_high)


def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantages: Tensor,
    cliprange: float,
    dual_clip: float | None,
    cliprange_high: float | None = None,
    log_ratio_clamp: float = 20.0,
) -> tuple[Tensor, PolicyStats]:
    """PPO's clipped surrogate, per sample.

    `L = max(−Â·ratio, −Â·clip(ratio, 1 − cliprange, 1 + cliprange_high))`. A log-prob summed over 200 tokens leaves
    the trust region quickly, and with a negative advantage the loss is unbounded. The dual clip (Ye et al., 2020) caps
    it at `dual_clip · |Â|`, and the log-ratio is clamped before it is exponentiated.

    Args:
        logprob: (B,) under the policy in training, float32 or wider.
        old_logprob: (B,) under the policy that acted, from the same scoring function.
        advantages: (B,).
        cliprange: ε of the clip.
        dual_clip: cap for negative advantages, greater than 1; `None` turns it off.
        cliprange_high: ε above 1, for clip-higher (DAPO, arXiv 2503.14476); `None`: `cliprange`.
        log_ratio_clamp: bound of |log ratio|.

    Returns:
        loss (B,) to be minimised, and [`PolicyStats`].
    """
    same_shape(logprob=logprob, old_logprob=old_logprob, advantages=advantages)
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"`dual_clip` must be greater than 1 (or None to turn it off), got {dual_clip}.")
    ratio = _log_ratio(logprob, old_logprob, log_ratio_clamp).exp()
    high = cliprange if cliprange_high is None else cliprange_high
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + high))
    if dual_clip is not None:
        capped = torch.minimum(loss, -advantages * dual_clip)
        loss = torch.where(advantages < 0, capped, loss)
    return loss, policy_stats(logprob, old_logprob, cliprange, high, log_ratio_clamp)


@torch.no_grad()
def policy_stats(
    logprob: Tensor,
    old_logprob: Tensor,
    cliprange: float,
    cliprange_high: float | None = None,
    log_ratio_clamp: float = 20.0,
) -> PolicyStats:
    """Ratio, clip fraction and KL of a policy change, per sample.

    Works for any pair of log-probs, so that thought and action can be inspected separately.

    Args:
        logprob: (B,) under the policy in training.
        old_logprob: (B,) under the policy that acted.
        cliprange: ε of the clip.
        cliprange_high: ε above 1; `None`: `cliprange`.
        log_ratio_clamp: bound of |log ratio|.
    """
    same_shape(logprob=logprob, old_logprob=old_logprob)
    ratio = _log_ratio(logprob, old_logprob, log_ratio_clamp).exp()
    high = cliprange if cliprange_high is None else cliprange_high
    return PolicyStats(
        ratio=ratio,
        clipped=(ratio - 1 > high) | (1 - ratio > cliprange),
        approx_kl=kl_k3(old_logprob, logprob, log_ratio_clamp),
    )


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, cliprange_value: float | None = None
) -> Tensor:
    """`½ (V − R)²`, per sample (B,).

    Args:
        values: (B,) the value head's predictions in training.
        returns: (B,) targets from the advantage estimator.
        old_values: (B,) the values of the rollout; only with `cliprange_value`.
        cliprange_value: if given, V gains nothing by moving further than this from the old value.
    """
    same_shape(values=values, returns=returns)
    loss = 0.5 * (values - returns).square()
    if cliprange_value is None:
        return loss
    if old_values is None:
        raise ValueError("`cliprange_value` needs `old_values`, the values of the rollout: pass both or neither.")
    same_shape(values=values, old_values=old_values)
    clipped = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    return torch.maximum(loss, 0.5 * (clipped - returns).square())


def kl_k3(logprob: Tensor, ref_logprob: Tensor, log_ratio_clamp: float = 20.0) -> Tensor:
    """k3 estimate of KL(π ‖ π_ref) from samples of π: `q − 1 − log q` with `q = π_ref / π`; never negative.

    Args:
        logprob: under π, (B,) for responses or (B, T) for tokens, with gradients.
        ref_logprob: under π_ref, the same shape.
        log_ratio_clamp: bound of |log q|.
    """
    same_shape(logprob=logprob, ref_logprob=ref_logprob)
    log_q = _log_ratio(ref_logprob, logprob, log_ratio_clamp)
    # expm1 is accurate for tiny ratios; clamp what rounding leaves below zero.
    return (torch.expm1(log_q) - log_q).clamp(min=0)


def reference_kl(scored: Scores, reference: Tensor) -> Tensor:
    """k3 KL to the starting policy, averaged over each response's tokens; (B,).

    Args:
        scored: Scores under the policy in training, with gradients.
        reference: (B, T) token log-probs under the starting policy.
    """
    kl = kl_k3(scored.token_logprobs, reference)
    return torch.where(scored.mask, kl, kl.new_zeros(())).sum(1) / scored.mask.sum(1)


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor) -> float:
    """`1 − Var(R − V) / Var(R)`: 1 is perfect, 0 no better than a constant, NaN if all returns are equal.

    Args:
        values: any shape.
        returns: the same shape.
    """
    same_shape(values=values, returns=returns)
    wide = returns.cpu().double()
    variance = wide.var(correction=0)
    if variance == 0:
        return float("nan")
    return float(1 - (wide - values.cpu().double()).var(correction=0) / variance)


def _log_ratio(logprob: Tensor, old_logprob: Tensor, bound: float) -> Tensor:
    for given in (logprob, old_logprob):
        if given.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"Log-probs must be float32 or wider, got {given.dtype}: half precision is too coarse "
                "for the sum over a response. Cast the logits with `.float()` before the log-softmax."
            )
    return (logprob - old_logprob).clamp(-bound, bound)


def same_shape(**tensors: Tensor) -> None:
    """Raise a `ValueError` if tensors would be broadcast."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"These tensors must have the same shape (nothing is broadcast here): {shapes}.")
