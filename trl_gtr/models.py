"""Hugging Face vision-language models: loading, what they need to be an agent, and which of their ids and layers
matter here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def unwrap_adapter(model: Any) -> Any:
    """The Hugging Face model inside a peft model (adapters stay in place and active); any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """What ends a response: the tokenizer's EOS, and all that the checkpoint's generation_config names."""
    config = getattr(unwrap_adapter(model), "generation_config", None)
    named = getattr(config, "eos_token_id", None)
    named = [] if named is None else [named] if isinstance(named, int) else list(named)
    ids = list(dict.fromkeys(i for i in [tokenizer.eos_token_id, *named] if i is not None))
    if not ids:
        raise ValueError(
            "Neither the tokenizer nor the model's generation_config has an EOS token, so a response could never end. "
            "Set tokenizer.eos_token."
        )
    return ids


def pad_token_id(model: Any, tokenizer: Any, eos_ids: Sequence[int]) -> int:
    """The tokenizer's padding, else the generation_config's, else EOS (attention masks tell them apart)."""
    config = getattr(unwrap_adapter(model), "generation_config", None)
    candidates = (tokenizer.pad_token_id, getattr(config, "pad_token_id", None), eos_ids[0])
    return next(candidate for candidate in candidates if candidate is not None)


def suppressed_tokens(model: Any, processor: Any, eos_ids: Sequence[int]) -> torch.Tensor:
    """`(V,)`, bool: ids that must never be sampled.

    Special tokens other than EOS, image and video placeholders (a sampled `<image>` would break the next forward
    pass), and ids for which the tokenizer has no token (vocabularies are padded to round sizes).
    """
    config = unwrap_adapter(model).config
    tokenizer = processor.tokenizer
    suppressed = torch.ones(config.get_text_config().vocab_size, dtype=torch.bool)
    known = torch.tensor(sorted(tokenizer.get_vocab().values()))
    suppressed[known[known < len(suppressed)]] = False
    special = {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}
    for owner in (config, processor):
        for name in ("image_token_id", "image_token_index", "video_token_id", "video_token_index"):
            if isinstance(placeholder := getattr(owner, name, None), int):
                special.add(placeholder)
    suppressed[[i for i in special if i < len(suppressed)]] = True
    suppressed[list(eos_ids)] = False
    return suppressed
