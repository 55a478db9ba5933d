"""All corrections of a run (DAgger).

[`CorrectionBuffer`] keeps corrections across updates, compactly, and each update samples uniformly from all of them.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..types import Prompt, Turn, turns_before
from .image_store import ImageStore, check_image


@dataclass(frozen=True)
class CloningSample:
    """One training sample: an image, a prompt, and the response that should have been written."""

    prompt: str
    """A [`Prompt`] if the agent also saw earlier turns."""
    image: np.ndarray
    """uint8, (height, width, 3)."""
    target_ids: np.ndarray
    """int64, (tokens,): the corrected response."""
    num_labels: int
    """The first `num_labels` ids are learned: the thought segment, or more if the action is a label too."""
    update: int
    """The update whose rollout was corrected."""


class _StoredTurn(NamedTuple):
    prompt: str
    response: str
    image_key: bytes | None


class _Stored(NamedTuple):
    prompt: str
    image_key: bytes
    target_ids: np.ndarray
    num_labels: int
    update: int
    turns: tuple[_StoredTurn, ...] = ()

    @property
    def texts(self) -> list[str]:
        return [self.prompt, *(text for turn in self.turns for text in (turn.prompt, turn.response))]

    @property
    def image_keys(self) -> list[bytes]:
        return [self.image_key, *(turn.image_key for turn in self.turns if turn.image_key is not None)]


class CorrectionBuffer:
    """All corrections so far, or a uniform sample of them once there are more than `capacity`.

    A full buffer is a *reservoir* (Vitter's algorithm R): each correction ever added is in it with the same
    probability, so early and late rollouts have equal weight. Texts and images, also those of earlier turns, are
    deduplicated and freed with their last sample; images are compressed losslessly ([`ImageStore`]). The buffer has
    its own random generator, so nothing else in the program affects its samples.

    Args:
        capacity: Maximum number of samples.
        seed: For the reservoir and for [`sample`].
    """

    def __init__(self, capacity: int, seed: int):
        if capacity < 1:
            raise ValueError(f"A correction buffer must hold at least one sample, got capacity={capacity}.")
        self.capacity = capacity
        self.num_added = 0
        """Number of corrections ever added, whether kept or not."""
        self._rng = np.random.default_rng(seed)
        self._samples: list[_Stored] = []
        self._images = ImageStore()

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def num_images(self) -> int:
        """Number of distinct images."""
        return len(self._images)

    @property
    def image_bytes(self) -> int:
        """Size of the stored images in bytes."""
        return self._images.num_bytes

    def add(
        self, prompt: str, image: np.ndarray, target_ids: Sequence[int] | np.ndarray, num_labels: int, update: int = 0
    ) -> None:
        """Add one correction. A full buffer may drop it, or drop another to make room.

        Args:
            prompt: The step's prompt, with the turns before it.
            image: uint8, (height, width, 3), the step's observation.
            target_ids: (tokens,), the corrected response; the labels come first.
            num_labels: How many of `target_ids` are labels, at least one.
            update: The current update.
        """
        ids = np.array(target_ids, dtype=np.int32)  # a copy: the caller's array may be a view of a large batch
        if ids.ndim != 1 or not 1 <= num_labels <= ids.size:
            raise ValueError(
                f"A correction must be one row of ids, at least one of them a label, got {num_labels} labels "
                f"for ids of shape {ids.shape}. Don't add a correction without labels."
            )
        check_image(image)
        self.num_added += 1
        slot = len(self)
        if slot == self.capacity:
            slot = int(self._rng.integers(self.num_added))
            if slot >= self.capacity:
                return
        turns = tuple(map(self._stored_turn, turns_before(prompt)))
        # Interning stores each text once, for as long as it is referenced.
        stored = _Stored(sys.intern(str(prompt)), self._images.hold(image), ids, num_labels, update, turns)
        if slot == len(self):
            self._samples.append(stored)
        else:
            dropped, self._samples[slot] = self._samples[slot], stored
            for key in dropped.image_keys:
                self._images.release(key)

    def _stored_turn(self, turn: Turn) -> _StoredTurn:
        key = None if turn.image is None else self._images.hold(turn.image)
        return _StoredTurn(sys.intern(turn.prompt), sys.intern(turn.response), key)

    def sample(self, n: int) -> list[CloningSample]:
        """Draw `n` samples uniformly *with* replacement, so that a small buffer can fill a large batch."""
        if not self._samples:
            raise ValueError("The correction buffer is empty: check its length before sampling.")
        return [self._decode(self._samples[i]) for i in self._rng.integers(len(self), size=n)]

    def samples(self) -> Iterator[CloningSample]:
        """Everything in the buffer, each sample once."""
        return map(self._decode, self._samples)

    def _decode(self, stored: _Stored) -> CloningSample:
        turns = [
            Turn(prompt, response, None if key is None else self._images.image(key))
            for prompt, response, key in stored.turns
        ]
        return CloningSample(
            prompt=Prompt(stored.prompt, turns) if turns else stored.prompt,
            image=self._images.image(stored.image_key),
            target_ids=stored.target_ids.astype(np.int64),
            num_labels=stored.num_labels,
            update=stored.update,
        )

    def state_dict(self) -> dict[str, np.ndarray]:
        """Everything as flat numeric arrays.

        `np.savez` stores them without pickle; as tensors they pass `torch.load(weights_only=True)`.
        """
        texts = dict.fromkeys(text for sample in self._samples for text in sample.texts)
        prompts = {text: i for i, text in enumerate(texts)}
        images = {key: i for i, key in enumerate(self._images)}
        blocks = self._images.blocks
        turns = [turn for sample in self._samples for turn in sample.turns]
        earlier = {
            "num_turns": np.array([len(sample.turns) for sample in self._samples], np.int64),
            "turn_prompt_index": np.array([prompts[turn.prompt] for turn in turns], np.int64),
            "turn_response_index": np.array([prompts[turn.response] for turn in turns], np.int64),
            "turn_image_index": np.array(
                [-1 if turn.image_key is None else images[turn.image_key] for turn in turns], np.int64
            ),
        }
        return {
            **(earlier if turns else {}),
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
        """Restore a [`state_dict`] (arrays or CPU tensors); later samples are the same as without the interruption."""
        arrays = {name: np.asarray(value) for name, value in state.items()}
        if int(arrays["capacity"]) != self.capacity:
            raise ValueError(
                f"The saved correction buffer has capacity {int(arrays['capacity'])}, this one {self.capacity}: a "
                "reservoir can't be resized. Resume with the same `correction_buffer_size`."
            )
        prompts = [sys.intern(blob.decode("utf-8", "surrogatepass")) for blob in _unpack("prompts", arrays)]
        images = _unpack("images", arrays)
        blocks = dict(zip(_unpack("block_digests", arrays), _unpack("blocks", arrays), strict=True))
        target_ids = [np.frombuffer(blob, "<i4").astype(np.int32) for blob in _unpack("target_ids", arrays)]
        self._samples = [
            _Stored(prompts[p], images[i], ids, int(labels), int(update), turns)
            for p, i, ids, labels, update, turns in zip(
                arrays["prompt_index"],
                arrays["image_index"],
                target_ids,
                arrays["num_labels"],
                arrays["update"],
                _unpack_turns(arrays, prompts, images),
                strict=True,
            )
        ]
        self._images = ImageStore.restore(Counter(key for each in self._samples for key in each.image_keys), blocks)
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


def _unpack_turns(
    arrays: Mapping[str, np.ndarray], texts: Sequence[str], images: Sequence[bytes]
) -> list[tuple[_StoredTurn, ...]]:
    """The turns of every sample; none if the state has no such arrays."""
    if "num_turns" not in arrays:
        return [()] * len(arrays["prompt_index"])
    columns = (arrays[f"turn_{name}_index"] for name in ("prompt", "response", "image"))
    turns = [_StoredTurn(texts[p], texts[r], None if i < 0 else images[i]) for p, r, i in zip(*columns, strict=True)]
    counts = arrays["num_turns"]
    return [tuple(turns[end - count : end]) for count, end in zip(counts, np.cumsum(counts), strict=True)]
