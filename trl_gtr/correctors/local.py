"""A vision-language model loaded in this process as the corrector."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from ..tasks.base import Task
from ..types import Correction, CorrectionRequest, Generation, Usage, all_pictures
from .base import Corrector, failed
from .openai.chat import Reply
from .openai.conversation import Conversation
from .questions import VERSION

logger = logging.getLogger(__name__)


class LocalCorrector(Corrector):
    """Any Hugging Face vision-language model, asked in batches with the same questions and checks as over HTTP.

    One batch runs at a time, alongside the policy; a dedicated GPU is best. Above temperature 0, answers are sampled
    with a separate RNG seeded by the question, so the policy's random numbers are unaffected.

    Args:
        model: Name or folder, or a loaded model (then give its `processor`). To use the policy as it
            was before training, name the checkpoint that training starts from.
        batch_size: Steps judged per `generate` call.
        max_completion_length: Maximum tokens per answer.
        max_tool_rounds: Replies that may call the task's tools (described in the prompt) before an answer is due.
        device: Device for a model loaded by name; the first GPU if there is one.
        model_kwargs: Passed to `from_pretrained`, e.g. `{"dtype": "bfloat16"}`.
    """

    def __init__(
        self,
        model: Any,
        processor: Any = None,
        *,
        temperature: float = 0.0,
        batch_size: int = 16,
        max_completion_length: int = 512,
        max_tool_rounds: int = 3,
        device: str | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
    ):
        # Imported here because the other correctors need neither torch nor transformers.
        import torch

        from ..engines.transformers import TransformersEngine
        from ..policy.loading import load_policy
        from ..policy.scoring import VLMPolicy

        if isinstance(model, str | os.PathLike):
            name = os.fspath(model)
            model, processor = load_policy(name, **(model_kwargs or {}))
            model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        elif processor is None:
            raise ValueError("a loaded model needs its processor: LocalCorrector(model, processor)")
        else:
            name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        self.model, self.batch_size, self.max_tool_rounds = model.eval(), batch_size, max_tool_rounds
        self.temperature = temperature
        policy = VLMPolicy(
            model,
            processor,
            temperature=1.0,  # decoding is greedy; see `_own_dice`
            max_completion_length=max_completion_length,
            feature_cache_bytes=0,  # every question is new
        )
        self._engine = TransformersEngine(policy, self.model)
        self.identity = (
            f"{name} here, temperature {temperature}, {max_completion_length} tokens, {max_tool_rounds} tool rounds, "
            f"questions v{VERSION}"
        )
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._reported = False
        self._closed = False

    def __repr__(self) -> str:
        return f"LocalCorrector({self.identity})"

    def check(self, task: Task) -> None:
        super().check(task)
        if task.history_images:
            self._engine.policy.encoder.check_history(with_images=True)

    def correct(self, requests: Sequence[CorrectionRequest]) -> list[Correction]:
        corrections: list[Correction] = []
        for start in range(0, len(requests), self.batch_size):
            with self._lock:
                corrections += self._correct_batch(requests[start : start + self.batch_size])
        return corrections

    def _correct_batch(self, requests: Sequence[CorrectionRequest]) -> list[Correction]:
        """Advance all conversations of a batch together until each has ended."""
        began: float | None = None
        conversations = [
            Conversation(
                request,
                [{"type": "image"}] * len(all_pictures(request.prompt, request.image)),
                tools_in_words=True,
                max_tool_rounds=self.max_tool_rounds,
            )
            for request in requests
        ]
        done: dict[int, Correction] = {}
        usages = [Usage() for _ in requests]
        while len(done) < len(conversations):
            pending = [i for i in range(len(conversations)) if i not in done]
            if self._closed:
                done |= {i: failed("cancelled", "the run ended") for i in pending}
                break
            if any(requests[i].cancellation.cancelled for i in pending):  # all belong to one rollout
                done |= {i: failed("late", "given up unanswered") for i in pending}
                break
            prompts = [flatten(conversations[i].messages) for i in pending]
            images = [all_pictures(requests[i].prompt, requests[i].image) for i in pending]
            began = began or time.perf_counter()
            try:
                generations = self._generate(prompts, images)
            except Exception as error:  # usually out of memory; lose these labels, not the run
                self._report(error)
                done |= {i: failed("unusable", f"{type(error).__name__} in generate") for i in pending}
                break
            for i, generation in zip(pending, generations, strict=True):
                usages[i] = usages[i] + Usage(calls=1, completion_tokens=len(generation.ids))
                problem = "it was cut off at the length limit" if generation.hit_length_limit else None
                answer = conversations[i].hear(Reply(generation.text, problem=problem))
                if answer is not None:
                    done[i] = answer
        latency = 0.0 if began is None else time.perf_counter() - began
        answers = [done[i] for i in range(len(conversations))]
        self._count(answers, usages)
        return [
            replace(answer, usage=usage, latency=latency, source=self.identity)
            for answer, usage in zip(answers, usages, strict=True)
        ]

    def _generate(self, prompts: Sequence[str], images: Sequence[tuple[np.ndarray, ...]]) -> list[Generation]:
        if self.temperature == 0:
            return self._engine.generate(prompts, images, greedy=True)
        seed = hashlib.sha256("\0".join(prompts).encode("utf-8", "replace"))
        for image in (each for pictures in images for each in pictures):
            seed.update(np.ascontiguousarray(image).tobytes())
        with _gumbel_sampling(self.model, int.from_bytes(seed.digest()[:8], "big"), self.temperature):
            return self._engine.generate(prompts, images, greedy=True)

    def _report(self, error: Exception) -> None:
        if not self._reported:
            advice = "; lower batch_size or max_completion_length" if "memory" in str(error).lower() else ""
            logger.error(
                "the corrector's model failed%s; further failures will only be counted", advice, exc_info=error
            )
        self._reported = True

    def _count(self, answers: Sequence[Correction], usages: Sequence[Usage]) -> None:
        self._counts["calls"] += sum(usage.calls for usage in usages)
        self._counts["tokens"] += sum(usage.completion_tokens for usage in usages)
        self._counts.update(f"failed_{answer.failure}" for answer in answers if answer.failure is not None)

    def metrics(self) -> dict[str, float]:
        """Totals for this process since the run began, including before a resume."""
        return {f"corrector/{name}": float(count) for name, count in self._counts.copy().items()}

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self._counts = Counter({name: int(count) for name, count in state["counts"].items()})
        except (LookupError, TypeError, ValueError, AttributeError):
            logger.warning("the checkpoint comes from a run with a different corrector; counts start from 0")

    def close(self) -> None:
        """Finish the current batch; everything else fails as cancelled until `reopen`."""
        self._closed = True

    def reopen(self) -> None:
        self._closed = False


@contextmanager
def _gumbel_sampling(model: Any, seed: int, temperature: float) -> Iterator[None]:
    """Turn greedy decoding into sampling with the Gumbel-max trick: the argmax of logits + temperature × Gumbel noise
    samples from softmax(logits / temperature). Uses its own RNG; the policy uses the global one in another thread."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def add_noise(module: Any, inputs: Any, output: Any) -> Any:
        uniform = torch.rand(output.logits[:, -1].shape, generator=generator, dtype=torch.float64)
        noise = -(-uniform.log()).log() * temperature
        logits = output.logits[:, -1:].float()
        output.logits = logits + noise[:, None].to(logits)
        return output

    hook = model.register_forward_hook(add_noise)
    try:
        yield
    finally:
        hook.remove()


def flatten(messages: Sequence[Mapping[str, Any]]) -> str:
    """Join a conversation into one text, since few VLM chat templates support system messages and several turns."""
    lines = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = "\n".join(part["text"] for part in content if part["type"] == "text")
        lines.append(f"You wrote:\n{content}" if message["role"] == "assistant" else content)
    return "\n\n".join(lines)
