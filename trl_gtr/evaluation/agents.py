"""Agents to evaluate: a model, a model behind an API, the expert, random play."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch

from ..correctors.openai import bounded_http
from ..correctors.openai.chat import MAX_COMPLAINT, NO_COMPLETION, read_reply
from ..correctors.openai.corrector import data_url
from ..engines.base import Engine
from ..engines.transformers import TransformersEngine
from ..policy.loading import load_policy
from ..policy.scoring import VLMPolicy
from ..responses.safe_text import hide_secrets, one_line
from ..tasks.base import Task
from ..types import all_pictures, chat_messages


class Agent(Protocol):
    """Anything that answers prompts and images with text."""

    def respond(
        self, prompts: list[str], images: list[np.ndarray], infos: Sequence[Mapping[str, Any]]
    ) -> Sequence[str]: ...


class PolicyAgent:
    """A model, which sees only prompts and images.

    Args:
        engine: Generates the responses.
        greedy: Take the most likely token instead of sampling.
    """

    def __init__(self, engine: Engine, greedy: bool = True) -> None:
        self.engine, self.greedy = engine, greedy

    def respond(
        self, prompts: list[str], images: list[np.ndarray], infos: Sequence[Mapping[str, Any]]
    ) -> Sequence[str]:
        return [generation.text for generation in self.engine.generate(prompts, images, self.greedy)]


class ExpertAgent:
    """The task's own expert, which knows the hidden state: the ceiling."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def respond(
        self, prompts: list[str], images: list[np.ndarray], infos: Sequence[Mapping[str, Any]]
    ) -> Sequence[str]:
        answers = [self.task.expert(info) for info in infos]
        return [answer.text if answer else "" for answer in answers]


class RandomAgent:
    """Random legal actions: the floor. Its empty responses name no action, so `invalid_action` decides."""

    def respond(
        self, prompts: list[str], images: list[np.ndarray], infos: Sequence[Mapping[str, Any]]
    ) -> Sequence[str]:
        return [""] * len(prompts)


class NoAnswer(ValueError):
    """A server gave no answer. The message is safe to show: one line, without the key."""


class ServedAgent:
    """A model behind an OpenAI-compatible API, given the same prompts and images.

    The key comes from OPENAI_API_KEY; your own server may not need one. A request that fails after the client's
    retries ends the evaluation with `NoAnswer`: a missing answer must not count as a wrong one.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        temperature: float = 0.0,
        max_completion_length: int = 256,
        concurrency: int = 16,
    ) -> None:
        try:
            import openai
        except ImportError:
            raise ImportError('ServedAgent needs the openai package: pip install "trl-gtr[openai]"') from None
        key = os.environ.get("OPENAI_API_KEY") or ("none" if base_url else None)
        if key is None:
            raise ValueError(f"{model} needs a key: set OPENAI_API_KEY, or --base_url for your own server.")
        http_client = bounded_http.client(60.0, asynchronous=False)
        self.client: Any = openai.OpenAI(
            base_url=base_url, api_key=key, max_retries=4, timeout=60.0, http_client=http_client
        )
        self.model, self.temperature, self.max_completion_length = model, temperature, max_completion_length
        self.concurrency = concurrency

    def respond(
        self, prompts: list[str], images: list[np.ndarray], infos: Sequence[Mapping[str, Any]]
    ) -> Sequence[str]:
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(self._ask, prompts, images))

    def _ask(self, prompt: str, image: np.ndarray) -> str:
        import openai

        shown = all_pictures(prompt, image)
        pictures = [{"type": "image_url", "image_url": {"url": data_url(each)}} for each in shown]
        try:
            response = self.client.chat.completions.with_raw_response.create(
                model=self.model,
                messages=chat_messages(prompt, pictures),
                temperature=self.temperature,
                max_completion_tokens=self.max_completion_length,
            )
        except openai.OpenAIError as error:
            raise NoAnswer(self._no_answer(error)) from None
        reply, _ = read_reply(response.http_response.content.decode(errors="replace"))
        if reply.problem == NO_COMPLETION:
            raise NoAnswer(f"{self.model} gave no answer: {reply.problem}. Is --base_url right?")
        return reply.content

    def _no_answer(self, error: Exception) -> str:
        """Why there is no answer, in the server's words if possible."""
        import openai

        was_cut = False
        if isinstance(error, openai.APIStatusError):
            words, was_cut = str(error), len(error.response.content) >= bounded_http.MAX_ERROR_BODY
            if 300 <= error.status_code < 400:
                words = (
                    f"HTTP {error.status_code}: the server redirects to another address; make --base_url the final one"
                )
        elif isinstance(error.__cause__, bounded_http.UnreadableBody):
            words = str(error.__cause__)
        else:  # the HTTP library may quote a key that is invalid in a header
            words = f"{error} ({type(error.__cause__ or error).__name__})"
        # Remove the key before truncating: a partial key would not be found.
        words = hide_secrets(words, [self.client.api_key], was_cut=was_cut)
        return f"{self.model} gave no answer: {one_line(words, MAX_COMPLAINT)}"


def load_agent(
    name: str,
    task: Task,
    *,
    temperature: float = 0.0,
    max_completion_length: int = 256,
    device: str | None = None,
    dtype: str = "float32",
    base_url: str | None = None,
) -> Agent:
    """Load an agent by name, as in `trl-gtr evaluate --agents`.

    Args:
        name: `"expert"`, `"random"`, `"openai:MODEL"`, or a vision-language model: a folder, a hub name, or `"tiny"`.
        task: The task to play.
        temperature: Sampling temperature; 0 is greedy.
        max_completion_length: Maximum number of new tokens per response.
        device: Device for a model; by default the first GPU if there is one.
        dtype: Precision of a model.
        base_url: Server of an `openai:` agent.
    """
    if name == "expert":
        return ExpertAgent(task)
    if name == "random":
        return RandomAgent()
    if name.startswith("openai:"):
        return ServedAgent(
            name.removeprefix("openai:"),
            base_url=base_url,
            temperature=temperature,
            max_completion_length=max_completion_length,
        )
    model, processor = load_policy(name, dtype=dtype)
    model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    policy = VLMPolicy(model, processor, temperature=temperature or 1.0, max_completion_length=max_completion_length)
    if task.history_turns:
        policy.encoder.check_history(with_images=task.history_images > 0)
    return PolicyAgent(TransformersEngine(policy, model), greedy=temperature == 0)
