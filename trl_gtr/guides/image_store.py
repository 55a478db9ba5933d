"""Lossless, compact image storage.

A drawn game shows the same cards and letters in ever new combinations: nearly every image is new, but hardly any part
of it is. So images are cut into blocks of 75 × 75 pixels; each distinct block is compressed and stored once, and an
image is a list of blocks. A block is freed with the last image that uses it.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator, Mapping

import numpy as np

BLOCK_SIZE = 75
DIGEST_SIZE = 16

_SHAPE = struct.Struct("<II")
"""Image height and width, at the start of its key, followed by the digests of its blocks, row by row."""
_BLOCK_HEADER = struct.Struct("<II?")
"""Height, width and whether the pixels were filtered, at the start of a stored block, before a zlib stream."""


class ImageStore:
    """Distinct images by key, with reference counts. Equal images have equal keys."""

    def __init__(self) -> None:
        self._users: dict[bytes, int] = {}
        self._blocks: dict[bytes, bytes] = {}
        self._block_users: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Number of distinct images."""
        return len(self._users)

    def __iter__(self) -> Iterator[bytes]:
        """The keys, in insertion order."""
        return iter(self._users)

    @property
    def num_bytes(self) -> int:
        """Total size of blocks and keys."""
        return sum(map(len, self._blocks.values())) + sum(map(len, self._users))

    def hold(self, image: np.ndarray) -> bytes:
        """Add a reference to `image`, uint8 (height, width, 3), and return its key."""
        check_image(image)
        blocks = [np.ascontiguousarray(image[rows, columns]) for rows, columns in _grid(*image.shape[:2])]
        digests = [_digest(block) for block in blocks]
        key = _SHAPE.pack(*image.shape[:2]) + b"".join(digests)
        if key not in self._users:
            for digest, block in zip(digests, blocks, strict=True):
                if digest not in self._blocks:
                    self._blocks[digest] = _compress(block)
                self._block_users[digest] = self._block_users.get(digest, 0) + 1
        self._users[key] = self._users.get(key, 0) + 1
        return key

    def release(self, key: bytes) -> None:
        """Drop a reference; the last one frees the image."""
        self._users[key] -= 1
        if self._users[key]:
            return
        del self._users[key]
        for digest in _digests(key):
            self._block_users[digest] -= 1
            if not self._block_users[digest]:
                del self._block_users[digest], self._blocks[digest]

    def image(self, key: bytes) -> np.ndarray:
        """A fresh copy of the image, uint8 (height, width, 3)."""
        height, width = _SHAPE.unpack_from(key)
        image = np.empty((height, width, 3), np.uint8)
        for (rows, columns), digest in zip(_grid(height, width), _digests(key), strict=True):
            image[rows, columns] = _decompress(self._blocks[digest])
        return image

    @property
    def blocks(self) -> dict[bytes, bytes]:
        """The compressed blocks by digest. Together with the image keys, all that [`restore`] needs."""
        return dict(self._blocks)

    @classmethod
    def restore(cls, users: Mapping[bytes, int], blocks: Mapping[bytes, bytes]) -> ImageStore:
        """Rebuild a store from the reference counts of its image keys and its blocks by digest."""
        store = cls()
        store._users, store._blocks = dict(users), dict(blocks)
        for key in users:
            for digest in _digests(key):
                store._block_users[digest] = store._block_users.get(digest, 0) + 1
        return store


def check_image(image: np.ndarray) -> None:
    """Raise a `ValueError` unless the image is uint8 (height, width, 3)."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"Images must be uint8 (height, width, 3), got {image.dtype} {image.shape}.")


def _grid(height: int, width: int) -> Iterator[tuple[slice, slice]]:
    for top in range(0, height, BLOCK_SIZE):
        for left in range(0, width, BLOCK_SIZE):
            yield slice(top, min(top + BLOCK_SIZE, height)), slice(left, min(left + BLOCK_SIZE, width))


def _digest(block: np.ndarray) -> bytes:
    # Include the shape: the same bytes in another shape are a different image.
    return hashlib.blake2b(block.data, digest_size=DIGEST_SIZE, salt=_SHAPE.pack(*block.shape[:2])).digest()


def _digests(key: bytes) -> Iterator[bytes]:
    for start in range(_SHAPE.size, len(key), DIGEST_SIZE):
        yield key[start : start + DIGEST_SIZE]


def _compress(block: np.ndarray) -> bytes:
    """Header and zlib stream.

    Drawn blocks compress well as they are. Photos hardly compress, but differences between neighbouring pixels
    (PNG's "sub" filter) save about a third.
    """
    height, width, _ = block.shape
    plain = zlib.compress(block.data, 1)
    if len(plain) < block.size // 4:
        return _BLOCK_HEADER.pack(height, width, False) + plain
    differences = block.copy()
    differences[:, 1:] -= block[:, :-1]  # uint8 arithmetic wraps around; decompressing undoes it
    return _BLOCK_HEADER.pack(height, width, True) + zlib.compress(differences.data, 1)


def _decompress(blob: bytes) -> np.ndarray:
    height, width, filtered = _BLOCK_HEADER.unpack_from(blob)
    block = np.frombuffer(zlib.decompress(memoryview(blob)[_BLOCK_HEADER.size :]), np.uint8).reshape(height, width, 3)
    return np.cumsum(block, axis=1, dtype=np.uint8) if filtered else block
