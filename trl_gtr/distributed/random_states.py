"""The global random generators: reading, setting and protecting their states."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """The state of every global random generator, for [`set_random_states`]."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else {})


def set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])


@contextmanager
def same_random_states() -> Iterator[None]:
    """Undo what the block does to the generators, such as seeding them."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
