"""Prompts and images → the model's inputs: chat template, processor, padding, and a bounded cache."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from .models import chat


class PromptEncoder:
    """(prompt, image) → what the model takes, each pair processed once as long as the cache holds it.

    Pixels are kept per sample and put together by two rules that reproduce the processor's own batches for every
    family: fill each dimension but the first with zeros to the largest (LLaVA-NeXT's tiles, Idefics3's sub-images),
    then concatenate along the first (which also is Qwen-VL's way to pack patches). Tokens are padded on the left.
    """

    def __init__(self, processor: Any, pad_token_id: int, cache_bytes: int):
        self.processor = processor
        self.pad_token_id = pad_token_id
        self.cache_bytes = cache_bytes
        self._cache: OrderedDict[tuple[str, bytes], dict[str, torch.Tensor]] = OrderedDict()
        self._cached_bytes = 0

    def encode(self, prompts: Sequence[str], images: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """A left-padded batch on the CPU. Images are uint8, `(height, width, 3)`."""
        return self.collate([self._sample(p, i) for p, i in zip(prompts, images, strict=True)])

    def collate(self, samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = {}
        for key, first in samples[0].items():
            tensors = [sample[key] for sample in samples]
            if first.shape == samples[0]["input_ids"].shape:
                padding = self.pad_token_id if key == "input_ids" else 0
                batch[key] = pad_and_cat(tensors, padding, left=True)
            else:
                batch[key] = pad_and_cat(tensors, 0)
        return batch

    def _sample(self, prompt: str, image: np.ndarray) -> dict[str, torch.Tensor]:
        key = (prompt, hashlib.blake2b(repr(image.shape).encode() + image.tobytes(), digest_size=16).digest())
        sample = self._cache.pop(key, None)
        if sample is None:
            sample = dict(
                self.processor(
                    text=[chat(self.processor, prompt)], images=[[Image.fromarray(image)]], return_tensors="pt"
                )
            )
            self._cached_bytes += _size(sample)
        self._cache[key] = sample  # now the most recently used
        while self._cached_bytes > self.cache_bytes:
            self._cached_bytes -= _size(self._cache.popitem(last=False)[1])
        return sample


def _size(sample: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in sample.values())


def pad_and_cat(tensors: Sequence[torch.Tensor], value: float, left: bool = False) -> torch.Tensor:
    """Fill every dimension but the first up to the largest, then concatenate along the first."""
    largest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        fill = []  # torch wants the last dimension first
        for size, target in zip(reversed(tensor.shape[1:]), reversed(largest), strict=True):
            fill += [target - size, 0] if left else [0, target - size]
        padded.append(nn.functional.pad(tensor, fill, value=value) if any(fill) else tensor)
    return torch.cat(padded)
