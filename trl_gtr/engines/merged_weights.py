"""The trained weights for an engine that keeps a copy: named as in the plain model, with the adapter merged in."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from ..policy.loading import is_quantized, tied_weights, unwrap_adapter


@torch.no_grad()
def merged_weights(policy: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and weight of each parameter, as if the adapter had been merged. Tied weights come once.

    The policy itself doesn't change: its layers are merged one at a time, each in a copy. Merging in place and
    subtracting afterwards would round the frozen weights a little more after every update.
    """
    base = unwrap_adapter(policy)
    changed = dict(_changed_modules(base))
    inside = tuple(f"{name}." for name in changed)
    for name, weight in base.named_parameters():
        if not name.startswith(inside):
            yield name, weight.detach()
    for place, module in changed.items():
        for name, weight in _merged(module, policy.active_adapter).named_parameters():
            yield f"{place}.{name}", weight.detach()


def check_mergeable(policy: Any) -> None:
    """Raise a `ValueError` with a fix if an engine's copy couldn't have the policy's weights."""
    base = unwrap_adapter(policy)
    remedy = "or generate with engine='transformers'"
    if is_quantized(base):
        raise ValueError(f"vLLM can't get new weights for a quantized model: load it without quantization, {remedy}.")
    if not isinstance(policy, PeftModel):
        return
    shared = tied_weights(base)
    for name, module in _changed_modules(base):
        own = module.original_module if isinstance(module, ModulesToSaveWrapper) else module.get_base_layer()
        if any(id(weight) in shared for weight in own.parameters()):
            raise ValueError(
                f"The adapter changes {name}, whose weight another layer shares: a merged copy would change both. "
                f"Leave it out of the adapter, {remedy}."
            )


def _changed_modules(base: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules that an adapter changes or replaces, by name in the plain model."""
    for name, module in base.named_modules():
        if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper) and ".modules_to_save." not in name:
            yield name, module


def _merged(module: Any, adapter: str) -> nn.Module:
    """A module without adapter that computes the same."""
    if isinstance(module, ModulesToSaveWrapper):
        trained = module.modules_to_save
        return trained[adapter] if adapter in trained else module.original_module  # noqa: SIM401 (it has no `get`)
    merged = copy.deepcopy(module)
    merged.merge(adapter_names=[adapter])
    return merged.get_base_layer()
