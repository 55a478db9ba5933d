"""Where another engine samples, such as vLLM: how far its probabilities are from those that are trained.

PPO's old log-probs are the learner's own, so that ratios start at 1. They can't show that the sampler computes in
another precision, or that it still has old weights. Its own log-probs of what it sampled can.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..config import GTRConfig
from ..distributed.means import Means
from ..distributed.processes import Processes
from ..policy.scores import Scores
from ..types import Transition
from .losses import kl_k3


class SamplerMismatch(RuntimeError):
    """The engine doesn't sample from the policy in training; its message says by how much, and what to do."""


def importance_weights(
    steps: Sequence[Transition], scores: Scores, args: GTRConfig, processes: Processes, means: Means
) -> Tensor | None:
    """Truncated importance weights of the steps' responses or tokens, see `Scores.importance`; `None`: not needed.

    Must be called on all processes.

    Args:
        steps: This process's steps.
        scores: Their scores under the policy in training.
        means: Collects the metrics `sampler/*`.

    Raises:
        SamplerMismatch: On all processes, if the difference is too large to learn from.
    """
    found = sampler_logprobs(steps, scores.mask)
    difference = None if found is None else torch.where(scores.mask, scores.token_logprobs - found, 0.0)
    if difference is None or found is None:
        own = (0, 0.0, 0.0)
    else:
        apart, kl = difference[scores.mask].abs(), kl_k3(found[scores.mask], scores.token_logprobs[scores.mask])
        own = (len(apart), float(apart.double().sum()), float(kl.double().sum()))
        means.add("sampler/difference", apart)
        means.maximum("sampler/max_difference", float(apart.max()))
        means.add("sampler/kl", kl)
    everybody = [each for each in processes.gather(own) if each[0]]
    if not everybody:
        return None
    for tokens, _, kl_sum in everybody:  # each process may have an engine of its own
        check_mismatch(kl_sum / tokens, args.vllm_max_mismatch)
    apart_mean = sum(apart for _, apart, _ in everybody) / sum(tokens for tokens, _, _ in everybody)
    exact = apart_mean <= args.vllm_importance_sampling_threshold
    if difference is None or exact or not args.vllm_importance_sampling_correction:
        return None
    by_token = args.vllm_importance_sampling_mode == "token_truncate"
    ratios = (difference if by_token else difference.sum(1)).exp()
    cap = args.vllm_importance_sampling_clip_max
    counted = ratios[scores.mask] if by_token else ratios
    means.add("sampler/truncated", counted > cap)
    means.add("sampler/importance", counted.clamp(max=cap))
    return ratios.clamp(max=cap)


def sampler_logprobs(steps: Sequence[Transition], mask: Tensor) -> Tensor | None:
    """The sampler's token log-probs, (steps, T), 0 in padding; `None` if the engine doesn't report them."""
    rows = [step.sampler_logprobs for step in steps if step.sampler_logprobs is not None]
    if not rows:
        return None
    if len(rows) < len(steps) or any(len(row) != n for row, n in zip(rows, mask.sum(1).tolist(), strict=True)):
        raise ValueError("The engine must report one log-prob for each id of every response, or none at all.")
    padded = np.zeros(tuple(mask.shape), np.float32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return torch.from_numpy(padded).to(mask.device)


def check_mismatch(kl: float, limit: float) -> None:
    """Raise a [`SamplerMismatch`] if the KL per token exceeds the limit, or isn't a number."""
    if not kl <= limit:
        raise SamplerMismatch(
            f"The engine's samples don't come from the policy in training: the KL between the two is {kl:.3g} per "
            f"token, above `vllm_max_mismatch` ({limit:g}). Nothing was learned from them. Probably the engine has "
            "old weights or another model; if it only computes in lower precision, raise the limit."
        )
