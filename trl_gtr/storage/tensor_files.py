"""Writing safetensors files one tensor at a time, so that memory needs to hold only one of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .files import atomic_write

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class TensorSpec(NamedTuple):
    """A tensor to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path,
    specs: Mapping[str, TensorSpec],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file. The format needs all sizes first; the data may then be produced one by one.

    Args:
        path: The file; it appears under this name once it is complete.
        specs: What is in the file, by name.
        tensors: The tensors, in the order of `specs`.
        metadata: More about the file, in its header.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, spec in specs.items():
        start, end = end, end + spec.num_bytes
        header[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # data must be aligned
    with atomic_write(path) as unfinished, unfinished.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for (name, spec), tensor in zip(specs.items(), tensors, strict=True):
            if TensorSpec.of(tensor) != spec:
                raise ValueError(f"{name} was announced as {spec}, but is {TensorSpec.of(tensor)}.")
            file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
