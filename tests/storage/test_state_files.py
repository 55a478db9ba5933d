"""Each format gives back what was written, and says which file it can't read."""

import pickle

import numpy as np
import pytest
import torch

from trl_gtr.storage.state_files import PLAIN, TENSORS

STATES = {
    "plain": (PLAIN, {"seen": 3, "where": ("a", 1), "board": np.arange(3)}),
    "tensors": (TENSORS, {"moments": {0: {"step": torch.tensor(2.0)}}, "skipped": 1}),
}


@pytest.mark.parametrize("kind", STATES)
def test_a_state_comes_back(kind, tmp_path):
    format, state = STATES[kind]
    path = tmp_path / f"state{format.suffix}"
    format.write(path, state)
    again = format.read(path)
    assert repr(again) == repr(state)


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("content", [b"", b"not one of ours", pickle.dumps(np.array([object()]))])
def test_a_file_that_cant_be_read_is_named(kind, content, tmp_path):
    format, _ = STATES[kind]
    path = tmp_path / f"state{format.suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"is damaged: state\{format.suffix} can't be read"):
        format.read(path)
