"""The text side of the policy: how a model is prompted and how its responses are scored.

[`VLMPolicy`] knows the processor, chat template, padding and which ids may be sampled. It is separate from the
network, so that the network can be wrapped (DDP, DeepSpeed) and unwrapped independently.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from ..types import Generation, Pictures, turns_before
from .loading import check_processor, eos_token_ids, pad_token_id, positions_follow_mask, suppressed_tokens
from .logprobs import token_logprobs, weighted_logprob
from .prompts import PromptEncoder, pad_and_cat
from .scores import Scores
from .spans import SpanFinder


class BatchShape(NamedTuple):
    """The shape a batch is padded to."""

    rows: int
    prompt_tokens: int
    response_tokens: int


class SamplingSettings(Protocol):
    """What `GTRConfig` says about responses."""

    temperature: float
    repetition_penalty: float
    max_completion_length: int
    feature_cache_gb: float


class VLMPolicy:
    """Prompts a model and scores its responses.

    It holds no network: each method takes the one to use, a [`PolicyWithValue`], wrapped or not. An `Engine`
    generates.

    Args:
        model: source of the EOS and padding ids, the vocabulary size and the image tokens.
        processor: the model's processor.
        temperature: for sampling and scoring.
        repetition_penalty: for sampling and scoring.
        max_completion_length: maximum new tokens per response.
        feature_cache_bytes: memory for processed prompts and images. What doesn't fit is processed again.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        temperature: float,
        repetition_penalty: float = 1.0,
        max_completion_length: int = 256,
        feature_cache_bytes: int = 2 * 2**30,
    ):
        check_processor(model, processor)
        self.processor = processor
        self.temperature = temperature
        self.repetition_penalty = repetition_penalty
        self.max_completion_length = max_completion_length
        self.spans = SpanFinder(processor.tokenizer)
        self.eos_token_ids = eos_token_ids(model, processor.tokenizer)
        self.pad_token_id = pad_token_id(model, processor.tokenizer, self.eos_token_ids)
        self.suppressed = suppressed_tokens(model, processor, self.eos_token_ids)
        self.max_length: int | None = model.config.get_text_config().to_dict().get("max_position_embeddings")
        """Tokens that the model was made for; `None` if its config doesn't say."""
        self.positions_follow_mask = positions_follow_mask(model)
        self._is_text = ~self.suppressed.numpy()
        self._is_text[self.eos_token_ids] = False
        self.encoder = PromptEncoder(processor, self.pad_token_id, feature_cache_bytes)

    @classmethod
    def from_settings(cls, model: Any, processor: Any, settings: SamplingSettings) -> VLMPolicy:
        return cls(
            model,
            processor,
            temperature=settings.temperature,
            repetition_penalty=settings.repetition_penalty,
            max_completion_length=settings.max_completion_length,
            feature_cache_bytes=int(settings.feature_cache_gb * 2**30),
        )

    def check_history(self, prompt: str, image: Pictures) -> None:
        """Raise a `ValueError` if the model can't be shown so much of the past, or if that makes prompts too long.

        Args:
            prompt, image: An example with as many earlier turns as a prompt can have, their responses left out.
        """
        turns = turns_before(prompt)
        if not turns:
            return
        images = sum(turn.image is not None for turn in turns)
        self.encoder.check_history(with_images=images > 0)
        [length] = self.encoder.lengths([prompt], [image])
        longest = length + (len(turns) + 1) * self.max_completion_length
        if self.max_length is not None and longest > self.max_length:
            raise ValueError(
                f"With history_turns={len(turns)} and history_images={images}, a prompt and its response can have "
                f"{longest} tokens ({length}, and {len(turns) + 1} responses of up to max_completion_length="
                f"{self.max_completion_length}), but the model takes {self.max_length}. Lower one of the three, or "
                "shorten the task's `earlier_prompt`."
            )

    def encode_response(self, text: str) -> np.ndarray:
        """Encode a response that the model didn't generate, with EOS appended.

        Everything is encoded as plain text, even if it spells a special token ("<image>", "</s>").
        """
        ids = self.processor.tokenizer.encode(text, add_special_tokens=False)
        if not self.is_text(ids):
            ids = self._text_tokenizer.encode(text, add_special_tokens=False)
        return np.array([*ids, self.eos_token_ids[0]], dtype=np.int64)

    def is_text(self, ids: Sequence[int] | np.ndarray) -> bool:
        """Whether all ids are known to the model and none is special (EOS, `<image>`, an unknown character)."""
        kept = np.asarray(ids, dtype=np.int64)
        return bool((kept < len(self._is_text)).all() and self._is_text[kept].all())

    @cached_property
    def _text_tokenizer(self) -> Any:
        """A tokenizer that encodes special tokens as plain text. A copy, since prompts need their special tokens and a
        fast tokenizer's setting applies to all threads."""
        tokenizer = copy.deepcopy(self.processor.tokenizer)
        tokenizer.split_special_tokens = True
        return tokenizer

    def read_generation(self, ids: np.ndarray, logprobs: np.ndarray | None = None) -> Generation:
        """Cut sampled ids after the first EOS, and add their text and, if available, log-probs."""
        ends = np.flatnonzero(np.isin(ids, self.eos_token_ids))
        length = ends[0] + 1 if len(ends) else len(ids)
        return Generation(
            ids=ids[:length],
            text=self.spans.text(ids[:length]),
            hit_length_limit=len(ends) == 0,
            logprobs=None if logprobs is None else logprobs[:length],
        )

    def score(
        self,
        module: nn.Module,
        prompts: Sequence[str],
        images: Sequence[Pictures],
        response_ids: Sequence[np.ndarray],
        action_starts: Sequence[int],
        thought_prob_coef: float,
        *,
        with_entropy: bool = False,
        shape: BatchShape | None = None,
    ) -> Scores:
        """Log-probs of responses under the distribution that an engine samples from, and the states' values.

        With a `shape`, the batch is padded to it. Kernel rounding depends on tensor shapes: with a fixed shape, a
        sample's results are bitwise identical whatever else is in its batch.
        """
        samples, longest = len(prompts), max(len(ids) for ids in response_ids)
        if shape is not None:
            prompts, images, response_ids, action_starts = (
                [*items, *[items[-1]] * (shape.rows - samples)]
                for items in (prompts, images, response_ids, action_starts)
            )
        inputs, ids, mask = self._with_responses(module, prompts, images, response_ids, shape)
        length = ids.shape[1]
        logits, value = module(inputs, length)
        logprobs, entropy = token_logprobs(
            logits,
            ids,
            temperature=self.temperature,
            suppressed=self.suppressed.to(logits.device),
            repetition_penalty=self.repetition_penalty,
            prompt_ids=inputs["input_ids"][:, :-length],
            prompt_mask=inputs["attention_mask"][:, :-length],
            with_entropy=with_entropy,
        )
        logprobs = torch.where(mask, logprobs, logprobs.new_zeros(()))
        starts = torch.as_tensor(action_starts, device=logits.device)
        total, thought, action = weighted_logprob(logprobs, mask, starts, thought_prob_coef)
        if entropy is not None:
            entropy = torch.where(mask, entropy, entropy.new_zeros(())).sum(1) / mask.sum(1)
        return Scores(
            total[:samples],
            thought[:samples],
            action[:samples],
            logprobs[:samples, :longest],
            mask[:samples, :longest],
            starts[:samples],
            None if value is None else value[:samples],
            None if entropy is None else entropy[:samples],
        )

    def score_tokens(
        self,
        module: nn.Module,
        prompts: Sequence[str],
        images: Sequence[Pictures],
        target_ids: Sequence[np.ndarray],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of given ids at temperature 1 with nothing suppressed, for supervised learning.

        Returns log-probs (0 in padding) and the mask, both `(B, T)`.
        """
        inputs, ids, mask = self._with_responses(module, prompts, images, target_ids)
        logits, _ = module(inputs, ids.shape[1])
        logprobs, _ = token_logprobs(logits, ids)
        return torch.where(mask, logprobs, logprobs.new_zeros(())), mask

    def values(self, module: nn.Module, prompts: Sequence[str], images: Sequence[Pictures]) -> torch.Tensor:
        """Values of states without a response, `(B,)`. The network must have a value head."""
        value = module(self._with_positions(self._to_device(module, self.encoder.encode(prompts, images))), 0)[1]
        if value is None:
            raise ValueError("This network has no value head: build `PolicyWithValue` with one to get values.")
        return value

    def largest_shape(
        self, prompts: Sequence[str], images: Sequence[Pictures], responses: Sequence[np.ndarray], rows: int
    ) -> BatchShape:
        """A shape that fits any `rows` of these samples."""
        return BatchShape(rows, max(self.encoder.lengths(prompts, images)), max(len(ids) for ids in responses))

    def _with_responses(
        self,
        module: nn.Module,
        prompts: Sequence[str],
        images: Sequence[Pictures],
        responses: Sequence[np.ndarray],
        shape: BatchShape | None = None,
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Inputs `[padding | prompt | response | padding]`, and the responses' ids and mask, both `(B, T)`."""
        inputs = self._to_device(module, self.encoder.encode(prompts, images, shape.prompt_tokens if shape else 0))
        device = inputs["input_ids"].device
        rows = [torch.as_tensor(np.asarray(response))[None] for response in responses]
        longest = shape.response_tokens if shape else 0
        ids = pad_and_cat(rows, self.pad_token_id, at_least=longest).to(device)
        mask = pad_and_cat([torch.ones_like(row) for row in rows], at_least=longest).to(device)
        prompt_shape = inputs["input_ids"].shape
        for key, tensor in inputs.items():
            # other keys (mm_token_type_ids) are 0 for generated text
            if tensor.shape == prompt_shape:
                more = {"input_ids": ids, "attention_mask": mask}.get(key, torch.zeros_like(ids))
                inputs[key] = torch.cat([tensor, more.to(tensor.dtype)], dim=1)
        return self._with_positions(inputs), ids, mask.bool()

    def _with_positions(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Number tokens as `generate` does. By default the model would count padding too: the same up to rounding, but
        bfloat16 rounds the rotations so much that a log-prob would depend on its batch."""
        if self.positions_follow_mask:
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(0)
        return inputs

    @staticmethod
    def _to_device(module: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parameter = next(module.parameters())
        return {key: tensor.to(parameter.device) for key, tensor in batch.items()}
