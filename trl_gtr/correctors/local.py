"""A vision-language model that is loaded here as the corrector."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..types import Correction, CorrectionRequest, Usage
from .base import failed, failure_kind
from .chat import Reply
from .conversation import Conversation
from .questions import VERSION


class LocalCorrector:
    """Any Hugging Face vision-language model, asked in batches with the same questions and checks as over HTTP.

    One batch runs at a time, beside the policy; a GPU of its own is best. At temperature 0 answers are deterministic;
    above, they draw on torch's global generator and a rerun differs.

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

        from ..models import load_policy
        from ..policy import VLMPolicy

        if isinstance(model, str | os.PathLike):
            name = os.fspath(model)
            model, processor = load_policy(name, **(model_kwargs or {}))
            model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        elif processor is None:
            raise ValueError("a loaded model needs its processor: LocalCorrector(model, processor)")
        else:
            name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        self.model, self.batch_size, self.max_tool_rounds = model.eval(), batch_size, max_tool_rounds
        self.greedy = temperature == 0
        self._policy = VLMPolicy(
            model,
            processor,
            temperature=temperature or 1.0,
            max_completion_length=max_completion_length,
            feature_cache_bytes=0,  # every question is new
        )
        self.identity = (
            f"{name} here, temperature {temperature}, {max_completion_length} tokens, {max_tool_rounds} tool rounds, "
            f"questions v{VERSION}"
        )
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._ends = 0

    def __repr__(self) -> str:
        return f"LocalCorrector({self.identity})"

    def check(self, task: Any) -> None:
        if getattr(task, "rubric", None) is None:
            raise ValueError(f"task {getattr(task, 'name', task)!r} has no rubric, so nobody knows what to ask")

    def correct(self, requests: Sequence[CorrectionRequest]) -> list[Correction]:
        corrections: list[Correction] = []
        ends = self._ends
        for start in range(0, len(requests), self.batch_size):
            with self._lock:
                corrections += self._correct_batch(requests[start : start + self.batch_size], ends)
        return corrections

    def _correct_batch(self, requests: Sequence[CorrectionRequest], ends: int) -> list[Correction]:
        """All conversations of a batch go on together until each has ended."""
        started = time.perf_counter()
        talks = [
            Conversation(request, {"type": "image"}, tools_in_words=True, max_tool_rounds=self.max_tool_rounds)
            for request in requests
        ]
        done: dict[int, Correction] = {}
        usages = [Usage() for _ in requests]
        while len(done) < len(talks):
            open_ones = [i for i in range(len(talks)) if i not in done]
            if self._ends > ends:
                done |= {i: failed("cancelled", "the run ended") for i in open_ones}
                break
            prompts = [flatten(talks[i].messages) for i in open_ones]
            images = [requests[i].image for i in open_ones]
            generations = self._policy.generate(self.model, prompts, images, greedy=self.greedy)
            for i, generation in zip(open_ones, generations, strict=True):
                usages[i] = usages[i] + Usage(calls=1, completion_tokens=len(generation.ids))
                problem = "it was cut off at the length limit" if generation.hit_length_limit else None
                answer = talks[i].hear(Reply(generation.text, problem=problem))
                if answer is not None:
                    done[i] = answer
        latency = time.perf_counter() - started
        answers = [done[i] for i in range(len(talks))]
        self._count(answers, usages)
        return [
            replace(answer, usage=usage, latency=latency, source=self.identity)
            for answer, usage in zip(answers, usages, strict=True)
        ]

    def _count(self, answers: Sequence[Correction], usages: Sequence[Usage]) -> None:
        self._counts["calls"] += sum(usage.calls for usage in usages)
        self._counts["tokens"] += sum(usage.completion_tokens for usage in usages)
        self._counts.update(f"failed_{kind}" for kind in map(failure_kind, answers) if kind is not None)

    def metrics(self) -> dict[str, float]:
        """Totals of this process since the run began, resumed parts included."""
        return {f"corrector/{name}": float(count) for name, count in self._counts.copy().items()}

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._counts = Counter({name: int(count) for name, count in state["counts"].items()})

    def close(self) -> None:
        """The batch under way is finished, the rest comes back as failed, cancelled. A later call starts anew."""
        self._ends += 1


def flatten(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as one text: few chat templates of vision-language models know systems and several turns."""
    lines = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = "\n".join(part["text"] for part in content if part["type"] == "text")
        lines.append(f"You wrote:\n{content}" if message["role"] == "assistant" else content)
    return "\n\n".join(lines)
