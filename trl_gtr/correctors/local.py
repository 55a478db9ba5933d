"""A vision-language model that is loaded here as the corrector."""

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

from ..types import Correction, CorrectionRequest, Generation, Usage
from .base import Corrector, failed
from .openai.chat import Reply
from .openai.conversation import Conversation
from .questions import VERSION

logger = logging.getLogger(__name__)


class LocalCorrector(Corrector):
    """Any Hugging Face vision-language model, asked in batches with the same questions and checks as over HTTP.

    One batch runs at a time, beside the policy; a GPU of its own is best. Above temperature 0 answers are drawn with
    random numbers of their own, which depend on what is asked alone: the policy's are left as they are.

    Args:
        model: Name or folder, or a loaded model (then give its `processor`). To use the policy's own frozen start,
            name the checkpoint that training starts from.
        batch_size: Steps that are judged in one `generate`.
        max_completion_length: Tokens of one answer.
        max_tool_rounds: Replies that may call the task's tools, which are described in words, before an answer is due.
        device: Where to put a model that is loaded here; the first GPU if there is one.
        model_kwargs: For `from_pretrained`, e.g. `{"dtype": "bfloat16"}`.
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
        # torch and transformers are imported here: the other correctors need neither.
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

    def correct(self, requests: Sequence[CorrectionRequest]) -> list[Correction]:
        corrections: list[Correction] = []
        for start in range(0, len(requests), self.batch_size):
            with self._lock:
                corrections += self._correct_batch(requests[start : start + self.batch_size])
        return corrections

    def _correct_batch(self, requests: Sequence[CorrectionRequest]) -> list[Correction]:
        """All conversations of a batch go on together until each has ended."""
        began: float | None = None
        talks = [
            Conversation(request, {"type": "image"}, tools_in_words=True, max_tool_rounds=self.max_tool_rounds)
            for request in requests
        ]
        done: dict[int, Correction] = {}
        usages = [Usage() for _ in requests]
        while len(done) < len(talks):
            open_ones = [i for i in range(len(talks)) if i not in done]
            if self._closed:
                done |= {i: failed("cancelled", "the run ended") for i in open_ones}
                break
            if any(requests[i].cancellation.cancelled for i in open_ones):  # they are of one rollout
                done |= {i: failed("late", "given up unanswered") for i in open_ones}
                break
            prompts = [flatten(talks[i].messages) for i in open_ones]
            images = [requests[i].image for i in open_ones]
            began = began or time.perf_counter()
            try:
                generations = self._generate(prompts, images)
            except Exception as error:  # mostly too little memory: these labels are lost, the run is not
                self._report(error)
                done |= {i: failed("unusable", f"{type(error).__name__} in generate") for i in open_ones}
                break
            for i, generation in zip(open_ones, generations, strict=True):
                usages[i] = usages[i] + Usage(calls=1, completion_tokens=len(generation.ids))
                problem = "it was cut off at the length limit" if generation.hit_length_limit else None
                answer = talks[i].hear(Reply(generation.text, problem=problem))
                if answer is not None:
                    done[i] = answer
        latency = 0.0 if began is None else time.perf_counter() - began
        answers = [done[i] for i in range(len(talks))]
        self._count(answers, usages)
        return [
            replace(answer, usage=usage, latency=latency, source=self.identity)
            for answer, usage in zip(answers, usages, strict=True)
        ]

    def _generate(self, prompts: Sequence[str], images: Sequence[np.ndarray]) -> list[Generation]:
        if self.temperature == 0:
            return self._engine.generate(prompts, images, greedy=True)
        seed = hashlib.sha256("\0".join(prompts).encode("utf-8", "replace"))
        for image in images:
            seed.update(np.ascontiguousarray(image).tobytes())
        with _own_dice(self.model, int.from_bytes(seed.digest()[:8], "big"), self.temperature):
            return self._engine.generate(prompts, images, greedy=True)

    def _report(self, error: Exception) -> None:
        if not self._reported:
            advice = "; lower batch_size or max_completion_length" if "memory" in str(error).lower() else ""
            logger.error("the corrector's model failed%s; further failures are only counted", advice, exc_info=error)
        self._reported = True

    def _count(self, answers: Sequence[Correction], usages: Sequence[Usage]) -> None:
        self._counts["calls"] += sum(usage.calls for usage in usages)
        self._counts["tokens"] += sum(usage.completion_tokens for usage in usages)
        self._counts.update(f"failed_{answer.failure}" for answer in answers if answer.failure is not None)

    def metrics(self) -> dict[str, float]:
        """Totals of this process since the run began, resumed parts included."""
        return {f"corrector/{name}": float(count) for name, count in self._counts.copy().items()}

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self._counts = Counter({name: int(count) for name, count in state["counts"].items()})
        except (LookupError, TypeError, ValueError, AttributeError):
            logger.warning("the checkpoint is of a run with another corrector; counts start from 0")

    def close(self) -> None:
        """The batch under way is finished; all else comes back as failed, cancelled, until `reopen`."""
        self._closed = True

    def reopen(self) -> None:
        self._closed = False


@contextmanager
def _own_dice(model: Any, seed: int, temperature: float) -> Iterator[None]:
    """Makes greedy decoding a sample: the largest of logits + temperature × Gumbel noise is one of softmax(logits /
    temperature). The noise is drawn with a generator of its own; the global one is the policy's, in another thread."""
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
    """A conversation as one text: few chat templates of vision-language models know systems and several turns."""
    lines = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = "\n".join(part["text"] for part in content if part["type"] == "text")
        lines.append(f"You wrote:\n{content}" if message["role"] == "assistant" else content)
    return "\n\n".join(lines)
