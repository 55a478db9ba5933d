import copy

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
)
from vlms import FAMILIES, some_images, some_prompts

from trl_gtr.policy.loading import chat
from trl_gtr.policy.network import PolicyWithValue, ValueHead
from trl_gtr.policy.scoring import VLMPolicy

TEMPERATURE, COEF = 0.7, 0.5


def value_head(sizes=(16, 8)):
    torch.manual_seed(5)
    head = ValueHead(32, sizes)
    torch.nn.init.normal_(head.layers[-1].weight)
    return head


@pytest.fixture(scope="module", params=FAMILIES)
def agent(request, tiny_vlm):
    """(model, processor) of each family. Tests must leave them as they are."""
    return tiny_vlm(request.param)


def some_responses(policy, number, seed=0):
    """Ids that could have been sampled, of different lengths, each with EOS; and where their actions start."""
    rng = np.random.default_rng(seed)
    allowed = np.flatnonzero(~policy.suppressed.numpy())
    responses = [np.append(rng.choice(allowed, size=2 + 3 * i % 11), policy.eos_token_ids[0]) for i in range(number)]
    starts = [len(ids) if i % 4 == 3 else len(ids) // 2 for i, ids in enumerate(responses)]
    return responses, starts


@torch.no_grad()
def plain_forward(model, processor, prompt, image, ids):
    """One sample, no padding, the model's whole output: logits that predict `ids` and the state before them."""
    inputs = processor(text=[chat(processor, prompt)], images=[[Image.fromarray(image)]], return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    ids = torch.as_tensor(ids)[None]
    prompt_ids = inputs["input_ids"]
    inputs["input_ids"] = torch.cat([prompt_ids, ids], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(ids)], 1)
    output = model(**inputs, output_hidden_states=True)
    return output.logits[0, length - 1 : -1], output.hidden_states[-1][0, length - 1], prompt_ids[0]


def plain_logprobs(logits, prompt_ids, ids, suppressed, temperature, penalty):
    """Step by step with transformers' own processors, float64."""
    steps = [SuppressTokensLogitsProcessor(suppressed.nonzero()[:, 0].tolist()), TemperatureLogitsWarper(temperature)]
    if penalty != 1.0:
        steps.insert(0, RepetitionPenaltyLogitsProcessor(penalty))
    result = []
    for step, token in enumerate(ids):
        seen = torch.cat([prompt_ids, torch.as_tensor(ids[:step])])[None]
        scores = logits[step].double()[None]
        for process in steps:
            scores = process(seen, scores)
        result.append(scores[0].log_softmax(-1)[token].item())
    return result


class TestScore:
    @pytest.mark.parametrize(
        ("batch", "padding_side", "penalty"), [(1, "left", 1.0), (8, "left", 1.3), (8, "right", 1.0)]
    )
    def test_equals_a_plain_unbatched_forward(self, agent, batch, padding_side, penalty, monkeypatch):
        model, processor = agent
        monkeypatch.setattr(processor.tokenizer, "padding_side", padding_side)
        policy = VLMPolicy(model, processor, temperature=TEMPERATURE, repetition_penalty=penalty)
        head = value_head()
        prompts, images = some_prompts(8)[-batch:], some_images(8)[-batch:]
        responses, starts = some_responses(policy, batch)
        with torch.no_grad():
            scored = policy.score(PolicyWithValue(model, head), prompts, images, responses, starts, COEF)
        assert scored.logprob.dtype == scored.value.dtype == torch.float32
        for i in range(batch):
            ids, start = responses[i], starts[i]
            logits, state, prompt_ids = plain_forward(model, processor, prompts[i], images[i], ids)
            expected = plain_logprobs(logits, prompt_ids, ids, policy.suppressed, TEMPERATURE, penalty)
            thought, action = sum(expected[:start]), sum(expected[start:])
            assert scored.mask[i].tolist() == [True] * len(ids) + [False] * (scored.mask.shape[1] - len(ids))
            assert np.abs(scored.token_logprobs[i, : len(ids)].numpy() - expected).max() < 1e-4
            assert (scored.token_logprobs[i, len(ids) :] == 0).all()
            assert scored.thought_logprob[i].item() == pytest.approx(thought, abs=1e-4)
            assert scored.action_logprob[i].item() == pytest.approx(action, abs=1e-4)
            assert scored.logprob[i].item() == pytest.approx(action + COEF * thought, abs=1e-4)
            with torch.no_grad():
                assert scored.value[i].item() == pytest.approx(head(state).item(), abs=1e-4)

    def test_the_oracle_can_fail(self, agent):
        """Image and prompt matter: with another sample's the log-probs are far off."""
        model, processor = agent
        policy = VLMPolicy(model, processor, temperature=1.0)
        net = PolicyWithValue(model, value_head())
        prompts, images = some_prompts(4), some_images(4)
        responses, starts = some_responses(policy, 4)
        with torch.no_grad():
            own = policy.score(net, prompts, images, responses, starts, COEF)
            other_images = policy.score(net, prompts, images[::-1], responses, starts, COEF)
            other_prompts = policy.score(net, prompts[::-1], images, responses, starts, COEF)
        for other in (other_images, other_prompts):
            assert ((own.token_logprobs - other.token_logprobs).abs().amax(1) > 1e-2).all()
            assert (own.value - other.value).abs().min() > 1e-3

    def test_only_the_responses_logits_are_made(self, agent):
        model, processor = agent
        policy = VLMPolicy(model, processor, temperature=1.0)
        responses, starts = some_responses(policy, 3)
        shapes = []
        hook = model.get_output_embeddings().register_forward_hook(lambda _, args, output: shapes.append(output.shape))
        with torch.no_grad():
            policy.score(
                PolicyWithValue(model, value_head()), some_prompts(3), some_images(3), responses, starts, COEF
            )
        hook.remove()
        assert [shape[:2] for shape in shapes] == [(3, max(map(len, responses)) + 1)]

    def test_score_tokens_is_supervised_learnings_logprob(self, agent):
        model, processor = agent
        policy = VLMPolicy(model, processor, temperature=0.2, repetition_penalty=1.5)
        prompts, images = some_prompts(3), some_images(3)
        targets = [policy.encode_response(text) for text in ("{", '{"thoughts": "é', "stand")]
        with torch.no_grad():
            logprobs, mask = policy.score_tokens(PolicyWithValue(model, value_head()), prompts, images, targets)
        for i, ids in enumerate(targets):
            logits = plain_forward(model, processor, prompts[i], images[i], ids)[0]
            expected = logits.log_softmax(-1)[range(len(ids)), ids]
            assert torch.allclose(logprobs[i, : len(ids)], expected, atol=1e-4)
            assert mask[i].sum() == len(ids)
            assert (logprobs[i, len(ids) :] == 0).all()

    def test_values_need_no_response(self, agent):
        model, processor = agent
        policy, net = VLMPolicy(model, processor, temperature=1.0), PolicyWithValue(model, value_head())
        prompts, images = some_prompts(4), some_images(4)
        responses, starts = some_responses(policy, 4)
        with torch.no_grad():
            scored = policy.score(net, prompts, images, responses, starts, COEF)
            values = policy.values(net, prompts, images)
        assert values.std() > 1e-3
        assert torch.allclose(values, scored.value, atol=1e-5)

    def test_entropy_is_the_mean_over_tokens(self, tiny_vlm):
        model, processor = tiny_vlm()
        policy = VLMPolicy(model, processor, temperature=TEMPERATURE)
        prompts, images = some_prompts(3), some_images(3)
        responses, starts = some_responses(policy, 3)
        net = PolicyWithValue(model, value_head())
        scored = policy.score(net, prompts, images, responses, starts, COEF, with_entropy=True)
        assert not scored.entropy.requires_grad
        for i, ids in enumerate(responses):
            logits = plain_forward(model, processor, prompts[i], images[i], ids)[0]
            logits = (logits / TEMPERATURE).masked_fill(policy.suppressed, -1e9)
            expected = torch.distributions.Categorical(logits=logits).entropy().mean()
            assert scored.entropy[i].item() == pytest.approx(expected.item(), abs=1e-4)

    def test_bf16_model_is_scored_in_float32(self, agent):
        model, processor = agent
        model = copy.deepcopy(model).bfloat16()
        policy, head = VLMPolicy(model, processor, temperature=TEMPERATURE), value_head()
        ids = np.concatenate(some_responses(policy, 6)[0])
        with torch.no_grad():
            scored = policy.score(PolicyWithValue(model, head), some_prompts(1), some_images(1), [ids], [5], COEF)
        logits, state, prompt_ids = plain_forward(model, processor, some_prompts(1)[0], some_images(1)[0], ids)
        assert logits.dtype == torch.bfloat16
        expected = plain_logprobs(logits.float(), prompt_ids, ids, policy.suppressed, TEMPERATURE, 1.0)
        assert scored.logprob.dtype == scored.value.dtype == torch.float32
        assert scored.logprob.item() == pytest.approx(sum(expected[5:]) + COEF * sum(expected[:5]), abs=1e-3)
        with torch.no_grad():
            assert scored.value.item() == pytest.approx(head(state.float()).item(), abs=1e-4)

    def test_batched_gradient_is_the_sum_of_single_ones(self, tiny_vlm):
        model, processor = tiny_vlm("llava_next")
        policy, net = VLMPolicy(model, processor, temperature=1.0), PolicyWithValue(model, value_head())
        prompts, images = some_prompts(4), some_images(4)
        responses, starts = some_responses(policy, 4)

        def gradient(batches):
            net.zero_grad()
            for rows in batches:
                scored = policy.score(
                    net,
                    [prompts[i] for i in rows],
                    [images[i] for i in rows],
                    [responses[i] for i in rows],
                    [starts[i] for i in rows],
                    COEF,
                )
                (scored.logprob.sum() + scored.value.sum()).backward()
            return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

        whole = gradient([[0, 1, 2, 3]])
        assert whole.abs().max() > 0.1
        assert torch.allclose(whole, gradient([[0], [1], [2], [3]]), atol=1e-3)

    @pytest.mark.parametrize("lacking", ["logits_to_keep", "head"])
    def test_models_with_less_to_offer(self, tiny_vlm, monkeypatch, lacking):
        """One that always computes all logits, and one whose LM head is not a module."""
        model, processor = tiny_vlm()
        policy, net = VLMPolicy(model, processor, temperature=1.0), PolicyWithValue(model, value_head())
        responses, starts = some_responses(policy, 3)
        arguments = (net, some_prompts(3), some_images(3), responses, starts, COEF)
        with torch.no_grad():
            expected = policy.score(*arguments)
            whole_forward = model.forward
            if lacking == "head":
                monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
            else:
                monkeypatch.setattr(model, "forward", lambda **inputs: whole_forward(**inputs))
            scored = policy.score(*arguments)
        assert torch.allclose(scored.logprob, expected.logprob, atol=1e-5)
        assert torch.allclose(scored.value, expected.value, atol=1e-5)


class TestValueHead:
    def test_starts_at_zero_and_can_learn(self):
        head = ValueHead(8, (6, 4))
        assert [layer.out_features for layer in head.layers if hasattr(layer, "out_features")] == [6, 4, 1]
        values = head(torch.randn(5, 8))
        assert values.shape == (5,)
        assert (values == 0).all()
        values.sum().backward()
        assert head.layers[-1].bias.grad.item() == 5

    def test_stays_float32_under_autocast(self):
        head, states = value_head(), torch.randn(64, 32)
        expected = head(states)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(head(states), expected)

    @pytest.mark.parametrize("detach", [False, True])
    def test_detached_value_leaves_the_trunk_alone(self, tiny_vlm, detach):
        model, processor = tiny_vlm()
        net = PolicyWithValue(model, value_head(), detach_value=detach)
        VLMPolicy(model, processor, temperature=1.0).values(net, some_prompts(2), some_images(2)).sum().backward()
        touched = any(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
        assert touched is not detach
        assert net.value_head.layers[0].weight.grad.abs().max() > 0
