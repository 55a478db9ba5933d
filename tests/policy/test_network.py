"""The network with and without a value head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vlms import FAMILIES, some_images, some_prompts

from trl_gtr.policy.network import PolicyWithValue, ValueHead
from trl_gtr.policy.scoring import VLMPolicy


@pytest.fixture(scope="module", params=FAMILIES)
def agent(request: Any, tiny_vlm: Any) -> Any:
    return tiny_vlm(request.param)


@torch.no_grad()
def test_without_a_value_head_there_are_log_probs_and_no_values(agent: Any) -> None:
    model, processor = agent
    policy = VLMPolicy(model, processor, temperature=1.0)
    prompts, images = some_prompts(4), some_images(4)
    responses = [policy.encode_response('{"action": "stand"}')] * 4
    alone = policy.score(PolicyWithValue(model, None), prompts, images, responses, [0] * 4, 0.5)
    both = policy.score(PolicyWithValue(model, ValueHead(32, (16,))), prompts, images, responses, [0] * 4, 0.5)
    assert alone.value is None
    assert both.value is not None
    assert torch.equal(alone.token_logprobs, both.token_logprobs)


def test_nothing_is_computed_or_learned_for_a_missing_value_head(tiny_vlm: Any) -> None:
    model, processor = tiny_vlm()
    network = PolicyWithValue(model, None)
    assert {*network.parameters()} == {*model.parameters()}
    hooked = []
    head = model.get_output_embeddings()
    head.register_forward_pre_hook = lambda hook: hooked.append(hook)
    policy = VLMPolicy(model, processor, temperature=1.0)
    policy.score_tokens(network, some_prompts(1), some_images(1), [policy.encode_response("x")])
    assert not hooked


def test_values_need_a_value_head(tiny_vlm: Any) -> None:
    model, processor = tiny_vlm()
    with pytest.raises(ValueError, match="has no value head"):
        VLMPolicy(model, processor, temperature=1.0).values(
            PolicyWithValue(model, None), some_prompts(1), some_images(1)
        )
