"""From characters to tokens.

[`SpanFinder`] turns sampled ids into text and finds the token in which a character begins. It works on the bytes of
the vocabulary, so it is exact for any tokenizer, for broken multi-byte characters and for truncated text.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

SENTENCEPIECE_SPACE = "\u2581"


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
