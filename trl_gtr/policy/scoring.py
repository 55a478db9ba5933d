"""The agent: a vision-language model with a value head, that responds and scores its responses.

[`VLMPolicy`] knows the words (processor, chat template, padding, which ids may be sampled). [`PolicyWithValue`] is the
network: one forward pass gives the logits of the response and the value of the state. They are apart so that the
network can be wrapped (DDP, DeepSpeed) and unwrapped while the words stay.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from ..types import Generation
from .action_logprobs import SpanFinder, penalize_repetition, token_logprobs, weighted_logprob
from .loading import (
    check_processor,
    eos_token_ids,
    pad_token_id,
    positions_follow_mask,
    suppressed_tokens,
    unwrap_adapter,
)
from .prompts import PromptEncoder, pad_and_cat
from .scores import Scores


class ValueHead(nn.Module):
    """An MLP from the trunk's last hidden state to the value of the state: `(B, hidden) → (B,)`.

    It stays in float32 beside a bf16 trunk. The last layer starts at zero: before anything is learned every value is
    0, and the first value loss does not shake the trunk.
    """

    def __init__(self, hidden_size: int, sizes: Sequence[int] = (1024, 512)):
        super().__init__()
        widths = [hidden_size, *sizes]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        last = nn.Linear(widths[-1], 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(*layers, last)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return self.layers(hidden.to(next(self.parameters()).dtype)).squeeze(-1).float()


class PolicyWithValue(nn.Module):
    """A VLM and, where states are valued, a value head on the same trunk."""

    def __init__(self, policy: nn.Module, value_head: nn.Module | None, detach_value: bool = False):
        super().__init__()
        self.policy = policy
        self.value_head = value_head
        self.detach_value = detach_value

    def forward(
        self, inputs: dict[str, torch.Tensor], response_length: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return policy_and_value_forward(
            self.policy, self.value_head, inputs, response_length, detach_value=self.detach_value
        )


def policy_and_value_forward(
    policy: Any,
    value_head: nn.Module | None,
    inputs: dict[str, torch.Tensor],
    response_length: int,
    detach_value: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One forward pass over `[prompt | response]`.

    Args:
        inputs: the model's arguments; every row's response (padding included) fills the last `response_length` places.
        response_length: 0 to get nothing but values.
        detach_value: keep the value loss from reaching the trunk.

    Returns:
        Logits `(B, response_length, V)`, each predicting the response token of its place, and values `(B,)` of the
        state that the last prompt token has seen; `None` without a value head.
    """
    kept = response_length + 1  # from the last prompt token on
    trunk_states: list[torch.Tensor] = []
    # What enters the LM head is the trunk's last-layer state. A hook takes it from the model's own forward pass: no
    # second pass, no hidden states of the other layers kept, and whatever the family does to its logits is done.
    base = unwrap_adapter(policy)
    head = base.get_output_embeddings()
    if head is None:
        output = policy(**inputs, use_cache=False, output_hidden_states=True)
        states = output.hidden_states[-1]
    else:
        hook = head.register_forward_pre_hook(lambda _, args: trunk_states.append(args[0]))
        can_choose = "logits_to_keep" in inspect.signature(base.forward).parameters
        try:
            output = policy(**inputs, use_cache=False, **({"logits_to_keep": kept} if can_choose else {}))
        finally:
            hook.remove()
        states = trunk_states[-1]
    state = states[:, -kept]
    value = None if value_head is None else value_head(state.detach() if detach_value else state)
    return output.logits[:, -kept:-1], value


class BatchShape(NamedTuple):
    """What a batch is filled up to."""

    rows: int
    prompt_tokens: int
    response_tokens: int


class SampledDistribution(LogitsProcessor):
    """The same suppression and repetition penalty in `generate` as in `token_logprobs`.

    Transformers' own penalty would also count the padding of a batch as seen: wrong where padding and EOS are one id.
    """

    def __init__(self, suppressed: torch.Tensor, repetition_penalty: float, prompt_mask: torch.Tensor):
        self.suppressed = suppressed
        self.repetition_penalty = repetition_penalty
        self.padding = ~prompt_mask.bool()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if torch.isnan(scores).any():
            raise FloatingPointError("the logits of generation are not finite")
        if self.repetition_penalty != 1.0:
            prompt_length = self.padding.shape[1]
            last = input_ids[:, prompt_length - 1 : prompt_length]
            prompt = torch.where(self.padding, last, input_ids[:, :prompt_length])
            tokens = torch.cat([prompt, input_ids[:, prompt_length:]], dim=1).clamp(max=scores.shape[1])
            seen = scores.new_zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.bool)
            seen.scatter_(1, tokens, True)
            scores = penalize_repetition(scores, seen[:, :-1], self.repetition_penalty)
        return scores.masked_fill(self.suppressed, -torch.inf)


class VLMPolicy:
    """How a model is asked and how its answers are scored.

    It holds no network: each method takes the one to use. `generate` wants the bare model, the others a
    [`PolicyWithValue`], wrapped or not.

    Args:
        model: where the ids of EOS and padding, the vocabulary's size and the image tokens are read from.
        processor: the model's processor.
        temperature, repetition_penalty, max_completion_length: of sampling; scoring knows them too.
        feature_cache_bytes: memory for processed prompts and images. What does not fit is processed again.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        temperature: float = 1.0,
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
        self.positions_follow_mask = positions_follow_mask(model)
        self._is_text = ~self.suppressed.numpy()
        self._is_text[self.eos_token_ids] = False
        self.encoder = PromptEncoder(processor, self.pad_token_id, feature_cache_bytes)

    def encode_response(self, text: str) -> np.ndarray:
        """Ids of a response that someone else wrote, EOS included.

        Text is encoded as text: where it spells a special token ("<image>", "</s>"), that token is not meant.
        """
        ids = self.processor.tokenizer.encode(text, add_special_tokens=False)
        if not self.is_text(ids):
            ids = self._text_tokenizer.encode(text, add_special_tokens=False)
        return np.array([*ids, self.eos_token_ids[0]], dtype=np.int64)

    def is_text(self, ids: Sequence[int] | np.ndarray) -> bool:
        """Whether no id is a special token (EOS, `<image>`, an unknown character), nor unknown to the model."""
        kept = np.asarray(ids, dtype=np.int64)
        return bool((kept < len(self._is_text)).all() and self._is_text[kept].all())

    @cached_property
    def _text_tokenizer(self) -> Any:
        """The tokenizer with eyes for nothing but text. A copy: the prompts need their special tokens, and a fast
        tokenizer holds the setting for all threads."""
        tokenizer = copy.deepcopy(self.processor.tokenizer)
        tokenizer.split_special_tokens = True
        return tokenizer

    @torch.no_grad()
    def generate(
        self, model: Any, prompts: Sequence[str], images: Sequence[np.ndarray], *, greedy: bool = False
    ) -> list[Generation]:
        """One response per prompt and image, in one batch; sampled with torch's global generator unless `greedy`."""
        model = unwrap_adapter(model)
        inputs = self._to_device(model, self.encoder.encode(prompts, images))
        prompt_length = inputs["input_ids"].shape[1]
        sampling = {} if greedy else {"temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        config = GenerationConfig(
            max_new_tokens=self.max_completion_length,
            do_sample=not greedy,
            eos_token_id=self.eos_token_ids,
            pad_token_id=self.pad_token_id,
            use_cache=True,
            **sampling,
        )
        shape = SampledDistribution(
            self.suppressed.to(model.device), self.repetition_penalty, inputs["attention_mask"]
        )
        with _evaluation_mode(model), _bare_generation_config(model):
            sequences = model.generate(
                **inputs,
                generation_config=config,
                logits_processor=LogitsProcessorList([shape]),
                synced_gpus=False,  # each process plays its own episodes; ZeRO-3's weights are gathered before
            )
        rows = sequences[:, prompt_length:].cpu().numpy()
        return [self._generation(row) for row in rows]

    def _generation(self, row: np.ndarray) -> Generation:
        ends = np.flatnonzero(np.isin(row, self.eos_token_ids))
        ids = row[: ends[0] + 1] if len(ends) else row
        return Generation(ids=ids, text=self.spans.text(ids), hit_length_limit=len(ends) == 0)

    def score(
        self,
        module: nn.Module,
        prompts: Sequence[str],
        images: Sequence[np.ndarray],
        response_ids: Sequence[np.ndarray],
        action_starts: Sequence[int],
        thought_prob_coef: float,
        *,
        with_entropy: bool = False,
        shape: BatchShape | None = None,
    ) -> Scores:
        """Log-probs of responses under the distribution that `generate` samples from, and the states' values.

        With a `shape` the batch is filled up to it. Kernels round by the shape of what they are given: under one shape
        a sample's numbers are the same, bit by bit, whatever else is in its batch.
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
        images: Sequence[np.ndarray],
        target_ids: Sequence[np.ndarray],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of given ids at temperature 1 with nothing suppressed, as supervised learning wants them.

        Returns log-probs, 0 in padding, and the mask; both `(B, T)`.
        """
        inputs, ids, mask = self._with_responses(module, prompts, images, target_ids)
        logits, _ = module(inputs, ids.shape[1])
        logprobs, _ = token_logprobs(logits, ids)
        return torch.where(mask, logprobs, logprobs.new_zeros(())), mask

    def values(self, module: nn.Module, prompts: Sequence[str], images: Sequence[np.ndarray]) -> torch.Tensor:
        """Values of states without a response, `(B,)`."""
        return module(self._with_positions(self._to_device(module, self.encoder.encode(prompts, images))), 0)[1]

    def largest_shape(
        self, prompts: Sequence[str], images: Sequence[np.ndarray], responses: Sequence[np.ndarray], rows: int
    ) -> BatchShape:
        """The shape that any `rows` of these samples fit into."""
        return BatchShape(rows, max(self.encoder.lengths(prompts, images)), max(len(ids) for ids in responses))

    def _with_responses(
        self,
        module: nn.Module,
        prompts: Sequence[str],
        images: Sequence[np.ndarray],
        responses: Sequence[np.ndarray],
        shape: BatchShape | None = None,
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """`[padding | prompt | response | padding]`; and ids `(B, T)` and mask `(B, T)` of the responses."""
        inputs = self._to_device(module, self.encoder.encode(prompts, images, shape.prompt_tokens if shape else 0))
        device = inputs["input_ids"].device
        rows = [torch.as_tensor(np.asarray(response))[None] for response in responses]
        longest = shape.response_tokens if shape else 0
        ids = pad_and_cat(rows, self.pad_token_id, at_least=longest).to(device)
        mask = pad_and_cat([torch.ones_like(row) for row in rows], at_least=longest).to(device)
        prompt_shape = inputs["input_ids"].shape
        for key, tensor in inputs.items():
            # other keys (mm_token_type_ids) say 0 of generated text
            if tensor.shape == prompt_shape:
                more = {"input_ids": ids, "attention_mask": mask}.get(key, torch.zeros_like(ids))
                inputs[key] = torch.cat([tensor, more.to(tensor.dtype)], dim=1)
        return self._with_positions(inputs), ids, mask.bool()

    def _with_positions(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Number tokens as `generate` does. Left to itself the model would count a row's padding too: the same up to
        rounding, but bfloat16 rounds the rotations so much that a log-prob depends on its batch."""
        if self.positions_follow_mask:
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(0)
        return inputs

    @staticmethod
    def _to_device(module: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parameter = next(module.parameters())
        return {key: tensor.to(parameter.device) for key, tensor in batch.items()}


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout inside; afterwards each submodule is in the mode it was in before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _bare_generation_config(model: Any) -> Iterator[None]:
    """`generate` fills what a config leaves open from the checkpoint's own: a hidden top_k or penalty there would make
    the sampled distribution another one than the scored one."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
