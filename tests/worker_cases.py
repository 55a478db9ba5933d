"""What the tests of workers share, whether these are processes of this machine or of a Ray cluster."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trl_gtr.types import Generation, Rollout

needs_ray = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason='needs the extra: pip install "trl-gtr[ray]"'),
]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, np.ndarray) and first.dtype == object:
        return all(same(one, other) for one, other in zip(first, second, strict=True))
    return bool(np.array_equal(first, second)) if isinstance(first, np.ndarray) else first == second


def running(pid: int) -> bool:
    """Is there such a process, and is it more than a zombie?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(running, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    return not any(map(running, pids))


def told(log: Path, event: str) -> list[int]:
    """The processes that `Housed` environments have started, or closed."""
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [int(pid) for what, pid in lines if what == event]


def says(action: str = "go") -> Any:
    text = f'{{"action": "{action}"}}'
    return lambda prompts, images: [Generation(np.zeros(1, np.int64), text) for _ in prompts]


def played(rollout: Rollout) -> list[Any]:
    return [(t.env_index, t.prompt, t.reward, t.terminated, t.info, t.final_info) for t in rollout.transitions]


class Careless:
    """Kills every worker once, in its first episode."""

    def __init__(self, action: str, times: int) -> None:
        self.action, self.left = action, times

    def respond(self, prompts: list[str], images: list[Any], infos: Any) -> list[str]:
        answers = []
        for prompt in prompts:
            careless = self.left > 0 and prompt.startswith("1 ")
            self.left -= careless
            answers.append(f'{{"action": "{self.action if careless else "go"}"}}')
        return answers
