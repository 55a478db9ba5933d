"""Encodes prompts and images as model inputs: chat template, processor, padding, and a bounded cache."""

from __future__ import annotations

import copy
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence, Sized
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jinja2 import TemplateError
from torch import nn
from transformers import BaseImageProcessor, BatchFeature

from ..types import Pictures, Prompt, Turn, all_pictures, turns_before
from .loading import chat
from .special_text import SpecialText

logger = logging.getLogger(__name__)

Features = dict[str, torch.Tensor]
"""Part of the processor's output for one prompt or image, without padding."""
ImageKey = tuple[tuple[int, ...], int]
"""An image's shape and hash."""
TextKey = tuple[str, tuple[tuple[str, str, bool], ...], tuple[tuple[int, ...], ...]]
"""A prompt, the turns before it, and the shapes of all images, which determine the number of image tokens."""


class Sample(NamedTuple):
    """A prompt and the images of its whole chat, with the keys of their features."""

    prompt: str
    images: tuple[np.ndarray, ...]
    text_key: TextKey
    image_keys: list[ImageKey]

    @classmethod
    def of(cls, prompt: str, image: Pictures) -> Sample:
        images = all_pictures(prompt, image)
        turns = tuple((turn.prompt, turn.response, turn.image is not None) for turn in turns_before(prompt))
        key = str(prompt), turns, tuple(each.shape for each in images)
        return cls(prompt, images, key, [_image_key(each) for each in images])


class PromptEncoder:
    """Turns prompts and images into model inputs, processing each image and text only once while it is cached.

    The cache holds an image's features once, whatever the prompt, and a prompt's tokens once per image size. Two rules
    combine them just as the processor would, for every model family: zero-pad each dimension but the first to the
    largest (LLaVA-NeXT's tiles, Idefics3's sub-images), then concatenate along the first (also how Qwen-VL packs
    patches). Tokens are padded on the left. Thread-safe: while one thread processes, others use what is cached.

    A prompt may be a [`Prompt`], with earlier turns and their images, and a step may have several images: those of all
    samples are concatenated in order.

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

    def encode(self, prompts: Sequence[str], images: Sequence[Pictures], at_least: int = 0) -> dict[str, torch.Tensor]:
        """Encode a left-padded CPU batch of `at_least` that many tokens. Images are uint8, `(height, width, 3)`."""
        texts, image_features = self._features(prompts, images)
        batch = {
            key: pad_and_cat(
                [text[key] for text in texts], self.pad_token_id if key == "input_ids" else 0, True, at_least
            )
            for key in texts[0]
        }
        return batch | {key: pad_and_cat([picture[key] for picture in image_features]) for key in image_features[0]}

    def prepare(self, prompts: Sequence[str], images: Sequence[Pictures]) -> None:
        """Process and cache ahead what a later `encode` will need."""
        if self.cache_bytes:
            self._features(prompts, images)

    def lengths(self, prompts: Sequence[str], images: Sequence[Pictures]) -> list[int]:
        """Number of tokens in each prompt, including image tokens and the turns before it."""
        return [text["input_ids"].shape[1] for text in self._features(prompts, images)[0]]

    def check_history(self, with_images: bool) -> None:
        """Raise a `ValueError` if the model can't be shown earlier turns of a chat, or these with images.

        A short chat is encoded here and by the processor itself, which must agree.
        """
        first, second = (np.full((64, 64, 3), shade, np.uint8) for shade in (60, 190))
        turn = Turn("first question", "first answer", first if with_images else None)
        chatted, images = Prompt("second question", [turn]), [first, second] if with_images else [second]
        remedy = "Use a model that is trained for it, or set history_turns and history_images to 0."
        try:
            text = chat(self.processor, chatted, len(images))
            places = [text.find(words) for words in (turn.prompt, turn.response, str(chatted))]
        except (TemplateError, TypeError) as error:
            raise ValueError(f"The chat template takes no earlier turns: {error}. {remedy}") from error
        if places != sorted(places) or places[0] < 0:
            raise ValueError(f"The chat template leaves out earlier turns. {remedy}")
        if with_images and text == chat(self.processor, Prompt(chatted, [replace(turn, image=None)])):
            raise ValueError(f"The chat template leaves out the images of earlier turns. {remedy}")
        remedy = "Use another model, or show earlier turns without their pictures: history_images=0."
        try:
            own = self.processor(text=[text], images=[images], return_tensors="pt")
            ours = self.encode([chatted], [second])
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            name = type(self.processor).__name__
            raise ValueError(f"{name} doesn't take {len(images)} images in one chat: {error}. {remedy}") from error
        # Some processors put the images of a chat into one row, ours has one each: the order is the same.
        if own.keys() != ours.keys() or not all(torch.equal(own[key].flatten(), ours[key].flatten()) for key in own):
            raise ValueError(
                f"{type(self.processor).__name__} processes an image differently if the chat has several. {remedy}"
            )

    def _features(self, prompts: Sequence[str], images: Sequence[Pictures]) -> tuple[list[Features], list[Features]]:
        """Tokens of each prompt and features of all images, in order, from the cache or newly processed."""
        samples = [Sample.of(prompt, image) for prompt, image in zip(prompts, images, strict=True)]
        keys: list[ImageKey | TextKey] = []
        for each in samples:
            keys += [each.text_key, *each.image_keys]
        with self._cache_lock:
            found = {key: self._cache[key] for key in keys if key in self._cache}
        if any(key not in found for key in keys):
            with self._processing_lock:
                self._process_new(samples, found)
        with self._cache_lock:
            for key in keys:
                self._remember(key, found[key])
        return [found[each.text_key] for each in samples], [found[key] for each in samples for key in each.image_keys]

    def _process_new(self, samples: Sequence[Sample], found: dict[ImageKey | TextKey, Features]) -> None:
        """Add to `found` what it lacks."""
        new: dict[tuple[int, ...], list[tuple[Sample, ImageKey, np.ndarray]]] = {}
        seen = set(found)
        for sample in samples:
            for key, image in zip(sample.image_keys, sample.images, strict=True):
                if key not in seen:
                    new.setdefault(image.shape, []).append((sample, key, image))
                    seen.add(key)
        for group in new.values():
            # an image of a longer chat is processed with a text of its own
            texts = [self._text(each) if len(each.images) == 1 else chat(self.processor, "") for each, _, _ in group]
            processed = self._process(texts, [image for *_, image in group])
            for (sample, key, _), (text, features) in zip(group, processed, strict=True):
                found[key] = features
                if len(sample.images) == 1:
                    found[sample.text_key] = text
        for sample in samples:
            if sample.text_key not in found:  # a new prompt about known images
                found[sample.text_key] = self._process_text(sample)

    def _process(self, texts: list[str], images: list[np.ndarray]) -> list[tuple[Features, Features]]:
        """Process images of one size in one call: each has the same number of tiles or patches, so split evenly."""
        batch = self._processing(texts, [(image,) for image in images])
        tokens = batch["attention_mask"].bool()
        processed: list[tuple[Features, Features]] = [({}, {}) for _ in texts]
        for key, tensor in batch.items():
            # clone, or a view would keep the whole batch in memory after its neighbours are evicted
            for (text, picture), part, kept in zip(processed, tensor.chunk(len(texts)), tokens, strict=True):
                if tensor.shape == tokens.shape:
                    text[key] = part[:, kept]
                else:
                    picture[key] = part.clone()
        return processed

    def _process_text(self, sample: Sample) -> Features:
        batch = self._processing([self._text(sample)], [sample.images], text_only=True)
        return {key: tensor for key, tensor in batch.items() if tensor.shape == batch["attention_mask"].shape}

    def _text(self, sample: Sample) -> str:
        return chat(self.processor, self._plain(sample.prompt), len(sample.images))

    def _plain(self, prompt: str) -> str:
        """The prompt, and the turns before it, with special tokens broken up."""
        broken_up, history = self._special_text.broken_up, turns_before(prompt)
        plain = broken_up(str(prompt))
        if plain != prompt and not self._warned:
            self._warned = True
            logger.warning(
                "A prompt contains the text of a special token. It is broken up (`<image>` becomes `< image>`), here "
                "and in later prompts. The chat template adds the image and everything else the model needs: leave "
                "special tokens out of `task.prompt`."
            )
        if not history:
            return plain
        return Prompt(
            plain,
            [replace(turn, prompt=broken_up(turn.prompt), response=broken_up(turn.response)) for turn in history],
        )

    def _remember(self, key: ImageKey | TextKey, features: Features) -> None:
        if key not in self._cache:
            self._cached_bytes += _size(features)
        self._cache[key] = features
        self._cache.move_to_end(key)
        while self._cached_bytes > self.cache_bytes:
            self._cached_bytes -= _size(self._cache.popitem(last=False)[1])


class SeparableProcessing:
    """A processor that can skip the image where only the text is new.

    A text's image tokens depend only on the sizes of its images. The image processor's output for one text's images of
    these sizes is kept, without the pixels, and replayed for others of the same sizes, so the model family's own code
    places the tokens. A processor without a `BaseImageProcessor`, or one that doesn't call it, processes images again.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._image_processor: Any = getattr(processor, "image_processor", None)
        if isinstance(self._image_processor, BaseImageProcessor):
            # Copies, so that the processor itself is unchanged for other users.
            self._processor = copy.copy(processor)
            self._processor.image_processor = copy.copy(self._image_processor)
            self._processor.image_processor.preprocess = self._preprocess
        self._image_outputs: dict[tuple[tuple[int, ...], ...], dict[str, Any]] = {}
        self._replayed: dict[str, Any] | None = None
        self._image_output: dict[str, Any] | None = None

    def __call__(self, texts: list[str], images: Sequence[Sequence[np.ndarray]], text_only: bool = False) -> Any:
        """Process each text with its images, which have the same sizes for all texts.

        With `text_only` (one text), all of the output but the pixels is valid.
        """
        sizes = tuple(image.shape for image in images[0])
        self._replayed, self._image_output = self._image_outputs.get(sizes) if text_only else None, None
        batch = self._processor(text=texts, images=[list(each) for each in images], padding=True, return_tensors="pt")
        output: dict[str, Any] = self._image_output or {}
        count = len(texts)
        if output and all(isinstance(value, Sized) and len(value) % count == 0 for value in output.values()):
            self._image_outputs[sizes] = {key: _first_without_pixels(value, count) for key, value in output.items()}
        return batch

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        if self._replayed is not None:
            return BatchFeature(dict(self._replayed))
        output = self._image_processor.preprocess(*args, **kwargs)
        self._image_output = dict(output)  # copied, because some processors remove what the model doesn't need
        return output


def _first_without_pixels(value: Any, texts: int) -> Any:
    """The first text's part of an image processor's output, its pixels replaced by an expanded zero."""
    first = value[: len(value) // texts]
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
