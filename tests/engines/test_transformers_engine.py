"""The engine on transformers, on every family: what it samples, from which distribution, and what it leaves alone."""

import copy

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
)
from vlms import FAMILIES, some_images, some_prompts

from trl_gtr.engines.transformers import TransformersEngine
from trl_gtr.policy.network import PolicyWithValue
from trl_gtr.policy.scoring import VLMPolicy


@pytest.fixture(scope="module", params=FAMILIES)
def agent(request, tiny_vlm):
    """(model, processor) of each family. Tests must leave them as they are."""
    return tiny_vlm(request.param)


def test_greedy_batch_equals_single(agent):
    model, processor = agent
    policy = VLMPolicy(model, processor, max_completion_length=8, temperature=1.0)
    prompts, images = some_prompts(8), some_images(8)
    batched = TransformersEngine(policy, model).generate(prompts, images, greedy=True)
    single = [
        TransformersEngine(policy, model).generate([p], [i], greedy=True)[0]
        for p, i in zip(prompts, images, strict=True)
    ]
    assert [g.ids.tolist() for g in batched] == [g.ids.tolist() for g in single]
    assert len({tuple(g.ids) for g in batched}) > 1


@pytest.mark.parametrize(("penalty", "pad_is_eos"), [(1.0, False), (1.4, True)])
def test_samples_from_the_scored_distribution(agent, penalty, pad_is_eos, monkeypatch):
    """The scores that `generate` drew from are those that `score` uses, padding or not."""
    model, processor = copy.deepcopy(agent)
    if pad_is_eos:
        processor.tokenizer.pad_token = processor.tokenizer.eos_token
    model.generation_config.eos_token_id = [2, *range(60, 120)]  # so many that some responses end early
    policy = VLMPolicy(model, processor, temperature=0.2, repetition_penalty=penalty, max_completion_length=10)
    with torch.no_grad():
        model.get_output_embeddings().weight[2] *= 2
    drawn_from = []

    def generate(**kwargs):
        output = type(model).generate(model, **kwargs, output_scores=True, return_dict_in_generate=True)
        drawn_from.extend(output.scores)
        return output.sequences

    monkeypatch.setattr(model, "generate", generate)
    torch.manual_seed(0)
    prompts, images = some_prompts(8), some_images(8)
    generations = TransformersEngine(policy, model).generate(prompts, images)
    ids = [g.ids for g in generations]
    assert len({len(i) for i in ids}) > 1
    with torch.no_grad():
        scored = policy.score(PolicyWithValue(model, None), prompts, images, ids, [0] * 8, 0.5)
    sampled = torch.stack(drawn_from, 1).log_softmax(-1)
    for i, row in enumerate(ids):
        expected = sampled[i, range(len(row)), row]
        assert torch.allclose(scored.token_logprobs[i, : len(row)], expected, atol=1e-4)


def test_hidden_settings_of_a_checkpoint_change_nothing(tiny_vlm):
    plain, processor = tiny_vlm()
    tainted, _ = tiny_vlm()
    tainted.generation_config = GenerationConfig(
        top_k=1,
        repetition_penalty=1.3,
        no_repeat_ngram_size=1,
        min_new_tokens=20,
        suppress_tokens=[*range(50, 200)],
    )
    tainted.generation_config.eos_token_id, tainted.generation_config.pad_token_id = 2, 0
    before = tainted.generation_config.to_dict()

    def sample(model):
        policy = VLMPolicy(model, processor, max_completion_length=20, temperature=1.0)
        torch.manual_seed(1)
        return [g.ids.tolist() for g in TransformersEngine(policy, model).generate(some_prompts(8), some_images(8))]

    expected = sample(plain)
    assert len({tuple(ids) for ids in expected}) == 8
    assert sample(tainted) == expected
    assert tainted.generation_config.to_dict() == before


def test_special_and_unknown_ids_are_never_sampled(agent):
    model, processor = agent
    model = copy.deepcopy(model)
    policy = VLMPolicy(model, processor, max_completion_length=12, temperature=2.0)
    tokenizer = processor.tokenizer
    assert policy.suppressed[len(tokenizer) :].all()
    assert len(policy.suppressed) > len(tokenizer)
    forbidden = {*range(len(tokenizer), len(policy.suppressed)), tokenizer.pad_token_id, tokenizer.bos_token_id}
    forbidden |= {i for i, token in tokenizer.added_tokens_decoder.items() if str(token).startswith("<")} - {2}
    head = model.get_output_embeddings()
    with torch.no_grad():  # make them by far the likeliest
        for i in forbidden:
            head.weight[i] = 30 * torch.sign(torch.randn(head.weight.shape[1]))
    for generation in TransformersEngine(policy, model).generate(some_prompts(8), some_images(8)):
        assert not forbidden & set(generation.ids.tolist())
    assert not policy.suppressed[tokenizer.eos_token_id]


def test_ends_at_the_first_eos(tiny_vlm):
    model, processor = tiny_vlm()
    ends = [2, *range(60, 100)]  # Qwen's has two
    model.generation_config.eos_token_id = ends
    policy = VLMPolicy(model, processor, max_completion_length=12, temperature=1.0)
    assert policy.eos_token_ids == ends
    torch.manual_seed(3)
    generations = TransformersEngine(policy, model).generate(some_prompts(16), some_images(16))
    assert {g.hit_length_limit for g in generations} == {False, True}
    for generation in generations:
        assert not np.isin(generation.ids[:-1], ends).any()
        assert generation.hit_length_limit == (generation.ids[-1] not in ends)
        assert len(generation.ids) == 12 or not generation.hit_length_limit
        assert generation.text == policy.spans.text(generation.ids)
        assert generation.ids.dtype == np.int64


def test_no_dropout_and_modes_are_kept(tiny_vlm):
    model, processor = tiny_vlm()
    policy = VLMPolicy(model, processor, max_completion_length=8, temperature=1.0)
    expected = TransformersEngine(policy, model).generate(some_prompts(4), some_images(4), greedy=True)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.9
    model.train()
    model.model.vision_tower.eval()
    found = TransformersEngine(policy, model).generate(some_prompts(4), some_images(4), greedy=True)
    assert [g.ids.tolist() for g in found] == [g.ids.tolist() for g in expected]
    assert model.training
    assert not any(module.training for module in model.model.vision_tower.modules())
    assert model.model.language_model.layers[0].training
