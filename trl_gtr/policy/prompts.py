"""Prompts and images → the model's inputs: chat template, processor, padding, and a bounded cache."""

from __future__ import annotations

import copy
import logging
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
"""A part of the processor's output for one prompt and image, without padding."""
PictureKey = tuple[tuple[int, ...], int]
"""An image's shape and hash."""
TextKey = tuple[str, tuple[int, ...]]
"""A prompt and its image's shape, which decides how many image tokens stand in it."""


class PromptEncoder:
    """(prompt, image) → what the model takes, each image and each text processed once as long as the cache holds it.

    The cache keeps an image's features once, whatever is asked about it, and a prompt's tokens once for each size of
    image. Two rules put them together again just as the processor itself would have, for every family: fill each
    dimension but the first with zeros up to the largest (LLaVA-NeXT's tiles, Idefics3's sub-images), then concatenate
    along the first (which also is how Qwen-VL packs patches). Tokens are padded on the left.

    Args:
        processor: the model's.
        pad_token_id: what fills `input_ids`.
        cache_bytes: memory for images and texts; the least recently used go first.
    """

    def __init__(self, processor: Any, pad_token_id: int, cache_bytes: int):
        self.processor = processor
        self._processing = SeparableProcessing(processor)
        self.pad_token_id = pad_token_id
        self.cache_bytes = cache_bytes
        self._cache: OrderedDict[PictureKey | TextKey, Features] = OrderedDict()
        self._cached_bytes = 0
        self._special_text = SpecialText(processor)
        self._warned = False

    def encode(
        self, prompts: Sequence[str], images: Sequence[np.ndarray], at_least: int = 0
    ) -> dict[str, torch.Tensor]:
        """A left-padded batch of `at_least` so many tokens, on the CPU. Images are uint8, `(height, width, 3)`."""
        texts, pictures = self._features(prompts, images)
        batch = {
            key: pad_and_cat(
                [text[key] for text in texts], self.pad_token_id if key == "input_ids" else 0, True, at_least
            )
            for key in texts[0]
        }
        return batch | {key: pad_and_cat([picture[key] for picture in pictures]) for key in pictures[0]}

    def lengths(self, prompts: Sequence[str], images: Sequence[np.ndarray]) -> list[int]:
        """How many tokens each prompt has, those of its image included."""
        return [text["input_ids"].shape[1] for text in self._features(prompts, images)[0]]

    def _features(self, prompts: Sequence[str], images: Sequence[np.ndarray]) -> tuple[list[Features], list[Features]]:
        """Tokens and image features of each pair, out of the cache or processed now."""
        pairs = [((prompt, image.shape), _picture(image)) for prompt, image in zip(prompts, images, strict=True)]
        found = {key: self._cache[key] for pair in pairs for key in pair if key in self._cache}
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
        for pair in pairs:
            for key in pair:
                self._remember(key, found[key])
        return [found[text] for text, _ in pairs], [found[picture] for _, picture in pairs]

    def _process(self, prompts: list[str], images: list[np.ndarray]) -> list[tuple[Features, Features]]:
        """Images of one size take the same number of tiles or patches each: one call, cut into equal parts."""
        batch = self._processing(self._texts(prompts), images)
        tokens = batch["attention_mask"].bool()
        processed: list[tuple[Features, Features]] = [({}, {}) for _ in prompts]
        for key, tensor in batch.items():
            # clones: a view would keep the whole batch in memory after its neighbours have left the cache
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

    def _remember(self, key: PictureKey | TextKey, features: Features) -> None:
        if key not in self._cache:
            self._cached_bytes += _size(features)
        self._cache[key] = features
        self._cache.move_to_end(key)
        while self._cached_bytes > self.cache_bytes:
            self._cached_bytes -= _size(self._cache.popitem(last=False)[1])


class SeparableProcessing:
    """A processor that can leave the image out of it, where only the text is new.

    A text's image tokens depend on its image's size alone. What the image processor says about one image of each size
    is kept, without the pixels, and said again when a text about another such image comes. So the family's own code
    places the tokens, whatever its rules are. A processor without a `BaseImageProcessor`, or one that doesn't ask it,
    processes the image again.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._image_processor: Any = getattr(processor, "image_processor", None)
        if isinstance(self._image_processor, BaseImageProcessor):
            # Copies: the processor itself stays as it is, for everybody else who uses it.
            self._processor = copy.copy(processor)
            self._processor.image_processor = copy.copy(self._image_processor)
            self._processor.image_processor.preprocess = self._answer
        self._known: dict[tuple[int, ...], dict[str, Any]] = {}
        self._replayed: dict[str, Any] | None = None
        self._heard: dict[str, Any] | None = None

    def __call__(self, texts: list[str], images: list[np.ndarray], text_only: bool = False) -> Any:
        """The processor's output for images of one size; with `text_only` (one text), all but the pixels is right."""
        size = images[0].shape
        self._replayed, self._heard = self._known.get(size) if text_only else None, None
        batch = self._processor(text=texts, images=[[image] for image in images], padding=True, return_tensors="pt")
        heard: dict[str, Any] = self._heard or {}
        count = len(images)
        if heard and all(isinstance(value, Sized) and len(value) % count == 0 for value in heard.values()):
            self._known[size] = {key: _first_without_pixels(value, count) for key, value in heard.items()}
        return batch

    def _answer(self, *args: Any, **kwargs: Any) -> Any:
        if self._replayed is not None:
            return BatchFeature(dict(self._replayed))
        output = self._image_processor.preprocess(*args, **kwargs)
        self._heard = dict(output)  # some processors take out what the model has no use for
        return output


def _first_without_pixels(value: Any, images: int) -> Any:
    """The first image's part of what an image processor says about several of one size; its pixels are one zero."""
    first = value[: len(value) // images]
    if isinstance(first, torch.Tensor) and first.is_floating_point():
        return first.new_zeros(()).expand(first.shape)
    return copy.deepcopy(first)  # a view would keep the whole batch in memory


def _picture(image: np.ndarray) -> PictureKey:
    # Python's own 64-bit hash of bytes: twenty times faster than a cryptographic one, and among a million images the
    # chance that any two are taken for one is 1 in 30 million
    return image.shape, hash(image.tobytes())


def _size(features: Features) -> int:
    return sum(tensor.nbytes for tensor in features.values())


def pad_and_cat(
    tensors: Sequence[torch.Tensor], value: float = 0, left: bool = False, at_least: int = 0
) -> torch.Tensor:
    """Fill every dimension but the first up to the largest, then concatenate along the first.

    The last dimension gets `at_least` so many places.
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
