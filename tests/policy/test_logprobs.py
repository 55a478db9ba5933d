import pytest
import torch
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
)

from trl_gtr.policy.logprobs import token_logprobs, weighted_logprob


class TestTokenLogprobs:
    VOCABULARY, PROMPT, LENGTH, BATCH = 23, 6, 9, 4

    def setup_method(self):
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(self.BATCH, self.LENGTH, self.VOCABULARY, generator=generator) * 3
        self.ids = torch.randint(3, self.VOCABULARY, (self.BATCH, self.LENGTH), generator=generator)
        self.prompt = torch.randint(3, self.VOCABULARY, (self.BATCH, self.PROMPT), generator=generator)
        self.prompt_mask = torch.arange(self.PROMPT) >= torch.tensor([0, 2, 4, 5])[:, None]
        self.prompt[~self.prompt_mask] = 2  # padding is EOS: it must not count as seen
        self.ids[:, -1] = 2
        self.suppressed = torch.zeros(self.VOCABULARY, dtype=torch.bool)
        self.suppressed[[0, 1]] = True

    def sampler(self, temperature, penalty):
        """Step by step and row by row with transformers' own processors, in float64."""
        steps = [SuppressTokensLogitsProcessor([0, 1]), TemperatureLogitsWarper(temperature)]
        if penalty != 1.0:
            steps.insert(0, RepetitionPenaltyLogitsProcessor(penalty))
        result = torch.zeros(self.BATCH, self.LENGTH, self.VOCABULARY, dtype=torch.float64)
        for row in range(self.BATCH):
            seen = self.prompt[row][self.prompt_mask[row]]
            for step in range(self.LENGTH):
                scores = self.logits[row, step].double()[None]
                for process in steps:
                    scores = process(torch.cat([seen, self.ids[row, :step]])[None], scores)
                result[row, step] = scores[0].log_softmax(-1)
        return result

    def score(self, logits=None, temperature=0.3, penalty=1.0, **options):
        return token_logprobs(
            self.logits if logits is None else logits,
            self.ids,
            temperature=temperature,
            suppressed=self.suppressed,
            repetition_penalty=penalty,
            prompt_ids=self.prompt,
            prompt_mask=self.prompt_mask,
            **options,
        )

    @pytest.mark.parametrize("temperature", [0.2, 1.0])
    @pytest.mark.parametrize("penalty", [1.0, 1.3, 0.8])
    @pytest.mark.parametrize("chunk", [1, 10**9])
    def test_is_what_the_sampler_draws_from(self, temperature, penalty, chunk, monkeypatch):
        monkeypatch.setattr("trl_gtr.policy.logprobs.CHUNK_ELEMENTS", chunk)
        logprobs, entropy = self.score(temperature=temperature, penalty=penalty, with_entropy=True)
        expected = self.sampler(temperature, penalty)
        assert logprobs.dtype == entropy.dtype == torch.float32
        assert torch.allclose(logprobs.double(), expected.gather(-1, self.ids[..., None])[..., 0], atol=2e-5)
        distribution = torch.distributions.Categorical(logits=expected.clamp(min=-1e4))
        assert torch.allclose(entropy.double(), distribution.entropy(), atol=1e-5)

    def test_chunks_give_the_same_gradient(self, monkeypatch):
        gradients = []
        for chunk in (10**9, 1):
            monkeypatch.setattr("trl_gtr.policy.logprobs.CHUNK_ELEMENTS", chunk)
            logits = self.logits.clone().requires_grad_()
            self.score(logits, penalty=1.2)[0].sum().backward()
            gradients.append(logits.grad)
        assert gradients[0].abs().max() > 0.1
        assert torch.equal(*gradients)

    def test_bf16_logits_are_scored_in_float32(self):
        logits = self.logits.bfloat16()
        scored = self.score(logits)[0]
        assert torch.equal(scored, self.score(logits.float())[0])
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(scored, self.score(logits)[0])

    def test_suppressed_padding_does_not_poison_the_gradient(self):
        logits = self.logits.clone().requires_grad_()
        self.ids[:, -3:] = 0
        logprobs = self.score(logits)[0]
        mask = torch.ones_like(self.ids)
        mask[:, -3:] = 0
        assert logprobs[0, -1] == -torch.inf
        weighted_logprob(logprobs, mask, torch.full((self.BATCH,), 2), 0.5)[0].sum().backward()
        assert logits.grad.isfinite().all()
        assert (logits.grad[:, -3:] == 0).all()

    def test_repetition_penalty_needs_the_prompt(self):
        with pytest.raises(ValueError, match="prompt_ids"):
            token_logprobs(self.logits, self.ids, repetition_penalty=1.2)


class TestWeightedLogprob:
    LOGPROBS = torch.tensor([[-1.0, -2.0, -4.0, -8.0], [-1.0, -2.0, -4.0, -torch.inf], [-1.0, -2.0, -torch.inf, 0.0]])
    MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]])

    def weighted(self, starts, coef):
        return [x.tolist() for x in weighted_logprob(self.LOGPROBS, self.MASK, torch.tensor(starts), coef)]

    def test_thought_counts_lambda_times(self):
        total, thought, action = self.weighted([2, 1, 0], 0.5)
        assert thought == [-3, -1, 0]
        assert action == [-12, -6, -3]
        assert total == [-13.5, -6.5, -3]

    @pytest.mark.parametrize(
        ("coef", "expected"), [(0.5, [-7.5, -3.5, -1.5]), (0.2, [-3, -1.4, -0.6]), (0, [-15, -7, -3])]
    )
    def test_without_action_key_every_token_counts(self, coef, expected):
        total, thought, action = self.weighted([4, 3, 2], coef)
        assert total == pytest.approx(expected)
        assert (thought, action) == ([-15, -7, -3], [0, 0, 0])

    def test_lambda_zero_leaves_the_action(self):
        assert self.weighted([2, 1, 1], 0.0)[0] == [-12, -6, -2]

    def test_sums_in_float32(self):
        logprobs = torch.full((1, 2048), -0.0101, dtype=torch.bfloat16)
        total = weighted_logprob(logprobs, torch.ones(1, 2048), torch.tensor([0]), 0.5)[0]
        assert total.dtype == torch.float32
        assert total.item() == pytest.approx(2048 * logprobs[0, 0].item(), rel=1e-5)
