"""What the tests of MiniGrid and BabyAI share."""

from __future__ import annotations

import importlib.util

import pytest

needs_minigrid = [
    pytest.mark.minigrid,
    pytest.mark.skipif(
        importlib.util.find_spec("minigrid") is None, reason='needs the extra: pip install "trl-gtr[minigrid]"'
    ),
]
