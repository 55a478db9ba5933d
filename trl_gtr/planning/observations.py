"""Real observations of a task, as the run's model would see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..policy.loading import image_token_id
from ..policy.scoring import VLMPolicy
from ..tasks import Task
from ..tasks.memory import Memory
from ..types import CorrectionRequest

SLIPS = 0.2
"""Assumed share of an agent's actions that are not the expert's: they cut episodes short."""


def sample_states(task: Task, count: int, seed: int = 0, slips: float = 0.0) -> list[CorrectionRequest]:
    """States along the expert's own episodes, each with its right thought. Where the expert knows nothing, the
    episode is over.

    Args:
        slips: Share of the steps in which a random legal action is played instead.
    """
    rng = np.random.default_rng(seed)
    env, memory, episode = task.make_env(), Memory(task), 0
    requests: list[CorrectionRequest] = []
    while len(requests) < count:
        image, info = env.reset(seed=seed * 1_000_003 + episode)
        episode, ended = episode + 1, False
        memory.clear()
        while not ended and len(requests) < count and (response := task.expert(info)) is not None:
            state: dict[str, Any] = {
                "image": np.array(image),
                "public_state": task.public_state(info),
                "info": dict(info),
            }
            prompt = memory.prompt(image, info)
            requests.append(CorrectionRequest(prompt=prompt, response=response, task=task, **state))
            if slips and rng.random() < slips:
                response = replace(response, action=str(rng.choice(task.legal_actions(info))))
            memory.add(state["image"], info, response.text)
            image, _, terminated, truncated, info = env.step(task.to_env_action(response, info))
            ended = terminated or truncated
        if episode > 50 * count:
            raise ValueError(f"The expert of task {task.name!r} has no answer for any of {episode} starts.")
    env.close()
    return requests


@dataclass(frozen=True)
class Observations:
    """Sampled states and their token counts, longest prompt first."""

    requests: Sequence[CorrectionRequest]
    prompt_tokens: Sequence[int]
    """Whole prompts, including image tokens."""
    image_tokens: int
    """Maximum over all prompts: of all their images together."""
    response_tokens: Sequence[int]
    """The expert's responses, including the end token."""
    picture_bytes: int
    """Largest size of a processed image in the feature cache."""

    def rows(self, count: int) -> tuple[list[str], list[np.ndarray]]:
        """Prompts and images of the `count` longest, which come again where there are fewer, but for the last: the
        shortest. Padding costs memory too, for attention then needs a mask."""
        chosen = [self.requests[i % len(self.requests)] for i in range(count)]
        if count > 1:
            chosen[-1] = self.requests[-1]
        return [each.prompt for each in chosen], [each.image for each in chosen]


def observe(task: Task, policy: VLMPolicy, model: object, count: int = 128) -> Observations:
    """Through the run's own processor and chat template."""
    requests = sample_states(task, count, slips=SLIPS)
    lengths = policy.encoder.lengths([each.prompt for each in requests], [each.image for each in requests])
    order = sorted(range(count), key=lambda i: -lengths[i])
    requests = [requests[i] for i in order]
    image_tokens, picture_bytes = 0, 0
    image_id = image_token_id(model)
    assert image_id is not None  # the policy has checked it
    for request in requests:
        batch = policy.encoder.encode([request.prompt], [request.image])
        image_tokens = max(image_tokens, int(torch.eq(batch["input_ids"], image_id).sum()))
        batch = policy.encoder.encode([str(request.prompt)], [request.image])  # without earlier turns
        text = batch["input_ids"].shape
        picture_bytes = max(picture_bytes, sum(each.nbytes for each in batch.values() if each.shape != text))
    return Observations(
        requests,
        [lengths[i] for i in order],
        image_tokens,
        [len(policy.encode_response(each.response.text)) for each in requests],
        picture_bytes,
    )
