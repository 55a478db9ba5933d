"""What vLLM is asked for and what it answers: the records that both of its modes share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from ..policy.scoring import VLMPolicy
from ..tasks.contract import Contract
from .base import EngineLost

Weights = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Goes through the learner's weights, as often as they are needed."""


class Request(NamedTuple):
    """One response to sample."""

    ids: list[int]
    """The prompt as vLLM wants it: one image token per picture, which it expands itself."""
    pictures: tuple[np.ndarray, ...]
    """uint8, (height, width, 3) each, in the prompt's order."""
    sampling: dict[str, Any]
    """Arguments of vLLM's `SamplingParams`."""


class Sampled(NamedTuple):
    """One response as vLLM sampled it."""

    prompt_ids: list[int]
    """The prompt with the image tokens expanded."""
    ids: list[int]
    logprobs: list[float]


class Backend(Contract):
    """A vLLM, in this process or elsewhere. Several engines may share it, with different weights in turn."""

    loaded: str = ""
    """The version that was sent last."""

    @abstractmethod
    def load(self, weights: Weights, version: str) -> None:
        """Take new weights, and forget everything computed with the old ones."""

    @abstractmethod
    def sample(self, requests: Sequence[Request], version: str) -> list[Sampled]:
        """Sample every response, all of them with the weights of this version."""

    @abstractmethod
    def sample_one(self, request: Request, version: str) -> Sampled:
        """Sample one response beside others. Called from many threads at the same time."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Hold the memory for sampling while the block runs."""
        yield

    @abstractmethod
    def close(self) -> None:
        """Release memory and connections."""


def collapse_image_tokens(ids: Sequence[int], image_token_id: int, pictures: int) -> list[int]:
    """The prompt with one image token per picture. Given all of them, vLLM would expand the first and keep the others.

    Each run of image tokens is one picture, unless there are fewer runs than pictures: then some are side by side, and
    all are taken to have the same number of tokens. (`check_sampled` finds out if they don't.)
    """
    runs = [(token, len(list(run))) for token, run in groupby(ids)]
    lengths = [length for token, length in runs if token == image_token_id]
    each = None if len(lengths) == pictures else max(1, sum(lengths) // pictures)
    collapsed = []
    for token, length in runs:
        if token == image_token_id:
            length = 1 if each is None else max(1, length // each)
        collapsed += [token] * length
    return collapsed


def sampling_arguments(policy: VLMPolicy, temperature: float, greedy: bool, top_k: int = 0) -> dict[str, Any]:
    """The distribution that the policy is scored under, as arguments of vLLM's `SamplingParams`."""
    return {
        "temperature": 0.0 if greedy else temperature,
        "top_p": 1.0,
        "top_k": top_k,
        "min_p": 0.0,
        "repetition_penalty": policy.repetition_penalty,
        "max_tokens": policy.max_completion_length,
        "stop_token_ids": list(policy.eos_token_ids),
        "allowed_token_ids": torch.nonzero(~policy.suppressed).flatten().tolist(),
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
    }


def check_sampled(
    expected: Sequence[Sequence[int]], sampled: Sequence[Sampled], error: type[Exception] = EngineLost
) -> None:
    """Raise if a response was sampled from another prompt than the one that is scored, or from NaN.

    Args:
        error: What to raise for another prompt.
    """
    for prompt, answer in zip(expected, sampled, strict=True):
        if list(prompt) != answer.prompt_ids:
            raise error(
                f"vLLM's tokens for a prompt ({len(answer.prompt_ids)}) are not those that the learner scores "
                f"({len(prompt)}): it expands this model's images in another way. Use engine='transformers', or a "
                "server with the same processor files and release of transformers."
            )
        if not np.isfinite(answer.logprobs).all():
            raise FloatingPointError("generation produced NaN logits")
