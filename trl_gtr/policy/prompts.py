"""Encodes prompts and images as model inputs: chat template, processor, padding, and a bounded cache."""

from __future__ import annotations

import copy
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import BaseImageProcessor, BatchFeature

from .loading import chat
from .special_text import SpecialText

logger = logging.getLogger(__name__)

Features = dict[str, torch.Tensor]
"""Part of the processor's output for one prompt and image, without padding."""
ImageKey = tuple[tuple[int, ...], int]
"""An image's shape and hash."""
TextKey = tuple[str, tuple[int, ...]]
"""A prompt and its image's shape, which determines the number of image tokens."""


class PromptEncoder:
    """Turns prompts and images into model inputs, processing each image and text only once while it is cached.

    The cache holds an image's features once, whatever the prompt, and a prompt's tokens once per image size. Two rules
    combine them just as the processor would, for every model family: zero-pad each dimension but the first to the
    largest (LLaVA-NeXT's tiles, Idefics3's sub-images), then concatenate along the first (also how Qwen-VL packs
    patches). Tokens are padded on the left. Thread-safe: while one thread processes, others use what is cached.

    Args:
        processor: the model's processor.
        pad_token_id: padding for `input_ids`.
        cache_bytes: memory for images and texts; the least recently used are evicted first.
    """

    def __init__(self, processor: Any, pad_token_id: int, cache_bytes: int):
        self.processor = processor
        self._processing = SeparableProcessing(processor)
        self.pad_token_id = pad_token_id
        self.cache_bytes = cache_bytes
        self._cache: OrderedDict[ImageKey | TextKey, Features] = OrderedDict()
        self._cached_bytes = 0
        self._cache_lock, self._processing_lock = threading.Lock(), threading.Lock()
        self._special_text = SpecialText(processor)
        self._warned = False

    def encode(
        self, prompts: Sequence[str], images: Sequence[np.ndarray], at_least: int = 0
    ) -> dict[str, torch.Tensor]:
        """Encode a left-padded CPU batch of `at_least` that many tokens. Images are uint8, `(height, width, 3)`."""
        texts, image_features = self._features(prompts, images)
        batch = {
            key: pad_and_cat(
                [text[key] for text in texts], self.pad_token_id if key == "input_ids" else 0, True, at_least
            )
            for key in texts[0]
        }
        return batch | {key: pad_and_cat([picture[key] for picture in image_features]) for key in image_features[0]}

    def prepare(self, prompts: Sequence[str], images: Sequence[np.ndarray]) -> None:
        """Process and cache ahead what a later `encode` will need."""
        if self.cache_bytes:
            self._features(prompts, images)

    def lengths(self, prompts: Sequence[str], images: Sequence[np.ndarray]) -> list[int]:
        """Number of tokens in each prompt, including its image tokens."""
        return [text["input_ids"].shape[1] for text in self._features(prompts, images)[0]]

    def _features(self, prompts: Sequence[str], images: Sequence[np.ndarray]) -> tuple[list[Features], list[Features]]:
        """Tokens and image features of each pair, from the cache or newly processed."""
        pairs = [((prompt, image.shape), _image_key(image)) for prompt, image in zip(prompts, images, strict=True)]
        with self._cache_lock:
            found = {key: self._cache[key] for pair in pairs for key in pair if key in self._cache}
        if any(key not in found for pair in pairs for key in pair):
            with self._processing_lock:
                self._process_new(pairs, prompts, images, found)
        with self._cache_lock:
            for pair in pairs:
                for key in pair:
                    self._remember(key, found[key])
        return [found[text] for text, _ in pairs], [found[picture] for _, picture in pairs]

    def _process_new(
        self,
        pairs: Sequence[tuple[TextKey, ImageKey]],
        prompts: Sequence[str],
        images: Sequence[np.ndarray],
        found: dict[ImageKey | TextKey, Features],
    ) -> None:
        """Add to `found` what it lacks."""
        new: dict[tuple[int, ...], list[int]] = {}
        seen = set(found)
        for i, (_, picture) in enumerate(pairs):
            if picture not in seen:
                new.setdefault(images[i].shape, []).append(i)
                seen.add(picture)
        for group in new.values():
            processed = self._process([prompts[i] for i in group], [images[i] for i in group])
            for i, features in zip(group, processed, strict=True):
                found.update(zip(pairs[i], features, strict=True))
        for i, (text, _) in enumerate(pairs):
            if text not in found:  # a new prompt about a known image
                found[text] = self._process_text(prompts[i], images[i])

    def _process(self, prompts: list[str], images: list[np.ndarray]) -> list[tuple[Features, Features]]:
        """Process images of one size in one call: each has the same number of tiles or patches, so split evenly."""
        batch = self._processing(self._texts(prompts), images)
        tokens = batch["attention_mask"].bool()
        processed: list[tuple[Features, Features]] = [({}, {}) for _ in prompts]
        for key, tensor in batch.items():
            # clone, or a view would keep the whole batch in memory after its neighbours are evicted
            for (text, picture), part, kept in zip(processed, tensor.chunk(len(prompts)), tokens, strict=True):
                if tensor.shape == tokens.shape:
                    text[key] = part[:, kept]
                else:
                    picture[key] = part.clone()
        return processed

    def _process_text(self, prompt: str, image: np.ndarray) -> Features:
        batch = self._processing(self._texts([prompt]), [image], text_only=True)
        return {key: tensor for key, tensor in batch.items() if tensor.shape == batch["attention_mask"].shape}

    def _texts(self, prompts: Sequence[str]) -> list[str]:
        return [chat(self.processor, self._plain(prompt)) for prompt in prompts]

    def _plain(self, prompt: str) -> str:
        """The prompt with special tokens broken up."""
        plain = self._special_text.broken_up(prompt)
        if plain != prompt and not self._warned:
            self._warned = True
            logger.warning(
                "A prompt contains the text of a special token. It is broken up (`<image>` becomes `< image>`), here "
                "and in later prompts. The chat template adds the image and everything else the model needs: leave "
                "special tokens out of `task.prompt`."
            )
        return plain

    def _remember(self, key: ImageKey | TextKey, features: Features) -> None:
        if key not in self._cache:
            self._cached_bytes += _size(features)
        self._cache[key] = features
        self._cache.move_to_end(key)
        while self._cached_bytes > self.cache_bytes:
            self._cached_bytes -= _size(self._cache.popitem(last=False)[1])


class SeparableProcessing:
    """A processor that can skip the image where only the text is new.

    A text's image tokens depend only on the image's size. The image processor's output for one image of each size is
    kept, without the pixels, and replayed for other images of that size, so the model family's own code places the
    tokens. A processor without a `BaseImageProcessor`, or one that doesn't call it, processes the image again.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._image_processor: Any = getattr(processor, "image_processor", None)
        if isinstance(self._image_processor, BaseImageProcessor):
            # Copies, so that the processor itself is unchanged for other users.
            self._processor = copy.copy(processor)
            self._processor.image_processor = copy.copy(self._image_processor)
            self._processor.image_processor.preprocess = self._preprocess
        self._image_outputs: dict[tuple[int, ...], dict[str, Any]] = {}
        self._replayed: dict[str, Any] | None = None
        self._image_output: dict[str, Any] | None = None

    def __call__(self, texts: list[str], images: list[np.ndarray], text_only: bool = False) -> Any:
        """Process images of one size; with `text_only` (one text), all of the output but the pixels is valid."""
        size = images[0].shape
        self._replayed, self._image_output = self._image_outputs.get(size) if text_only else None, None
        batch = self._processor(text=texts, images=[[image] for image in images], padding=True, return_tensors="pt")
        output: dict[str, Any] = self._image_output or {}
        count = len(images)
        if output and all(isinstance(value, Sized) and len(value) % count == 0 for value in output.values()):
            self._image_outputs[size] = {key: _first_without_pixels(value, count) for key, value in output.items()}
        return batch

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        if self._replayed is not None:
            return BatchFeature(dict(self._replayed))
        output = self._image_processor.preprocess(*args, **kwargs)
        self._image_output = dict(output)  # copied, because some processors remove what the model doesn't need
        return output


def _first_without_pixels(value: Any, images: int) -> Any:
    """The first image's part of an image processor's output, its pixels replaced by an expanded zero."""
    first = value[: len(value) // images]
    if isinstance(first, torch.Tensor) and first.is_floating_point():
        return first.new_zeros(()).expand(first.shape)
    return copy.deepcopy(first)  # a view would keep the whole batch in memory


def _image_key(image: np.ndarray) -> ImageKey:
    # Python's 64-bit hash of bytes is twenty times faster than a cryptographic one; the chance of any collision among
    # a million images is 1 in 30 million
    return image.shape, hash(image.tobytes())


def _size(features: Features) -> int:
    return sum(tensor.nbytes for tensor in features.values())


def pad_and_cat(
    tensors: Sequence[torch.Tensor], value: float = 0, left: bool = False, at_least: int = 0
) -> torch.Tensor:
    """Pad every dimension but the first to the largest, then concatenate along the first.

    The last dimension is padded to `at_least` that size.
    """
    largest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    largest[-1:] = [max(size, at_least) for size in largest[-1:]]
    padded = []
    for tensor in tensors:
        fill = []  # torch wants the last dimension first
        for size, target in zip(reversed(tensor.shape[1:]), reversed(largest), strict=True):
            fill += [target - size, 0] if left else [0, target - size]
        padded.append(nn.functional.pad(tensor, fill, value=value) if any(fill) else tensor)
    return torch.cat(padded)
