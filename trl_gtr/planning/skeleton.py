"""The run's model without weights, built on the meta device from the checkpoint's config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText
from trl import ModelConfig, get_peft_config, get_quantization_config

from .. import tiny_llava
from ..policy.loading import base_model_name, check_source, load_processor, lora_target_modules
from ..policy.network import PolicyWithValue, ValueHead


@dataclass(frozen=True)
class Skeleton:
    """Shapes and dtypes of the trained model, with the real processor."""

    module: PolicyWithValue
    """Policy (with its adapter) and value head; all tensors on the meta device."""
    processor: Any
    config: Any
    lora_targets: Sequence[str]
    """Names of the layers with an adapter; empty if the full model is trained."""

    @property
    def frozen(self) -> list[nn.Parameter]:
        return [weight for weight in self.module.parameters() if not weight.requires_grad]

    @property
    def trained(self) -> list[nn.Parameter]:
        """Trained parameters of the policy, without the value head."""
        return [weight for weight in self.module.policy.parameters() if weight.requires_grad]

    @property
    def merged(self) -> list[nn.Parameter]:
        """The weights of which a merged teacher has its own: those that are trained, or that have an adapter."""
        if not self.lora_targets:
            return self.trained
        return [module.get_base_layer().weight for module in self.module.modules() if isinstance(module, LoraLinear)]

    @property
    def value_head(self) -> list[nn.Parameter]:
        head = self.module.value_head
        return [] if head is None else list(head.parameters())

    @property
    def base_parameters(self) -> int:
        """Parameters of the checkpoint, without adapter and value head."""
        return numbers(self.frozen) if self.lora_targets else numbers(self.trained)

    def targets_by_part(self) -> dict[str, int]:
        """Number of adapted layers in the vision tower, the projector and the language model."""
        return dict(Counter(_part(name) for name in self.lora_targets))

    def kv_bytes_per_token(self, bytes_per_number: int) -> int:
        """KV cache of one token, over all layers of the language model."""
        text = self.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return 2 * text.num_hidden_layers * heads * head_dim * bytes_per_number


def build_skeleton(model_args: ModelConfig, value_head_sizes: Sequence[int] | None, detach_value: bool) -> Skeleton:
    """Build what `load_model` and the trainer would, without weights.

    Args:
        value_head_sizes: `None` for no value head.

    Raises:
        ValueError: There is no such model, or its config is neither in a folder nor in the Hub's cache.
    """
    if not model_args.model_name_or_path:
        raise ValueError("Which model? Set --model_name_or_path to a name, a folder, or `tiny`.")
    if get_quantization_config(model_args) is not None:
        raise ValueError("Plans don't support quantized weights: leave out load_in_4bit and load_in_8bit.")
    name = model_args.model_name_or_path
    if name in tiny_llava.VARIANTS:
        name = str(tiny_llava.path(name))
    source: dict[str, Any] = {"revision": model_args.model_revision}
    check_source(name, **source)
    name, source["revision"] = base_model_name(name, model_args.model_revision)
    config = AutoConfig.from_pretrained(name, **source)
    processor = load_processor(name, **source)
    dtype = config.dtype if model_args.dtype == "auto" else getattr(torch, model_args.dtype or "float32")
    options = {"attn_implementation": model_args.attn_implementation} if model_args.attn_implementation else {}
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype or torch.float32, **options)
        targets: Sequence[str] = ()
        peft_config = get_peft_config(model_args)
        if peft_config is not None:
            if model_args.lora_target_modules is None:
                peft_config.target_modules = set(lora_target_modules(model))
            model = get_peft_model(model, peft_config)
            targets = model.targeted_module_names
        value_head = None
        if value_head_sizes is not None:
            value_head = ValueHead(config.get_text_config().hidden_size, value_head_sizes)
    return Skeleton(PolicyWithValue(model, value_head, detach_value), processor, config, targets)


def numbers(weights: Sequence[nn.Parameter]) -> int:
    return sum(weight.numel() for weight in weights)


def size(weights: Sequence[nn.Parameter]) -> int:
    """In bytes."""
    return sum(weight.numel() * weight.element_size() for weight in weights)


def _part(name: str) -> str:
    """`model.vision_tower.layers.0.q_proj` → `vision_tower`."""
    first, _, rest = name.partition(".")
    return rest.partition(".")[0] if first == "model" else first
