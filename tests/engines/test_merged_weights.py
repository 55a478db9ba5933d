"""An engine's copy of the weights: the adapter is merged in it, and untouched in the learner."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from trl_gtr import lora_target_modules
from trl_gtr.engines.merged_weights import check_mergeable, merged_weights


def with_adapter(model: Any, **options: Any) -> Any:
    """The model with an adapter that isn't 0, on all layers."""
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=lora_target_modules(model), init_lora_weights=False, **options)
    return get_peft_model(model, config)


def test_a_plain_models_weights_come_as_they_are(tiny_vlm: Any) -> None:
    model, _ = tiny_vlm()
    sent = dict(merged_weights(model))
    own = dict(model.named_parameters())
    assert sent.keys() == own.keys()
    assert all(torch.equal(sent[name], own[name]) for name in own)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_adapters_are_merged_in_the_copy_alone(tiny_vlm: Any, options: dict[str, Any]) -> None:
    model, _ = tiny_vlm()
    names = [name for name, _ in model.named_parameters()]
    policy = with_adapter(model, **options)
    policy.train()
    if "modules_to_save" in options:
        with torch.no_grad():
            model.lm_head.modules_to_save["default"].weight += 1
    before = {name: weight.clone() for name, weight in policy.named_parameters()}
    sent = dict(merged_weights(policy))
    after = dict(policy.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    expected = dict(copy.deepcopy(policy).merge_and_unload().named_parameters())
    assert sent.keys() == expected.keys() == set(names)
    assert all(torch.allclose(sent[name], expected[name], atol=1e-6) for name in expected)
    changed = [name for name in names if not torch.equal(sent[name], tiny_vlm()[0].get_parameter(name))]
    for part in ("language_model", "vision_tower", "multi_modal_projector"):
        assert any(part in name for name in changed)


def test_an_adapter_on_a_tied_weight_is_refused(tiny_vlm: Any) -> None:
    model, _ = tiny_vlm()
    check_mergeable(model)
    model.lm_head.weight = model.get_input_embeddings().weight
    check_mergeable(with_adapter(copy.deepcopy(model)))
    tied = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="lm_head, whose weight another layer shares"):
        check_mergeable(tied)


def test_a_quantized_model_is_refused(tiny_vlm: Any) -> None:
    model, _ = tiny_vlm()
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(ValueError, match="quantized"):
        check_mergeable(model)
