"""From tokens to the λ-weighted log-prob of a response. Everything is float32, whatever the model's precision.

1. [`token_logprobs`] scores ids under the distribution that they were sampled from.
2. [`weighted_logprob`] sums them: action tokens count fully, thought tokens λ times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

# A float32 copy of the logits of this many numbers at a time (256 MB): a 150,000-token vocabulary times 256 tokens
# times 8 samples would otherwise take 1.2 GB for every intermediate result.
CHUNK_ELEMENTS = 64 * 2**20


def token_logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    temperature: float = 1.0,
    suppressed: torch.Tensor | None = None,
    repetition_penalty: float = 1.0,
    prompt_ids: torch.Tensor | None = None,
    prompt_mask: torch.Tensor | None = None,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of `ids` under the distribution they were sampled from.

    Args:
        logits (`(B, T, V)`): the model's own, in any precision; `logits[:, t]` predicts `ids[:, t]`.
        ids (`(B, T)`): the sampled tokens. What stands in padding does not matter but for its own log-prob.
        temperature: as in sampling.
        suppressed (`(V,)`, bool): tokens that could not be sampled.
        repetition_penalty: as in sampling; it then needs `prompt_ids` and `prompt_mask`.
        prompt_ids, prompt_mask (`(B, P)`): the prompt, image tokens included, and 1 where it is no padding.
        with_entropy: also give the entropy of each token's distribution (no gradient).

    Returns:
        Log-probs and, if asked for, entropies; both `(B, T)`, float32.
    """
    batch, length, vocabulary = logits.shape
    if repetition_penalty == 1.0:
        first_seen = None
    elif prompt_ids is None or prompt_mask is None:
        raise ValueError("A repetition penalty looks at the prompt too: pass prompt_ids and prompt_mask.")
    else:
        first_seen = _first_seen(prompt_ids, prompt_mask, ids, vocabulary)

    def score_rows(logits: torch.Tensor, ids: torch.Tensor, first_seen: torch.Tensor | None) -> Any:
        return _score_rows(logits, ids, first_seen, temperature, suppressed, repetition_penalty, with_entropy)

    rows = max(1, CHUNK_ELEMENTS // max(1, length * vocabulary))
    if rows >= batch:
        return score_rows(logits, ids, first_seen)
    # Several chunks: do not keep the float32 copies for the backward pass, they are cheap to compute again.
    chunks = [
        checkpoint(
            score_rows,
            logits[i : i + rows],
            ids[i : i + rows],
            None if first_seen is None else first_seen[i : i + rows],
            use_reentrant=False,
        )
        for i in range(0, batch, rows)
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


def _score_rows(
    logits: torch.Tensor,
    ids: torch.Tensor,
    first_seen: torch.Tensor | None,
    temperature: float,
    suppressed: torch.Tensor | None,
    repetition_penalty: float,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    scores = logits.float()
    if first_seen is not None:
        steps = torch.arange(ids.shape[1], device=ids.device)[:, None]
        scores = penalize_repetition(scores, first_seen[:, None, :] <= steps, repetition_penalty)
    scores = scores / temperature
    if suppressed is not None:
        scores = scores.masked_fill(suppressed, -torch.inf)
    logprobs = scores.gather(-1, ids[..., None]).squeeze(-1) - scores.logsumexp(-1)
    if not with_entropy:
        return logprobs, None
    with torch.no_grad():
        return logprobs, torch.special.entr(scores.softmax(-1)).sum(-1)


def _first_seen(
    prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, ids: torch.Tensor, vocabulary: int
) -> torch.Tensor:
    """`(B, V)`: the first step at which a token counts as a repetition: 0 if it is in the prompt, `t + 1` if it was
    sampled at step `t`, `T + 1` (never) otherwise."""
    batch, length = ids.shape
    steps = torch.cat(
        [
            torch.where(prompt_mask.bool(), 0, length + 1),
            torch.arange(1, length + 1, device=ids.device).expand(batch, length),
        ],
        dim=1,
    )
    # an embedding can be larger than the output vocabulary; such tokens fall into one extra column
    tokens = torch.cat([prompt_ids, ids], dim=1).clamp(max=vocabulary)
    first = torch.full((batch, vocabulary + 1), length + 1, device=ids.device)
    return first.scatter_reduce(1, tokens, steps, "amin")[:, :vocabulary]


def penalize_repetition(scores: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Divide positive and multiply negative scores of the `seen` tokens by `penalty`."""
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def weighted_logprob(
    logprobs: torch.Tensor, mask: torch.Tensor, action_start: torch.Tensor, thought_prob_coef: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`log π(a|o) = Σ_action log p + λ · Σ_thought log p`.

    Args:
        logprobs (`(B, T)`): per token.
        mask (`(B, T)`): 1 where a token was sampled, 0 in padding.
        action_start (`(B,)`): first token of the action. Where it lies behind the last token the response has no
            action key: every token then weighs λ, or 1 if λ is 0, lest nothing be left to learn from.
        thought_prob_coef: λ.

    Returns:
        The weighted log-prob and the plain sums over thought and action tokens, each `(B,)`, float32.
    """
    mask = mask.bool()
    in_action = torch.arange(logprobs.shape[1], device=logprobs.device) >= action_start[:, None]
    # `where`, not a product: padding may hold -inf
    logprobs = logprobs.float()
    zero = logprobs.new_zeros(())
    thought = torch.where(mask & ~in_action, logprobs, zero).sum(1)
    action = torch.where(mask & in_action, logprobs, zero).sum(1)
    has_action = action_start < mask.sum(1)
    weight = torch.where(has_action, thought_prob_coef, thought_prob_coef or 1.0)
    return action + weight * thought, thought, action
