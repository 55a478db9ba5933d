"""A policy's weights, or its adapter, and its value head: from a checkpoint's folder into the modules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from peft import PeftModel, load_peft_weights, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn

from .loading import unwrap_adapter

VALUE_HEAD_FILE = "value_head.safetensors"


def save_value_head(folder: str | Path, state: Mapping[str, torch.Tensor]) -> None:
    save_file(dict(state), Path(folder) / VALUE_HEAD_FILE)


def load_value_head(folder: str | Path, value_head: nn.Module) -> None:
    value_head.load_state_dict(load_file(Path(folder) / VALUE_HEAD_FILE))


def load_policy_weights(folder: str | Path, policy: nn.Module) -> None:
    """Put a checkpoint's weights, or its adapter, into `policy`."""
    if isinstance(policy, PeftModel):
        weights = load_peft_weights(str(folder), device="cpu")
        outcome = set_peft_model_state_dict(policy, weights, adapter_name=policy.active_adapter)
        trained = {name for name, weight in policy.named_parameters() if weight.requires_grad}
        foreign = [*outcome.unexpected_keys, *trained.intersection(outcome.missing_keys)]
        if foreign:
            raise ValueError(f"{folder} holds an adapter of another shape: {foreign[:3]} …")
        return
    model = unwrap_adapter(policy)
    # Through from_pretrained, not load_state_dict: a checkpoint's keys may be named otherwise than the module's.
    saved = type(model).from_pretrained(folder, dtype=next(model.parameters()).dtype)
    with torch.no_grad():
        model.load_state_dict(saved.state_dict())
