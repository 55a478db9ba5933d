"""The maths of PPO over environment steps: pure functions on tensors, no model, no trainer.

Letters: T rollout steps, N environments, B samples of a mini-batch. One sample is one *environment step*; its log-prob
is the λ-weighted sum over the response's tokens. Losses are returned per sample, so that a micro-batch can be averaged
over the size of its whole mini-batch. Tensors are never broadcast: (B,) beside (B, 1) is an error.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PolicyStats(NamedTuple):
    """What a policy update did to each sample; detached, each (B,)."""

    ratio: Tensor
    """π(a|o) / π_old(a|o), after the clamp on its logarithm."""
    clipped: Tensor
    """bool: the ratio is outside 1 ± cliprange. Its mean is the clip fraction."""
    approx_kl: Tensor
    """k3 estimate of KL(π_old ‖ π), never negative."""


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_values: Tensor,
    last_values: Tensor,
    gamma: float,
    lam: float,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over environment steps (Schulman et al., 2016).

    `δ_t = r_t + γ V(o_{t+1}) − V(o_t)` and `Â_t = δ_t + γλ Â_{t+1}`, where an episode's end cuts the recursion:

    - `terminated`: nothing follows, the target is the reward alone.
    - `truncated`: the episode stopped but the state does not show why, so the value of its true final observation
      stands for what would have followed. A truncation that the state does show (a formula that is too long, an
      episode cut by the task; `info["bootstrap"] = False`) is passed as `terminated`.
    - Otherwise the next step's value follows, and `last_values` after the last step.

    Args:
        rewards: (T, N) reward of each step.
        values: (T, N) value of each step's own observation.
        terminated: (T, N) bool. Wins where both flags are set.
        truncated: (T, N) bool.
        final_values: (T, N) value of the last observation of a truncated episode; read nowhere else.
        last_values: (N,) value of the observation after the rollout; not read where its last step ended an episode.
        gamma: discount γ.
        lam: λ of GAE.
        lengths: (N,) int, in 1..T: how many steps each environment really made, if not all T. What lies beyond is not
            read, and 0 in the result.

    Returns:
        advantages (T, N) and returns (T, N), the value function's targets `Â_t + V(o_t)`.
    """
    _check_rollout(rewards, values, terminated, truncated, final_values, last_values, lengths)
    steps, envs = (torch.arange(size, device=rewards.device) for size in rewards.shape)
    made = torch.ones_like(terminated) if lengths is None else steps[:, None] < lengths
    next_values = torch.cat([values[1:], last_values[None]])
    if lengths is not None:
        next_values[lengths - 1, envs] = last_values
    # `where`, not a product with a mask: the values that are not read may be NaN.
    next_values = torch.where(truncated, final_values, next_values)
    next_values = torch.where(terminated, torch.zeros_like(values), next_values)
    deltas = torch.where(made, rewards + gamma * next_values - values, torch.zeros_like(values))

    goes_on = ~(terminated | truncated)
    advantages = torch.zeros_like(deltas)
    following = torch.zeros_like(last_values)
    for t in reversed(range(len(rewards))):
        following = deltas[t] + torch.where(goes_on[t], gamma * lam * following, 0.0)
        advantages[t] = following
    returns = torch.where(made, advantages + values, torch.zeros_like(values))
    return advantages, returns


def advantage_moments(advantages: Tensor) -> Tensor:
    """Count, sum and sum of squares of `advantages` (any shape), as float64 of shape (3,).

    Summed over the ranks they give the exact moments of all ranks' rollout, for [`normalize_advantages`].
    """
    # Apple's GPUs don't know float64; everywhere else the sums stay where the ranks can reduce them.
    wide = (advantages.detach().cpu() if advantages.device.type == "mps" else advantages.detach()).double()
    return torch.stack([wide.new_tensor(wide.numel()), wide.sum(), wide.square().sum()])


def normalize_advantages(advantages: Tensor, moments: Tensor | None = None, min_std: float = 0.3) -> Tensor:
    """`(Â − mean) / max(std, min_std)`, same shape as `advantages`.

    The floor keeps a rollout in which nearly every episode went the same way from being blown up into noise.

    Args:
        advantages: any shape.
        moments: (3,) the [`advantage_moments`] summed over all ranks; this tensor's own if `None`.
        min_std: floor of the divisor, in units of the scaled rewards.
    """
    if min_std <= 0:
        raise ValueError(f"`min_std` must be positive, got {min_std}.")
    count, total, squares = (advantage_moments(advantages) if moments is None else moments).tolist()
    mean = total / count
    std = max(squares / count - mean**2, 0.0) ** 0.5
    return (advantages - mean) / max(std, min_std)


def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantages: Tensor,
    cliprange: float,
    dual_clip: float | None = 3.0,
    log_ratio_clamp: float = 20.0,
) -> tuple[Tensor, PolicyStats]:
    """PPO's clipped surrogate, per sample.

    `L = max(−Â·ratio, −Â·clip(ratio, 1 ± cliprange))`. A log-prob that is a sum over 200 tokens leaves the trust
    region quickly; with a negative advantage that term has no upper bound. The dual clip (Ye et al., 2020) caps it at
    `dual_clip · |Â|`, and the log-ratio is clamped before it is exponentiated.

    Args:
        logprob: (B,) under the policy in training, float32 or wider.
        old_logprob: (B,) under the policy that acted, from the same scoring function.
        advantages: (B,).
        cliprange: ε of the clip.
        dual_clip: cap for negative advantages, greater than 1; `None` turns it off.
        log_ratio_clamp: bound of |log ratio|.

    Returns:
        loss (B,) to be minimised, and [`PolicyStats`].
    """
    _same_shape(logprob=logprob, old_logprob=old_logprob, advantages=advantages)
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"`dual_clip` must be greater than 1 (or None to turn it off), got {dual_clip}.")
    ratio = _log_ratio(logprob, old_logprob, log_ratio_clamp).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange))
    if dual_clip is not None:
        capped = torch.minimum(loss, -advantages * dual_clip)
        loss = torch.where(advantages < 0, capped, loss)
    return loss, policy_stats(logprob, old_logprob, cliprange, log_ratio_clamp)


@torch.no_grad()
def policy_stats(logprob: Tensor, old_logprob: Tensor, cliprange: float, log_ratio_clamp: float = 20.0) -> PolicyStats:
    """Ratio, clip fraction and KL of a policy change, per sample.

    Any pair of log-probs will do, so that the thought's and the action's part can be looked at apart.

    Args:
        logprob: (B,) under the policy in training.
        old_logprob: (B,) under the policy that acted.
        cliprange: ε of the clip.
        log_ratio_clamp: bound of |log ratio|.
    """
    _same_shape(logprob=logprob, old_logprob=old_logprob)
    ratio = _log_ratio(logprob, old_logprob, log_ratio_clamp).exp()
    return PolicyStats(
        ratio=ratio,
        clipped=(ratio - 1).abs() > cliprange,
        approx_kl=kl_k3(old_logprob, logprob, log_ratio_clamp),
    )


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, cliprange_value: float | None = None
) -> Tensor:
    """`½ (V − R)²`, per sample (B,).

    Args:
        values: (B,) the value head's answers in training.
        returns: (B,) targets from [`gae`].
        old_values: (B,) the values of the rollout; only with `cliprange_value`.
        cliprange_value: if given, V may earn nothing by moving further than this from the old value.
    """
    _same_shape(values=values, returns=returns)
    loss = 0.5 * (values - returns).square()
    if cliprange_value is None:
        return loss
    if old_values is None:
        raise ValueError("`cliprange_value` needs `old_values`, the values of the rollout: pass both or neither.")
    _same_shape(values=values, old_values=old_values)
    clipped = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    return torch.maximum(loss, 0.5 * (clipped - returns).square())


def kl_k3(logprob: Tensor, ref_logprob: Tensor, log_ratio_clamp: float = 20.0) -> Tensor:
    """k3 estimate of KL(π ‖ π_ref) from samples of π: `q − 1 − log q` with `q = π_ref / π`; never negative.

    Args:
        logprob: under π, (B,) of responses or (B, T) of tokens; gradients flow.
        ref_logprob: under π_ref, the same shape.
        log_ratio_clamp: bound of |log q|.
    """
    _same_shape(logprob=logprob, ref_logprob=ref_logprob)
    log_q = _log_ratio(ref_logprob, logprob, log_ratio_clamp)
    # expm1 keeps the digits of a tiny ratio; what rounding leaves below zero is cut.
    return (torch.expm1(log_q) - log_q).clamp(min=0)


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor) -> float:
    """`1 − Var(R − V) / Var(R)`: 1 is perfect, 0 no better than a constant, NaN where all returns are equal.

    Args:
        values: any shape.
        returns: the same shape.
    """
    _same_shape(values=values, returns=returns)
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


def _check_rollout(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_values: Tensor,
    last_values: Tensor,
    lengths: Tensor | None,
) -> None:
    _same_shape(rewards=rewards, values=values, terminated=terminated, truncated=truncated, final_values=final_values)
    if rewards.ndim != 2 or last_values.shape != rewards.shape[1:]:
        raise ValueError(
            "gae takes rewards of shape (T, N) and last_values of shape (N,), "
            f"got {tuple(rewards.shape)} and {tuple(last_values.shape)}."
        )
    if terminated.dtype != torch.bool or truncated.dtype != torch.bool:
        raise ValueError("`terminated` and `truncated` must be bool tensors: convert them with `.bool()`.")
    if lengths is None:
        return
    num_steps, num_envs = rewards.shape
    if lengths.shape != (num_envs,) or bool(((lengths < 1) | (lengths > num_steps)).any()):
        raise ValueError(f"`lengths` must be of shape ({num_envs},) with values in 1..{num_steps}, got {lengths}.")


def _same_shape(**tensors: Tensor) -> None:
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"These tensors must have the same shape (nothing is broadcast here): {shapes}.")
