"""Tokenizers of the kinds that vision-language models come with."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast


def package_data(package: str, *path: str) -> Path:
    """A data file of an installed package; the package itself isn't imported."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed: no real vocabulary (pip install --no-deps {package})")
    return Path(spec.origin).parent.joinpath(*path)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """SentencePiece BPE with byte fallback, in the form that Llama's and Mistral's tokenizers are shipped in."""
    pieces = [
        "▁",
        "▁{",
        '▁"',
        '",',
        '":',
        "action",
        "th",
        "ought",
        "s",
        "▁the",
        "▁sum",
        '"}',
        "é",
        "日",
        ', "act',
        'e"',
    ]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *'abcdefghijklmnop{}:, "']
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def mistral(directory: Path) -> LlamaTokenizer:
    """The real Mistral-7B vocabulary, the one of LLaVA-1.6-Mistral."""
    shutil.copy(package_data("mistral_common", "data", "tokenizer.model.v1"), directory / "tokenizer.model")
    return LlamaTokenizer.from_pretrained(directory)
