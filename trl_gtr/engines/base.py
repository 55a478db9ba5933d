"""The `Engine` seam: who turns prompts and images into responses, and how it learns of new weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from torch import nn

from ..types import Generation


class Engine(ABC):
    """Generates responses, in training and in evaluation.

    What an engine needs to know about the model (token ids of a prompt, ids that must not be sampled, temperature,
    length limit) it gets from a [`VLMPolicy`], which also scores what the engine has sampled.
    """

    @abstractmethod
    def generate(self, prompts: Sequence[str], images: Sequence[np.ndarray], greedy: bool = False) -> list[Generation]:
        """One response per prompt and image, in their order.

        Args:
            images: uint8, (height, width, 3).
            greedy: Take the most likely token instead of sampling.
        """

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Prepare for a series of `generate` calls, a rollout or an evaluation, and clean up afterwards.

        All processes of a run enter and leave it together.
        """
        yield

    def sync(self, policy: nn.Module) -> None:  # noqa: B027
        """Use these weights from now on. Called by all processes when training begins and after each update.

        An engine that generates with the trained model itself has nothing to do.

        Args:
            policy: The trained vision-language model, possibly with an adapter. Under ZeRO-3 its weights are sharded.
        """

    def close(self) -> None:  # noqa: B027
        """Free what the engine holds: processes, memory, connections."""
