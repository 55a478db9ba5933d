"""From characters to tokens to the λ-weighted log-prob of a response.

1. [`SpanFinder`] turns sampled ids into text and finds the token in which a character begins. It works on the bytes
   of the vocabulary, so it is exact for any tokenizer, for broken multi-byte characters and for truncated text.
2. [`token_logprobs`] scores ids under the distribution that they were sampled from.
3. [`weighted_logprob`] sums them: action tokens count fully, thought tokens λ times.

Everything is float32, whatever the model's precision.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

SENTENCEPIECE_SPACE = "\u2581"
# A float32 copy of the logits of this many numbers at a time (256 MB): a 150,000-token vocabulary times 256 tokens
# times 8 samples would otherwise take 1.2 GB for every intermediate result.
CHUNK_ELEMENTS = 64 * 2**20


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE vocabularies: {stand-in: byte}."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LONE_BYTE = re.compile("[\udc80-\udcff]")


class SpanFinder:
    """Text of sampled ids, and the token in which each character begins.

    The ids are never encoded again: another tokenization of the same text would have other boundaries. Each token's
    bytes come from the vocabulary, are put in a row and decoded once. Special tokens (EOS, padding, `<image>`) have no
    text. A byte that belongs to no valid UTF-8 character becomes one U+FFFD.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._silent = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        self._bytes: dict[int, bytes] = {i: str(token).encode() for i, token in added.items()}
        self._bytes.update(dict.fromkeys(self._silent, b""))
        self._kind, self._strips_space = _vocabulary_kind(tokenizer)

    def token_bytes(self, token_id: int) -> bytes:
        """What this token adds to the text."""
        if token_id not in self._bytes:
            piece = self.tokenizer.convert_ids_to_tokens(token_id)
            self._bytes[token_id] = b"" if piece is None else _piece_bytes(piece, self._kind)
        return self._bytes[token_id]

    def text(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text that the ids stand for; spans are character positions in it."""
        return self._read(ids)[0]

    def first_token(self, ids: Sequence[int] | np.ndarray, char: int) -> int:
        """Index of the token that holds the first byte of character `char`; `len(ids)` behind the end of the text.

        A token that straddles a boundary thus belongs to what comes after it.
        """
        _, char_starts, token_ends = self._read(ids)
        return bisect_right(token_ends, char_starts[char]) if char < len(char_starts) else len(ids)

    def action_start(self, ids: Sequence[int] | np.ndarray, action_span: tuple[int, int] | None) -> int:
        """First token of the action, given `Response.action_span`; `len(ids)`, all thought, if there is none."""
        return len(ids) if action_span is None else self.first_token(ids, action_span[0])

    def pieces(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """The characters that begin in each token; in a row they are the text."""
        text, char_starts, token_ends = self._read(ids)
        tokens = [bisect_right(token_ends, start) for start in char_starts]
        edges = [bisect_left(tokens, n) for n in range(len(ids) + 1)]
        return [text[start:end] for start, end in pairwise(edges)]

    def _read(self, ids: Sequence[int] | np.ndarray) -> tuple[str, list[int], list[int]]:
        """Text, offset of each character's begin, offset of each token's end."""
        ids = [int(i) for i in ids]
        if self._kind == "other":
            return self._read_by_prefixes(ids)
        parts = [self.token_bytes(i) for i in ids]
        data = b"".join(parts)
        skip = 1 if self._strips_space and data.startswith(b" ") else 0
        # "surrogateescape" gives one character per undecodable byte, so the offsets stay exact
        escaped = data[skip:].decode("utf-8", "surrogateescape")
        sizes = [1 if "\udc80" <= char <= "\udcff" else len(char.encode()) for char in escaped]
        char_starts = list(accumulate(sizes, initial=skip))[:-1]
        return _LONE_BYTE.sub("\ufffd", escaped), char_starts, list(accumulate(map(len, parts)))

    def _read_by_prefixes(self, ids: list[int]) -> tuple[str, list[int], list[int]]:
        """For a decoder that we do not know (WordPiece, Python tokenizers): decode ever longer prefixes."""

        def decode(length: int) -> str:
            return self.tokenizer.decode(ids[:length], skip_special_tokens=True, clean_up_tokenization_spaces=False)

        text = decode(len(ids))
        ends = [len(_common_prefix(decode(n), text)) for n in range(1, len(ids) + 1)]
        return text, list(range(len(text))), list(accumulate(ends, max))


def _common_prefix(first: str, second: str) -> str:
    length = next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    return first[:length]


def _vocabulary_kind(tokenizer: Any) -> tuple[str, bool]:
    """How the vocabulary spells bytes (`"byte-level"`, `"sentencepiece"`, `"plain"`, `"other"`), and whether decoding
    drops the text's first space."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return "other", False
    steps = list(_decoder_steps(json.loads(backend.decoder.__getstate__())))
    types = {step["type"] for step in steps}
    if "ByteLevel" in types:
        return "byte-level", False
    if types <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        spaced = "Metaspace" in types or any(SENTENCEPIECE_SPACE in json.dumps(s, ensure_ascii=False) for s in steps)
        strips = any(
            (step["type"] == "Strip" and step["start"] > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )
        return ("sentencepiece" if spaced or "ByteFallback" in types else "plain"), strips
    return "other", False


def _decoder_steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _decoder_steps(step)
    else:
        yield decoder


def _piece_bytes(piece: str, kind: str) -> bytes:
    if kind == "byte-level" and all(char in _BYTE_OF for char in piece):
        return bytes(_BYTE_OF[char] for char in piece)
    if kind == "sentencepiece":
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace(SENTENCEPIECE_SPACE, " ").encode()
    return piece.encode()


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
        scores = logits.float()
        if first_seen is not None:
            steps = torch.arange(length, device=ids.device)[:, None]
            scores = penalize_repetition(scores, first_seen[:, None, :] <= steps, repetition_penalty)
        scores = scores / temperature
        if suppressed is not None:
            scores = scores.masked_fill(suppressed, -torch.inf)
        logprobs = scores.gather(-1, ids[..., None]).squeeze(-1) - scores.logsumexp(-1)
        if not with_entropy:
            return logprobs, None
        with torch.no_grad():
            return logprobs, torch.special.entr(scores.softmax(-1)).sum(-1)

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
