"""Tensors written one by one are an ordinary safetensors file."""

import pytest
import torch
from safetensors.torch import load_file

from trl_gtr.storage.tensor_files import TensorSpec, write_tensors


def test_a_streamed_file_is_read_by_safetensors(tmp_path):
    tensors = {
        "matrix": torch.randn(3, 5).T,  # not contiguous
        "half": torch.randn(7).bfloat16(),
        "number": torch.tensor(3.0, dtype=torch.float64),
        "empty": torch.zeros(0, 2),
    }
    path = tmp_path / "file.safetensors"
    write_tensors(path, {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, iter(tensors.values()))
    read = load_file(path)
    assert set(read) == set(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_a_tensor_of_another_size_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match="x was announced as"):
        write_tensors(tmp_path / "file", {"x": TensorSpec(torch.float32, (2,))}, [torch.zeros(3)])
    assert not list(tmp_path.iterdir())
