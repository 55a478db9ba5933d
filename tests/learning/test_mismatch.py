"""Samples of another engine: measured, weighed, and refused if they come from other weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from launched import steady
from toy import ColourTask, quiet_config

from trl_gtr import GTRTrainer
from trl_gtr.config import GTRConfig
from trl_gtr.correctors import ExpertCorrector
from trl_gtr.distributed.means import Means
from trl_gtr.engines.base import Engine
from trl_gtr.engines.transformers import TransformersEngine
from trl_gtr.learning.losses import ResponseRatio, TokenRatio
from trl_gtr.learning.mismatch import SamplerMismatch, importance_weights
from trl_gtr.policy.network import PolicyWithValue
from trl_gtr.policy.scores import Scores
from trl_gtr.types import Generation

ALONE: Any = SimpleNamespace(gather=lambda own: [own])


def scores(token_logprobs: list[list[float]], lengths: list[int]) -> Scores:
    tokens = torch.tensor(token_logprobs)
    mask = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
    none = torch.zeros(len(tokens))
    return Scores(tokens.sum(1), none, none, tokens * mask, mask, torch.zeros(len(tokens), dtype=torch.long))


def sampled(*logprobs: list[float] | None) -> Any:
    return [SimpleNamespace(sampler_logprobs=None if row is None else np.array(row, np.float32)) for row in logprobs]


def settings(**overrides: Any) -> Any:
    return GTRConfig(output_dir="unused", use_cpu=True, vllm_max_mismatch=10.0, **overrides)


def test_a_response_is_weighed_by_the_truncated_ratio_of_its_tokens() -> None:
    means = Means()
    learner = scores([[-1.0, -2.0, 0.0], [-1.0, -1.0, -1.0]], [2, 3])
    steps = sampled([-1.5, -1.8], [-2.0, -1.5, -1.0])  # Σ differences: 0.3 and 1.5
    weights = importance_weights(steps, learner, settings(), ALONE, means)
    assert weights is not None
    assert weights.tolist() == pytest.approx([math.exp(0.3), 2.0])
    differences = [0.5, -0.2, 1.0, 0.5, 0.0]
    logged = means.reduce()
    assert logged["sampler/difference"] == pytest.approx(sum(map(abs, differences)) / 5)
    assert logged["sampler/max_difference"] == pytest.approx(1.0)
    assert logged["sampler/kl"] == pytest.approx(sum(math.exp(d) - 1 - d for d in differences) / 5)
    assert (logged["sampler/truncated"], logged["sampler/importance"]) == pytest.approx((0.5, (math.exp(0.3) + 2) / 2))


def test_a_token_is_weighed_by_its_own_ratio() -> None:
    token = {"ratio_level": "token", "vllm_importance_sampling_mode": "token_truncate"}
    learner = scores([[-1.0, -2.0, 0.0]], [2])
    args = settings(**token, vllm_importance_sampling_clip_max=1.5)
    weights = importance_weights(sampled([-2.0, -1.8]), learner, args, ALONE, Means())
    assert weights is not None
    assert weights[0, :2].tolist() == pytest.approx([1.5, math.exp(-0.2)])


@pytest.mark.parametrize(
    ("sampler", "changed"),
    [
        ([None], {}),
        ([[-1.0005]], {}),  # closer than the threshold
        ([[-2.0]], {"vllm_importance_sampling_correction": False}),
    ],
)
def test_no_weights_are_applied_where_none_are_needed(sampler: Any, changed: dict[str, Any]) -> None:
    assert importance_weights(sampled(*sampler), scores([[-1.0]], [1]), settings(**changed), ALONE, Means()) is None


def test_two_processes_decide_together() -> None:
    """This process is exact; the other one isn't."""
    two: Any = SimpleNamespace(gather=lambda own: [own, (1, 1.0, 0.5)])
    weights = importance_weights(sampled([-1.0]), scores([[-1.0]], [1]), settings(), two, Means())
    assert weights is not None
    args = replace(settings(), vllm_max_mismatch=0.2)
    with pytest.raises(SamplerMismatch, match=r"is 0\.5 per token, above `vllm_max_mismatch` \(0\.2\)"):
        importance_weights(sampled([-1.0]), scores([[-1.0]], [1]), args, two, Means())


@pytest.mark.parametrize("broken", [float("nan"), -float("inf")])
def test_what_is_no_number_is_a_mismatch(broken: float) -> None:
    limit = replace(settings(), vllm_max_mismatch=0.05)
    with pytest.raises(SamplerMismatch):
        importance_weights(sampled([broken]), scores([[-1.0]], [1]), limit, ALONE, Means())


@pytest.mark.parametrize("rows", [([-1.0], None), ([-1.0], [-1.0, -1.0])])
def test_an_engine_reports_every_token_or_none(rows: Any) -> None:
    with pytest.raises(ValueError, match="one log-prob for each id of every response"):
        importance_weights(sampled(*rows), scores([[-1.0], [-1.0]], [1, 1]), settings(), ALONE, Means())


def test_token_weights_need_token_ratios() -> None:
    with pytest.raises(ValueError, match="weighs tokens"):
        settings(vllm_importance_sampling_mode="token_truncate")


def test_weights_multiply_the_losses_and_follow_their_rows() -> None:
    old = replace(scores([[-1.0, -1.0], [-1.0, -1.0]], [2, 1]), importance=torch.tensor([0.5, 2.0]))
    advantages = torch.tensor([1.0, -1.0])
    losses, stats = ResponseRatio(0.2, None)(old, old, advantages)
    assert losses.tolist() == [-0.5, 2.0]
    assert stats.ratio.tolist() == [1.0, 1.0]
    assert TokenRatio(0.2, None, None, 1.0)(old, old, advantages)[0].tolist() == [-0.5, 2.0]
    tokens = replace(old, importance=torch.tensor([[1.0, 3.0], [4.0, 9.0]]))  # the 9 is padding
    assert TokenRatio(0.2, None, None, 1.0)(tokens, tokens, advantages)[0].tolist() == [-2.0, 4.0]
    second = tokens.rows([1]).importance
    assert second is not None
    assert second.tolist() == [[4.0]]


def test_weighed_samples_of_another_policy_have_the_gradient_of_the_own() -> None:
    """Over all actions: Σ_a μ(a) · w(a) · ∇loss(a) is the gradient under π, where no weight is truncated."""
    logits = torch.tensor([0.2, -0.3, 0.5], requires_grad=True)
    sampler, rewards = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([1.0, -2.0, 0.5])
    own = torch.log_softmax(logits, 0)
    new = scores([[0.0]] * 3, [1] * 3)
    new = replace(new, logprob=own)
    weights = importance_weights(
        sampled(*sampler.log()[:, None].tolist()),
        replace(new, token_logprobs=own.detach()[:, None]),
        settings(vllm_importance_sampling_clip_max=10.0),
        ALONE,
        Means(),
    )
    old = replace(new, logprob=own.detach(), importance=weights)
    losses, _ = ResponseRatio(0.2, None)(new, old, rewards)
    (found,) = torch.autograd.grad((sampler * losses).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad(-(own.exp() * rewards).sum(), logits)
    assert torch.allclose(found, expected, atol=1e-6)


# --- in a run ------------------------------------------------------------------------------------------------------


class OtherEngine(Engine):
    """Samples with a copy of the model and reports its log-probs; the copy gets new weights while `syncs` is set."""

    def __init__(self, trainer: GTRTrainer) -> None:
        self.policy, self.model, self.syncs = trainer.policy, copy.deepcopy(trainer.trained.policy), True
        self.sampler = TransformersEngine(trainer.policy, self.model)

    def sync(self, policy: torch.nn.Module) -> None:
        if self.syncs:
            self.model.load_state_dict(policy.state_dict())

    @torch.no_grad()
    def generate(self, prompts: Sequence[str], images: Sequence[np.ndarray], greedy: bool = False) -> list[Generation]:
        generations = self.sampler.generate(prompts, images, greedy)
        ids = [generation.ids for generation in generations]
        network = PolicyWithValue(self.model, None)
        logprobs = self.policy.score(network, prompts, images, ids, [0] * len(ids), 1.0).token_logprobs
        rows = [row[: len(each)].numpy() for row, each in zip(logprobs, ids, strict=True)]
        return [replace(each, logprobs=row) for each, row in zip(generations, rows, strict=True)]


@pytest.fixture
def make_trainer(toy_checkpoint: str, tmp_path: Path) -> Any:
    def make(name: str, **overrides: Any) -> GTRTrainer:
        saving = {"total_env_steps": 96, "learning_rate": 3e-3, "save_strategy": "steps", "save_steps": 100}
        config = quiet_config(tmp_path / name, **saving | overrides)
        trainer = GTRTrainer(toy_checkpoint, config, ColourTask(length=3), ExpertCorrector())
        trainer.engine = OtherEngine(trainer)
        return trainer

    return make


def test_a_sampler_with_old_weights_ends_the_run_and_nothing_is_lost(make_trainer: Any, tmp_path: Path) -> None:
    whole = make_trainer("whole")
    whole.train()
    assert all(entry["sampler/max_difference"] < 1e-4 for entry in whole.state.log_history)
    assert not any("sampler/importance" in entry for entry in whole.state.log_history)

    stale = make_trainer("stale", vllm_max_mismatch=1e-5)
    sync, updates = stale.engine.sync, iter(range(100))
    stale.engine.sync = lambda policy: sync(policy) if next(updates) < 2 else None  # not after the second update
    with pytest.raises(SamplerMismatch, match="The engine's samples don't come from the policy in training"):
        stale.train()
    assert [entry["policy/ratio_start_max_dev"] < 1e-4 for entry in stale.state.log_history] == [True, True]
    assert steady(stale.state.log_history) == steady(whole.state.log_history[:2])

    again = make_trainer("stale", allow_changed_config=True)
    again.train(resume_from_checkpoint=str(tmp_path / "stale" / "checkpoint-2"))
    assert steady(again.state.log_history) == steady(whole.state.log_history)


def test_a_sampler_that_lags_a_little_is_weighed(make_trainer: Any) -> None:
    trainer = make_trainer("lagging", vllm_max_mismatch=10.0)
    trainer.engine.syncs = False
    trainer.train()
    first, *later = trainer.state.log_history
    assert "sampler/importance" not in first
    assert all(0 < entry["sampler/importance"] <= 2 for entry in later)
    assert all(entry["sampler/difference"] > 1e-3 for entry in later)
