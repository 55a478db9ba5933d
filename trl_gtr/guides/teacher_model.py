"""The teacher as a model: a copy of the trained one that shares every weight which isn't merged."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from ..policy.loading import is_quantized, tied_weights, unwrap_adapter
from .merging import FullWeight, LoraWeight, Weight

QUANTIZED = (
    "A merged teacher needs weights that can be added up, and this model's are quantized: load it without "
    "quantization (bfloat16 halves the memory), or use a corrector as the guide."
)
_MAX_LISTED = 3


def make_teacher(model: Any) -> tuple[Any, list[Weight]]:
    """A teacher that equals the model as it is now, and the weights that merging changes.

    Args:
        model: The model in training, with or without an adapter. The teacher has none: a merge of adapters has a
            higher rank than each of them, so it is merged into the teacher's own copy of the layers' weights.
    """
    check_mergeable(model)
    layers = _lora_layers(model) if isinstance(model, PeftModel) else {}
    sources = (
        {name: layer.get_base_layer().weight for name, layer in layers.items()}
        if layers
        else {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    )
    own = {id(weight): nn.Parameter(weight.detach().clone(), requires_grad=False) for weight in sources.values()}
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    teacher = copy.deepcopy(model, {**shared, **own})  # tied weights stay tied
    if isinstance(teacher, PeftModel):
        teacher = teacher.unload()
    teacher.gradient_checkpointing_disable()  # it never has gradients
    teacher.eval()
    return teacher, _weights(sources, own, layers, model)


def _weights(
    sources: Mapping[str, nn.Parameter], own: Mapping[int, nn.Parameter], layers: Mapping[str, Any], model: Any
) -> list[Weight]:
    if not layers:
        return [FullWeight(name, own[id(weight)], weight) for name, weight in sources.items()]
    weights: list[Weight] = []
    adapter = model.active_adapter
    for name, layer in layers.items():
        base = sources[name]
        down, up = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        scale, transposed = float(layer.scaling[adapter]), bool(layer.fan_in_fan_out)
        weights.append(LoraWeight(name, own[id(base)], base, down, up, scale, transposed))
        with torch.no_grad():
            weights[-1].write(weights[-1].current())  # an adapter that was passed in isn't 0 at the start
    return weights


def _lora_layers(model: PeftModel) -> dict[str, Any]:
    """The linear layers with the active adapter, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LoraLinear) and model.active_adapter in module.lora_A
    }


def check_mergeable(model: Any) -> None:
    """Raise a `ValueError` with a fix if the model's past can't be merged."""
    if is_quantized(unwrap_adapter(model)):
        raise ValueError(QUANTIZED)
    if not isinstance(model, PeftModel):
        return
    layers, adapter = _lora_layers(model), model.active_adapter
    known = {id(each[adapter].weight) for layer in layers.values() for each in (layer.lora_A, layer.lora_B)}
    other = [name for name, weight in model.named_parameters() if weight.requires_grad and id(weight) not in known]
    shared = tied_weights(model)
    tied = [name for name, layer in layers.items() if id(layer.get_base_layer().weight) in shared]
    if tied:
        raise ValueError(
            f"A merged teacher can't have an adapter on a tied weight ({', '.join(tied)}): merged into it, it would "
            "change the other layer too. Leave it out of `target_modules`."
        )
    if other:
        more = f" and {len(other) - _MAX_LISTED} more" if len(other) > _MAX_LISTED else ""
        raise ValueError(
            "A merged teacher needs an adapter that is plain LoRA on linear layers (no DoRA, no trained biases, no "
            f"`modules_to_save`), but these are trained too: {', '.join(other[:_MAX_LISTED])}{more}."
        )
