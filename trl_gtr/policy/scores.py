"""The record of scored responses.

Used for a batch as well as for a whole rollout, whose batches are concatenated and put back in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """Log-probs and values of `B` responses; float32. `T` is the length of the longest of them."""

    logprob: Tensor
    """`(B,)`: action tokens + λ · thought tokens."""
    thought_logprob: Tensor
    """`(B,)`: unweighted sum over thought tokens."""
    action_logprob: Tensor
    """`(B,)`: unweighted sum over action tokens."""
    token_logprobs: Tensor
    """`(B, T)`; 0 in padding."""
    mask: Tensor
    """`(B, T)`, bool: where there is a token."""
    action_start: Tensor
    """`(B,)`, int64: the first token of the action; the response's length if it has none."""
    value: Tensor | None = None
    """`(B,)`: the state's value; `None` without a value head."""
    entropy: Tensor | None = None
    """`(B,)`: mean over the response's tokens, without gradient; only if requested."""
    importance: Tensor | None = None
    """`(B,)` or `(B, T)`: importance weights of responses or tokens that another engine sampled."""

    def __len__(self) -> int:
        return len(self.logprob)

    def rows(self, chosen: Sequence[int] | np.ndarray) -> Scores:
        """The `chosen` responses in that order, without unneeded padding."""
        indices = torch.as_tensor(np.asarray(chosen, np.int64), device=self.mask.device)
        mask = self.mask[indices]
        longest = int(mask.any(0).sum())
        return Scores(
            self.logprob[indices],
            self.thought_logprob[indices],
            self.action_logprob[indices],
            self.token_logprobs[indices, :longest],
            mask[:, :longest],
            self.action_start[indices],
            None if self.value is None else self.value[indices],
            None if self.entropy is None else self.entropy[indices],
            self._importance_of(indices, longest),
        )

    def _importance_of(self, indices: Tensor, longest: int) -> Tensor | None:
        if self.importance is None:
            return None
        chosen = self.importance[indices]
        return chosen[:, :longest] if chosen.dim() == 2 else chosen

    @classmethod
    def concatenate(cls, batches: Sequence[Scores]) -> Scores:
        """Concatenate batches, padded to the longest response."""
        longest = max(batch.mask.shape[1] for batch in batches)

        def padded(tokens: Tensor) -> Tensor:
            return torch.nn.functional.pad(tokens, (0, longest - tokens.shape[1]))

        values = [batch.value for batch in batches if batch.value is not None]
        entropies = [batch.entropy for batch in batches if batch.entropy is not None]
        return cls(
            torch.cat([batch.logprob for batch in batches]),
            torch.cat([batch.thought_logprob for batch in batches]),
            torch.cat([batch.action_logprob for batch in batches]),
            torch.cat([padded(batch.token_logprobs) for batch in batches]),
            torch.cat([padded(batch.mask) for batch in batches]),
            torch.cat([batch.action_start for batch in batches]),
            torch.cat(values) if values else None,
            torch.cat(entropies) if entropies else None,
        )
