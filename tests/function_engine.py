"""Engines and collectors for policies that are plain functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from trl_gtr import Engine, RolloutCollector
from trl_gtr.types import Generation


class FunctionEngine(Engine):
    """`function(prompts, images)` decides what is generated, greedy or not."""

    def __init__(self, function: Callable[[list[str], list[np.ndarray]], list[Generation]]) -> None:
        self.function = function

    continuous = True

    def respond(self, prompt: str, image: np.ndarray, seed: int) -> Generation:
        [generation] = self.function([prompt], [image])
        return generation

    def generate(self, prompts: Sequence[str], images: Sequence[np.ndarray], greedy: bool = False) -> list[Generation]:
        return self.function(list(prompts), list(images))


def make_collector(task: Any, function: Callable[..., list[Generation]], corrector: Any = None, **options: Any) -> Any:
    """A collector whose `collect(steps)` plays with this policy."""
    collector: Any = RolloutCollector(task, corrector, **{"seed": 0} | options)
    collector.collect = partial(collector.collect, FunctionEngine(function))
    return collector
