"""The corrections of the whole run (DAgger).

What a corrector said once stays a lesson: [`CorrectionBuffer`] keeps it across updates, compactly, and each update
draws uniformly from everything in it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .image_store import ImageStore, check_image


@dataclass(frozen=True)
class CloningSample:
    """One lesson: in front of this image and prompt, this is what should have been written."""

    prompt: str
    image: np.ndarray
    """uint8, (height, width, 3)."""
    target_ids: np.ndarray
    """int64, (tokens,): the corrected response."""
    num_labels: int
    """The first `num_labels` ids are learned: the thought segment, or more where the action is a label too."""
    update: int
    """The update in whose rollout the correction was made."""


class _Stored(NamedTuple):
    prompt: str
    image_key: bytes
    target_ids: np.ndarray
    num_labels: int
    update: int


class CorrectionBuffer:
    """All corrections so far, or a uniform sample of them once there are more than `capacity`.

    A full buffer is a *reservoir* (Vitter's algorithm R): each correction ever added is in it with the same
    probability, so early and late rollouts weigh alike. Prompts and images are kept once each and freed with their
    last sample; images are kept without loss in little space ([`ImageStore`]). The buffer has a random generator of
    its own: nothing else in the program changes what it draws.

    Args:
        capacity: the largest number of samples.
        seed: of the reservoir and of [`sample`].
    """

    def __init__(self, capacity: int, seed: int):
        if capacity < 1:
            raise ValueError(f"A correction buffer holds at least one sample, got capacity={capacity}.")
        self.capacity = capacity
        self.num_added = 0
        """How many corrections were ever offered, kept or not."""
        self._rng = np.random.default_rng(seed)
        self._samples: list[_Stored] = []
        self._images = ImageStore()

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def num_images(self) -> int:
        """How many distinct images are held."""
        return len(self._images)

    @property
    def image_bytes(self) -> int:
        """How many bytes the images take."""
        return self._images.num_bytes

    def add(
        self, prompt: str, image: np.ndarray, target_ids: Sequence[int] | np.ndarray, num_labels: int, update: int = 0
    ) -> None:
        """Offers one correction; a full buffer may drop it or another one for it.

        Args:
            prompt: the step's own prompt.
            image: uint8, (height, width, 3), the step's own observation.
            target_ids: (tokens,), the corrected response; the labels come first.
            num_labels: how many of `target_ids` are labels, at least one.
            update: the current update.
        """
        ids = np.array(target_ids, dtype=np.int32)  # a copy: the caller's array may be a view of a large batch
        if ids.ndim != 1 or not 1 <= num_labels <= ids.size:
            raise ValueError(
                f"A correction is one row of ids of which at least one and at most all are labels, got {num_labels} "
                f"labels for ids of shape {ids.shape}. Don't add a correction that teaches nothing."
            )
        check_image(image)
        self.num_added += 1
        slot = len(self)
        if slot == self.capacity:
            slot = int(self._rng.integers(self.num_added))
            if slot >= self.capacity:
                return
        # An interned string exists once, and only as long as somebody holds it.
        stored = _Stored(sys.intern(str(prompt)), self._images.hold(image), ids, num_labels, update)
        if slot == len(self):
            self._samples.append(stored)
        else:
            dropped, self._samples[slot] = self._samples[slot], stored
            self._images.release(dropped.image_key)

    def sample(self, n: int) -> list[CloningSample]:
        """`n` samples, uniformly and *with* replacement, so that a small buffer can fill a large batch."""
        if not self._samples:
            raise ValueError("The correction buffer is empty: check its length before you sample.")
        return [self._decode(self._samples[i]) for i in self._rng.integers(len(self), size=n)]

    def samples(self) -> Iterator[CloningSample]:
        """Everything in the buffer, each sample once."""
        return map(self._decode, self._samples)

    def _decode(self, stored: _Stored) -> CloningSample:
        return CloningSample(
            prompt=stored.prompt,
            image=self._images.image(stored.image_key),
            target_ids=stored.target_ids.astype(np.int64),
            num_labels=stored.num_labels,
            update=stored.update,
        )

    def state_dict(self) -> dict[str, np.ndarray]:
        """Everything as flat numeric arrays.

        `np.savez` stores them without pickle; as tensors they pass `torch.load(weights_only=True)`.
        """
        prompts = {prompt: i for i, prompt in enumerate(dict.fromkeys(sample.prompt for sample in self._samples))}
        images = {key: i for i, key in enumerate(self._images)}
        blocks = self._images.blocks
        return {
            "capacity": np.array(self.capacity),
            "num_added": np.array(self.num_added),
            "rng": np.frombuffer(json.dumps(self._rng.bit_generator.state).encode(), np.uint8).copy(),
            **_pack("prompts", (prompt.encode("utf-8", "surrogatepass") for prompt in prompts)),
            **_pack("images", images),
            **_pack("block_digests", blocks),
            **_pack("blocks", blocks.values()),
            **_pack("target_ids", (sample.target_ids.astype("<i4").tobytes() for sample in self._samples)),
            "prompt_index": np.array([prompts[sample.prompt] for sample in self._samples], np.int64),
            "image_index": np.array([images[sample.image_key] for sample in self._samples], np.int64),
            "num_labels": np.array([sample.num_labels for sample in self._samples], np.int64),
            "update": np.array([sample.update for sample in self._samples], np.int64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a [`state_dict`] (arrays or CPU tensors), after which the same samples follow as would have."""
        arrays = {name: np.asarray(value) for name, value in state.items()}
        if int(arrays["capacity"]) != self.capacity:
            raise ValueError(
                f"The saved correction buffer has capacity {int(arrays['capacity'])}, this one {self.capacity}: a "
                "reservoir can't change its size. Resume with the same `correction_buffer_size`."
            )
        prompts = [sys.intern(blob.decode("utf-8", "surrogatepass")) for blob in _unpack("prompts", arrays)]
        images = _unpack("images", arrays)
        blocks = dict(zip(_unpack("block_digests", arrays), _unpack("blocks", arrays), strict=True))
        target_ids = [np.frombuffer(blob, "<i4").astype(np.int32) for blob in _unpack("target_ids", arrays)]
        self._samples = [
            _Stored(prompts[p], images[i], ids, int(labels), int(update))
            for p, i, ids, labels, update in zip(
                arrays["prompt_index"],
                arrays["image_index"],
                target_ids,
                arrays["num_labels"],
                arrays["update"],
                strict=True,
            )
        ]
        self._images = ImageStore.restore(Counter(sample.image_key for sample in self._samples), blocks)
        self.num_added = int(arrays["num_added"])
        self._rng.bit_generator.state = json.loads(arrays["rng"].tobytes())


def _pack(name: str, blobs: Iterable[bytes]) -> dict[str, np.ndarray]:
    parts = list(blobs)
    return {
        name: np.frombuffer(b"".join(parts), np.uint8).copy(),
        f"{name}_lengths": np.array([len(part) for part in parts], np.int64),
    }


def _unpack(name: str, arrays: Mapping[str, np.ndarray]) -> list[bytes]:
    joined, lengths = arrays[name].tobytes(), arrays[f"{name}_lengths"]
    return [joined[end - length : end] for length, end in zip(lengths, np.cumsum(lengths), strict=True)]
