"""What a network says about responses: the one record of scored steps.

A scored batch is one, and so is a whole rollout: batches are concatenated and put back into the rollout's order.
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
    """`(B,)`: plain sum over the thought's tokens."""
    action_logprob: Tensor
    """`(B,)`: plain sum over the action's tokens."""
    token_logprobs: Tensor
    """`(B, T)`; 0 in padding."""
    mask: Tensor
    """`(B, T)`, bool: where there is a token."""
    action_start: Tensor
    """`(B,)`, int64: the first token of the action; the response's length where it has none."""
    value: Tensor | None = None
    """`(B,)`: the state's value; `None` without a value head."""
    entropy: Tensor | None = None
    """`(B,)`: mean over the response's tokens, without gradient; only if asked for."""

    def __len__(self) -> int:
        return len(self.logprob)

    def rows(self, chosen: Sequence[int] | np.ndarray) -> Scores:
        """The `chosen` responses in that order, without the padding that none of them needs."""
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
        )

    @classmethod
    def concatenate(cls, batches: Sequence[Scores]) -> Scores:
        """All batches in a row, padded to the longest response of all."""
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
