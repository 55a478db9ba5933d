"""Generation with transformers, using the trained model itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from trl.models.utils import unwrap_model_for_generation

from ..policy.loading import unwrap_adapter
from ..policy.logprobs import penalize_repetition
from ..policy.network import PolicyWithValue
from ..policy.scoring import VLMPolicy
from ..types import Generation, Pictures
from .base import Engine


class SampledDistribution(LogitsProcessor):
    """Applies the same token suppression and repetition penalty in `generate` as in `token_logprobs`.

    Transformers' own penalty also counts padding as seen, which is wrong where padding and EOS share an id.
    """

    def __init__(self, suppressed: torch.Tensor, repetition_penalty: float, prompt_mask: torch.Tensor):
        self.suppressed = suppressed
        self.repetition_penalty = repetition_penalty
        self.padding = ~prompt_mask.bool()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if torch.isnan(scores).any():
            raise FloatingPointError("generation produced NaN logits")
        if self.repetition_penalty != 1.0:
            prompt_length = self.padding.shape[1]
            last = input_ids[:, prompt_length - 1 : prompt_length]
            prompt = torch.where(self.padding, last, input_ids[:, :prompt_length])
            tokens = torch.cat([prompt, input_ids[:, prompt_length:]], dim=1).clamp(max=scores.shape[1])
            seen = scores.new_zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.bool)
            seen.scatter_(1, tokens, True)
            scores = penalize_repetition(scores, seen[:, :-1], self.repetition_penalty)
        return scores.masked_fill(self.suppressed, -torch.inf)


class TransformersEngine(Engine):
    """Samples with `model.generate`. No `sync` is needed, since it uses the weights of the model being trained.

    Args:
        policy: Encodes prompts and defines the distribution to sample from.
        model: A vision-language model, or a [`PolicyWithValue`] around one, as prepared by `accelerator`.
        accelerator: Sets the mixed precision and unwraps the prepared model; `None` for a plain model.
        temperature: For sampling; `None`: the policy's.
        top_k: Sample from this many of the likeliest tokens; 0: from all, as the policy is scored.
    """

    def __init__(
        self,
        policy: VLMPolicy,
        model: Any,
        *,
        accelerator: Accelerator | None = None,
        temperature: float | None = None,
        top_k: int = 0,
    ) -> None:
        self.policy, self.network, self.accelerator = policy, model, accelerator
        self.temperature, self.top_k = policy.temperature if temperature is None else temperature, top_k
        bare = model if accelerator is None else accelerator.unwrap_model(model)
        self.model: Any = bare.policy if isinstance(bare, PolicyWithValue) else bare

    @contextmanager
    def ready(self) -> Iterator[None]:
        if self.accelerator is None:
            yield
            return
        with unwrap_model_for_generation(self.network, self.accelerator):
            yield

    def prepare(self, prompts: Sequence[str], images: Sequence[Pictures]) -> None:
        """Process and cache the images."""
        self.policy.encoder.prepare(prompts, images)

    @torch.no_grad()
    def generate(self, prompts: Sequence[str], images: Sequence[Pictures], greedy: bool = False) -> list[Generation]:
        """Generate one response per prompt and image in one batch, using torch's global RNG unless `greedy`."""
        policy, model = self.policy, unwrap_adapter(self.model)
        inputs = {key: tensor.to(model.device) for key, tensor in policy.encoder.encode(prompts, images).items()}
        prompt_length = inputs["input_ids"].shape[1]
        processor = SampledDistribution(
            policy.suppressed.to(model.device), policy.repetition_penalty, inputs["attention_mask"]
        )
        autocast = nullcontext() if self.accelerator is None else self.accelerator.autocast()
        with autocast, _evaluation_mode(model), _bare_generation_config(model):
            sequences = model.generate(
                **inputs,
                generation_config=self._generation_config(greedy),
                logits_processor=LogitsProcessorList([processor]),
                synced_gpus=False,  # each process plays its own episodes; ZeRO-3 weights are already gathered
            )
        return [policy.read_generation(row) for row in sequences[:, prompt_length:].cpu().numpy()]

    def _generation_config(self, greedy: bool) -> GenerationConfig:
        sampling = {} if greedy else {"temperature": self.temperature, "top_k": self.top_k, "top_p": 1.0}
        return GenerationConfig(
            max_new_tokens=self.policy.max_completion_length,
            do_sample=not greedy,
            eos_token_id=self.policy.eos_token_ids,
            pad_token_id=self.policy.pad_token_id,
            use_cache=True,
            **sampling,
        )


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Disable dropout; each submodule's mode is restored on exit."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _bare_generation_config(model: Any) -> Iterator[None]:
    """Hide the checkpoint's generation config: `generate` takes unset fields from it, and a top_k or penalty in there
    would make the sampled distribution differ from the scored one."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
