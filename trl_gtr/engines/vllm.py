"""Generation with vLLM: sampled from the scored distribution, with the weights of the latest update."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.models.utils import unwrap_model_for_generation

from ..policy.loading import image_token_id
from ..policy.network import PolicyWithValue
from ..policy.scoring import VLMPolicy
from ..types import Generation, Pictures, all_pictures
from .base import Engine, EngineRefused
from .merged_weights import check_mergeable, merged_weights
from .vllm_requests import Backend, Request, check_sampled, collapse_image_tokens, sampling_arguments


class VLLMEngine(Engine):
    """Samples with vLLM, which has its own copy of the weights.

    Each copy has a version. A response counts only if it was sampled from the version that [`sync`] sent last, so
    nothing is ever learned from stale weights. Each request has a seed from torch's global generator, whose state is
    part of every checkpoint.

    Args:
        policy: Encodes prompts and defines the distribution to sample from.
        model: The model in training, or a [`PolicyWithValue`] around it, as prepared by `accelerator`.
        backend: The vLLM to use.
        accelerator: Gathers sharded weights; `None` for a plain model.
        temperature: For sampling; `None`: the policy's.
        top_k: Sample from this many of the likeliest tokens; 0: from all, as the policy is scored.
        name: Begins the versions of this engine's weights; the same on all processes, unique to this engine.
    """

    continuous = True

    def __init__(
        self,
        policy: VLMPolicy,
        model: Any,
        backend: Backend,
        *,
        accelerator: Accelerator | None = None,
        temperature: float | None = None,
        top_k: int = 0,
        name: str | None = None,
    ) -> None:
        self.policy, self.network, self.backend, self.accelerator = policy, model, backend, accelerator
        bare = model if accelerator is None else accelerator.unwrap_model(model)
        self.model: Any = bare.policy if isinstance(bare, PolicyWithValue) else bare
        check_mergeable(self.model)
        image_token = image_token_id(self.model)
        assert image_token is not None  # checked when the model was loaded
        self.image_token = image_token
        temperature = policy.temperature if temperature is None else temperature
        self._sampling = {greedy: sampling_arguments(policy, temperature, greedy, top_k) for greedy in (True, False)}
        self._name, self._syncs, self._state_when_synced = name or uuid.uuid4().hex, 0, -1

    @property
    def version(self) -> str:
        """Of the weights to sample with: this engine's, and how often they have been sent."""
        return f"{self._name}-{self._syncs}"

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Send the weights if they have changed since they were last sent, or vLLM has others."""
        if self.backend.loaded != self.version or self._weights_state() != self._state_when_synced:
            self.sync(self.model)
        with self.backend.awake():
            yield

    def sync(self, policy: nn.Module) -> None:
        whole = (
            nullcontext() if self.accelerator is None else unwrap_model_for_generation(self.network, self.accelerator)
        )
        with whole:
            self._syncs += 1
            self.backend.load(partial(merged_weights, policy), self.version)
            self.backend.loaded = self.version
        self._state_when_synced = self._weights_state()

    def _weights_state(self) -> int:
        """Differs once a weight has been modified in place, as optimizers do."""
        if is_deepspeed_zero3_enabled():
            return 0  # gathering modifies them too
        return sum(weight._version for weight in self.model.parameters())

    def prepare(self, prompts: Sequence[str], images: Sequence[Pictures]) -> None:
        """Process and cache what scoring will need."""
        self.policy.encoder.prepare(prompts, images)

    @torch.no_grad()
    def generate(self, prompts: Sequence[str], images: Sequence[Pictures], greedy: bool = False) -> list[Generation]:
        """Generate one response per prompt and image. Draws one seed per request from torch's global RNG, unless
        `greedy`."""
        expanded = self.prompt_ids(prompts, images)
        pictures = [all_pictures(*each) for each in zip(prompts, images, strict=True)]
        seeds = [None] * len(prompts) if greedy else torch.randint(2**62, (len(prompts),)).tolist()
        sampled = self.backend.sample(self.requests(expanded, pictures, seeds), self._checked_version)
        check_sampled(expanded, sampled)
        # greedy ones' log-probs are at temperature 1, unlike those that are scored
        logprobs = [None if greedy else np.array(each.logprobs, np.float32) for each in sampled]
        ids = [np.array(each.ids, np.int64) for each in sampled]
        return [self.policy.read_generation(*each) for each in zip(ids, logprobs, strict=True)]

    @torch.no_grad()
    def respond(self, prompt: str, image: Pictures, seed: int) -> Generation:
        """Generate one response beside others. Thread-safe."""
        expanded = self.prompt_ids([prompt], [image])
        [request] = self.requests(expanded, [all_pictures(prompt, image)], seeds=[seed])
        sampled = self.backend.sample_one(request, self._checked_version)
        check_sampled(expanded, [sampled])
        return self.policy.read_generation(np.array(sampled.ids, np.int64), np.array(sampled.logprobs, np.float32))

    @torch.no_grad()
    def check(self, prompt: str, image: Pictures) -> None:
        """Sample one token, and compare the prompt's ids with those that are scored. Draws no random numbers."""
        expanded = self.prompt_ids([prompt], [image])
        [request] = self.requests(expanded, [all_pictures(prompt, image)], seeds=[None])
        short = request._replace(sampling=request.sampling | {"max_tokens": 1})
        check_sampled(expanded, self.backend.sample([short], self._checked_version), EngineRefused)

    @property
    def _checked_version(self) -> str:
        if self.backend.loaded != self.version:
            raise RuntimeError("vLLM has other weights: generate only within `ready()`.")
        return self.version

    def prompt_ids(self, prompts: Sequence[str], images: Sequence[Pictures]) -> list[list[int]]:
        """Each prompt as the learner scores it."""
        inputs = self.policy.encoder.encode(prompts, images)
        rows = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        return [ids[mask.bool()].tolist() for ids, mask in rows]

    def requests(
        self,
        prompt_ids: Sequence[list[int]],
        pictures: Sequence[tuple[np.ndarray, ...]],
        seeds: Sequence[int | None],
    ) -> list[Request]:
        """What vLLM is asked for; without a seed, the likeliest tokens."""
        return [
            Request(
                collapse_image_tokens(ids, self.image_token, len(shown)),
                shown,
                self._sampling[seed is None] | {"seed": seed},
            )
            for ids, shown, seed in zip(prompt_ids, pictures, seeds, strict=True)
        ]

    def close(self) -> None:
        self.backend.close()
