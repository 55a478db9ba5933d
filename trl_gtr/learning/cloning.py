"""Thought cloning: cross-entropy on corrected thoughts, and how much it weighs in an update."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def cloning_loss(token_logprobs: Tensor, label_mask: Tensor) -> Tensor:
    """Cross-entropy on the label tokens: minus the mean of their log-probs, per sample (B,).

    The trainer takes the mean over samples, so that a short thought counts as much as a long one. A row without a
    label gives 0 and no gradient: the filler of a process that has nothing to clone yet.

    Args:
        token_logprobs: (B, T) log-prob of each target token at temperature 1, float32 or wider.
        label_mask: (B, T) bool, true on the tokens to learn. What lies outside is not read.
    """
    if token_logprobs.ndim != 2 or token_logprobs.shape != label_mask.shape or label_mask.dtype != torch.bool:
        raise ValueError(
            "cloning_loss takes token_logprobs and a bool label_mask of the same shape (B, T), got "
            f"{tuple(token_logprobs.shape)} and {label_mask.dtype} {tuple(label_mask.shape)}."
        )
    labelled = torch.where(label_mask, token_logprobs, torch.zeros_like(token_logprobs))
    return -labelled.sum(dim=1) / label_mask.sum(dim=1).clamp(min=1)


def cloning_coefficient(mode: Literal["share", "constant"], coef: float, corrected: int, steps: int) -> float:
    """The weight of the cloning loss in this update.

    `"share"`: `coef` times the share of the current rollout's steps that were corrected, over all ranks. The guidance
    fades by itself as the agent's thoughts come right. `"constant"`: `coef`, whatever the rollout was like.

    Args:
        mode: `"share"` or `"constant"`.
        coef: `thought_cloning_coef`.
        corrected: steps of the rollout that gave a label.
        steps: all steps of the rollout.
    """
    if not 0 <= corrected <= steps:
        raise ValueError(f"corrected={corrected} must be in 0..{steps}, the number of steps.")
    if mode == "constant":
        return coef
    if mode == "share":
        return coef * corrected / steps if steps else 0.0
    raise ValueError(f"`cloning_weight` must be 'share' or 'constant', got {mode!r}.")
