"""The `Engine` interface: generating responses from prompts and images, and receiving new weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from torch import nn

from ..tasks.contract import Contract
from ..types import Generation


class EngineLost(ConnectionError):
    """The engine doesn't generate any more, such as a server that is gone for good. The run is saved and ends."""


class EngineRefused(ValueError):
    """The engine can't be used with these settings, which shows only when it is used for the first time."""


UNABLE = (FloatingPointError, EngineLost)
"""Why an engine can't generate: non-finite logits, or it is gone. Of several processes, no other may wait for it."""


class Engine(Contract):
    """Generates responses, in training and in evaluation.

    A [`VLMPolicy`] tells the engine what it needs to know about the model (a prompt's token ids, ids that must not be
    sampled, temperature, length limit) and scores what the engine has sampled.
    """

    continuous: bool = False
    """Whether [`respond`] works: responses are written side by side, and each is returned when it is done."""

    @abstractmethod
    def generate(self, prompts: Sequence[str], images: Sequence[np.ndarray], greedy: bool = False) -> list[Generation]:
        """Generate one response per prompt and image, in order.

        Args:
            prompts: Each may be a [`Prompt`], with earlier turns of the chat. `policy.encoder` handles them;
                `all_pictures` and `chat_messages` help an engine that builds its own requests.
            images: uint8, (height, width, 3): the picture of this step.
            greedy: Take the most likely token instead of sampling.
        """

    def respond(self, prompt: str, image: np.ndarray, seed: int) -> Generation:
        """Generate one response, sampled with this seed. Called from many threads at the same time.

        Optional, and called only with `GTRConfig.asynchronous`.
        """
        raise NotImplementedError(f"{type(self).__name__} generates in batches: use `generate`.")

    def prepare(self, prompts: Sequence[str], images: Sequence[np.ndarray]) -> None:
        """Do what can be done ahead for a later `generate` with these prompts and images, such as image processing.

        Optional, and called only with `GTRConfig.overlap`: from another thread, while `generate` runs with others.
        """

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Prepare for a series of `generate` calls (a rollout or an evaluation) and clean up afterwards.

        All processes of a run enter and leave it together.
        """
        yield

    def check(self, prompt: str, image: np.ndarray) -> None:
        """Raise `EngineRefused` with a fix if this engine reads an observation in another way than it is scored.

        Optional, and called once within `ready()`, with a real observation, before the first rollout or evaluation.
        """

    def sync(self, policy: nn.Module) -> None:
        """Use these weights from now on. Called by all processes when training begins and after each update.

        An engine that generates with the trained model itself needs to do nothing.

        Args:
            policy: The trained vision-language model, possibly with an adapter. Under ZeRO-3 its weights are sharded.
        """

    def close(self) -> None:
        """Release the engine's resources: processes, memory, connections."""
