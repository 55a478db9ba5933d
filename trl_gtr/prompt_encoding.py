"""Prompts and images → the model's inputs: chat template, processor, padding, and a bounded cache."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from .models import chat
from .special_text import SpecialText

logger = logging.getLogger(__name__)

Sample = dict[str, torch.Tensor]
"""The processor's output for one prompt and image, without padding."""
Key = tuple[str, tuple[int, ...], int]
"""Prompt, and the image's shape and hash."""


class PromptEncoder:
    """(prompt, image) → what the model takes, each pair processed once as long as the cache holds it.

    The cache keeps single samples. Two rules put them together again just as the processor itself would have, for
    every family: fill each dimension but the first with zeros up to the largest (LLaVA-NeXT's tiles, Idefics3's
    sub-images), then concatenate along the first (which also is how Qwen-VL packs patches). Tokens are padded on the
    left.

    Args:
        processor: the model's.
        pad_token_id: what fills `input_ids`.
        cache_bytes: memory for processed samples; the least recently used go first.
    """

    def __init__(self, processor: Any, pad_token_id: int, cache_bytes: int):
        self.processor = processor
        self.pad_token_id = pad_token_id
        self.cache_bytes = cache_bytes
        self._cache: OrderedDict[Key, Sample] = OrderedDict()
        self._cached_bytes = 0
        self._special_text = SpecialText(processor)
        self._warned = False

    def encode(self, prompts: Sequence[str], images: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """A left-padded batch on the CPU. Images are uint8, `(height, width, 3)`."""
        keys = [_key(prompt, image) for prompt, image in zip(prompts, images, strict=True)]
        samples = {key: self._cache[key] for key in keys if key in self._cache}
        new: dict[tuple[int, ...], dict[Key, np.ndarray]] = {}
        for key, image in zip(keys, images, strict=True):
            if key not in samples:
                new.setdefault(image.shape, {})[key] = image
        for group in new.values():
            prompts_of_group = [prompt for prompt, *_ in group]
            samples.update(zip(group, self._process(prompts_of_group, list(group.values())), strict=True))
        for key, sample in samples.items():
            self._remember(key, sample)
        return self.collate([samples[key] for key in keys])

    def collate(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        batch = {}
        for key, first in samples[0].items():
            tensors = [sample[key] for sample in samples]
            if first.shape == samples[0]["input_ids"].shape:
                batch[key] = pad_and_cat(tensors, self.pad_token_id if key == "input_ids" else 0, left=True)
            else:
                batch[key] = pad_and_cat(tensors)
        return batch

    def _process(self, prompts: list[str], images: list[np.ndarray]) -> list[Sample]:
        """Images of one size take the same number of tiles or patches each: one call, cut into equal parts."""
        batch = self.processor(
            text=[chat(self.processor, self._plain(prompt)) for prompt in prompts],
            images=[[image] for image in images],
            padding=True,
            return_tensors="pt",
        )
        tokens = batch["attention_mask"].bool()
        samples: list[Sample] = [{} for _ in prompts]
        for key, tensor in batch.items():
            # clones: a view would keep the whole batch in memory after its neighbours have left the cache
            for sample, part, kept in zip(samples, tensor.chunk(len(prompts)), tokens, strict=True):
                sample[key] = part[:, kept] if tensor.shape == tokens.shape else part.clone()
        return samples

    def _plain(self, prompt: str) -> str:
        """The prompt without what would become a special token."""
        plain = self._special_text.broken_up(prompt)
        if plain != prompt and not self._warned:
            self._warned = True
            logger.warning(
                "A prompt spells a special token of the model. It is shown to it broken up (`<image>` as `< image>`), "
                "here and in later prompts. The chat template adds the image and all else that the model needs: leave "
                "special tokens out of `task.prompt`."
            )
        return plain

    def _remember(self, key: Key, sample: Sample) -> None:
        if key not in self._cache:
            self._cached_bytes += _size(sample)
        self._cache[key] = sample
        self._cache.move_to_end(key)
        while self._cached_bytes > self.cache_bytes:
            self._cached_bytes -= _size(self._cache.popitem(last=False)[1])


def _key(prompt: str, image: np.ndarray) -> Key:
    # Python's own 64-bit hash of bytes: twenty times faster than a cryptographic one, and among a million images the
    # chance that any two are taken for one is 1 in 30 million
    return prompt, image.shape, hash(image.tobytes())


def _size(sample: Sample) -> int:
    return sum(tensor.nbytes for tensor in sample.values())


def pad_and_cat(tensors: Sequence[torch.Tensor], value: float = 0, left: bool = False) -> torch.Tensor:
    """Fill every dimension but the first up to the largest, then concatenate along the first."""
    largest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        fill = []  # torch wants the last dimension first
        for size, target in zip(reversed(tensor.shape[1:]), reversed(largest), strict=True):
            fill += [target - size, 0] if left else [0, target - size]
        padded.append(nn.functional.pad(tensor, fill, value=value) if any(fill) else tensor)
    return torch.cat(padded)
