"""`trl_gtr.learning.losses` against closed forms and slow calculations that share no code with it."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from trl_gtr.learning.losses import (
    ResponseRatio,
    TokenRatio,
    explained_variance,
    kl_k3,
    policy_loss,
    policy_stats,
    reference_kl,
    value_loss,
)
from trl_gtr.policy.scores import Scores


def loss_and_gradient(log_ratio, advantage, dual_clip=3.0):
    logprob = torch.tensor([log_ratio], requires_grad=True)
    loss, stats = policy_loss(logprob, torch.zeros(1), torch.tensor([advantage]), cliprange=0.1, dual_clip=dual_clip)
    loss.sum().backward()
    assert logprob.grad is not None
    return loss.item(), logprob.grad.item(), stats


class TestPolicyLoss:
    def test_unmoved_policy(self):
        """At ratio 1 the loss is −Â and its gradient is the policy gradient's."""
        for advantage in (2.0, -2.0):
            loss, gradient, stats = loss_and_gradient(0.0, advantage)
            assert loss == -advantage
            assert gradient == -advantage
            assert stats.ratio.item() == 1
            assert not stats.clipped.item()
            assert stats.approx_kl.item() == 0

    @pytest.mark.parametrize(
        ("ratio", "advantage", "loss", "gradient"),
        [
            (1.05, 2.0, -2.1, -2.1),  # inside
            (1.5, 2.0, -2.2, 0.0),  # gained enough
            (0.5, 2.0, -1.0, -1.0),  # must come back: not clipped
            (0.5, -2.0, 1.8, 0.0),  # lost enough
            (1.5, -2.0, 3.0, 3.0),  # must come back
            (2.9, -2.0, 5.8, 5.8),
            (3.5, -2.0, 6.0, 0.0),  # dual clip
        ],
    )
    def test_closed_form(self, ratio, advantage, loss, gradient):
        got_loss, got_gradient, stats = loss_and_gradient(math.log(ratio), advantage)
        assert got_loss == pytest.approx(loss, rel=1e-5)
        assert got_gradient == pytest.approx(gradient, rel=1e-5)
        assert stats.clipped.item() == (abs(ratio - 1) > 0.1)
        assert stats.approx_kl.item() == pytest.approx(ratio - 1 - math.log(ratio), rel=1e-4)

    def test_dual_clip_can_be_off(self):
        loss, gradient, _ = loss_and_gradient(5.0, -2.0, dual_clip=None)
        assert loss == pytest.approx(2 * math.exp(5), rel=1e-5)
        assert gradient == pytest.approx(2 * math.exp(5), rel=1e-5)
        with pytest.raises(ValueError, match="dual_clip"):
            loss_and_gradient(0.0, -2.0, dual_clip=1.0)

    def test_log_ratio_clamp(self):
        loss, gradient, stats = loss_and_gradient(50.0, -1.0, dual_clip=None)
        assert loss == pytest.approx(math.exp(20), rel=1e-5)
        assert gradient == 0
        assert stats.ratio.item() == pytest.approx(math.exp(20), rel=1e-5)

    @settings(deadline=None, max_examples=200)
    @given(
        log_ratio=st.one_of(st.floats(-1e6, 1e6), st.sampled_from([math.inf, -math.inf])),
        advantage=st.floats(-100, 100),
    )
    def test_bounded_and_finite_for_any_ratio(self, log_ratio, advantage):
        loss, gradient, stats = loss_and_gradient(log_ratio, advantage)
        assert math.isfinite(loss)
        assert math.isfinite(gradient)
        tolerance = 1e-5 * abs(advantage) + 1e-30  # float32 has few digits left below that
        if advantage < 0:
            assert 0 <= loss <= 3 * abs(advantage) + tolerance
        else:
            assert -1.1 * advantage - tolerance <= loss <= 0
        assert torch.isfinite(stats.ratio).all()
        assert 0 <= stats.approx_kl.item() < math.inf

    def test_a_step_raises_good_actions_and_lowers_bad_ones(self):
        logits = torch.zeros(3, requires_grad=True)
        actions = torch.tensor([0, 1, 2])
        old = torch.log_softmax(logits, dim=0).detach()[actions]
        loss, _ = policy_loss(
            torch.log_softmax(logits, dim=0)[actions],
            old,
            torch.tensor([1.0, 0.0, -1.0]),
            cliprange=0.1,
            dual_clip=3.0,
        )
        loss.mean().backward()
        assert logits.grad is not None
        better = torch.softmax(-0.1 * logits.grad, dim=0)
        assert better[0] > 1 / 3
        assert better[1].item() == pytest.approx(1 / 3, abs=1e-3)
        assert better[2] < 1 / 3

    def test_micro_batches_add_up(self):
        """8 × 1 gives the gradient of 1 × 8, for the policy and the value together."""
        rng = torch.Generator().manual_seed(1)
        features = torch.randn(8, 5, generator=rng, dtype=torch.float64)
        old, advantages, returns = (torch.randn(8, generator=rng, dtype=torch.float64) for _ in range(3))

        def gradient(micro_batch):
            weights = torch.full((5,), 0.1, dtype=torch.float64, requires_grad=True)
            for rows in torch.arange(8).split(micro_batch):
                out = features[rows] @ weights
                policy, _ = policy_loss(out, old[rows], advantages[rows], cliprange=0.1, dual_clip=3.0)
                ((policy + 0.5 * value_loss(out, returns[rows])).sum() / 8).backward()
            return weights.grad

        whole = gradient(8)
        assert whole.abs().max() > 0.1
        torch.testing.assert_close(gradient(1), whole)
        torch.testing.assert_close(gradient(3), whole)

    @pytest.mark.parametrize("odd", [0, 1, 2])
    def test_mixing_columns_and_rows_raises(self, odd):
        arguments = [torch.zeros(4), torch.zeros(4), torch.ones(4)]
        arguments[odd] = arguments[odd][:, None]
        with pytest.raises(ValueError, match=r"\(4, 1\)"):
            policy_loss(*arguments, cliprange=0.1, dual_clip=3.0)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_log_probs_raise(self, dtype):
        with pytest.raises(ValueError, match="float32"):
            policy_loss(torch.zeros(4, dtype=dtype), torch.zeros(4), torch.ones(4), cliprange=0.1, dual_clip=3.0)
        with pytest.raises(ValueError, match="float32"):
            kl_k3(torch.zeros(4), torch.zeros(4, dtype=dtype))

    def test_stats_alone(self):
        stats = policy_stats(torch.tensor([0.0, 0.2]), torch.tensor([0.05, 0.0]), cliprange=0.1)
        assert stats.ratio.tolist() == pytest.approx([math.exp(-0.05), math.exp(0.2)])
        assert stats.clipped.tolist() == [False, True]
        assert stats.approx_kl.tolist() == pytest.approx([math.exp(-0.05) - 0.95, math.exp(0.2) - 1.2], rel=1e-4)


class TestValueLoss:
    def test_closed_form(self):
        values = torch.tensor([1.0, -2.0], requires_grad=True)
        loss = value_loss(values, torch.tensor([4.0, -2.0]))
        assert loss.tolist() == [4.5, 0.0]
        loss.sum().backward()
        assert values.grad is not None
        assert values.grad.tolist() == [-3.0, 0.0]

    def test_clipping_when_asked(self):
        # old 0, range 0.5: V = 2 counts as 0.5 towards the target 3, and gives no gradient; V = 0.2 is inside
        values = torch.tensor([2.0, 0.2], requires_grad=True)
        loss = value_loss(values, torch.tensor([3.0, 3.0]), old_values=torch.zeros(2), cliprange_value=0.5)
        assert loss.tolist() == pytest.approx([0.5 * 2.5**2, 0.5 * 2.8**2])
        loss.sum().backward()
        assert values.grad is not None
        assert values.grad.tolist() == pytest.approx([0.0, -2.8])

    def test_old_values_alone_change_nothing(self):
        loss = value_loss(torch.tensor([2.0]), torch.tensor([3.0]), old_values=torch.zeros(1))
        assert loss.tolist() == [0.5]

    def test_misuse_raises(self):
        with pytest.raises(ValueError, match="old_values"):
            value_loss(torch.zeros(2), torch.zeros(2), cliprange_value=0.2)
        with pytest.raises(ValueError, match="same shape"):
            value_loss(torch.zeros(2), torch.zeros(2, 1))
        with pytest.raises(ValueError, match="same shape"):
            value_loss(torch.zeros(2), torch.zeros(2), old_values=torch.zeros(1), cliprange_value=0.2)


class TestKL:
    def test_expectation_is_the_kl(self):
        """E_π[k3] = KL(π ‖ π_ref), summed exactly over a small distribution; the other direction is another number."""
        pi = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
        ref = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)
        exact = sum(p * math.log(p / q) for p, q in zip(pi.tolist(), ref.tolist(), strict=True))
        assert (pi * kl_k3(pi.log(), ref.log())).sum().item() == pytest.approx(exact)
        reverse = sum(q * math.log(q / p) for p, q in zip(pi.tolist(), ref.tolist(), strict=True))
        stats = policy_stats(pi.log(), ref.log(), cliprange=0.1)  # ref acted: KL(ref ‖ π)
        assert (ref * stats.approx_kl).sum().item() == pytest.approx(reverse)

    def test_gradient_pulls_to_the_reference(self):
        logprob = torch.tensor([-1.0, -3.0], requires_grad=True)
        kl_k3(logprob, torch.tensor([-2.0, -2.0])).sum().backward()
        assert logprob.grad is not None
        # d/dx (e^{r−x} − 1 − (r − x)) = 1 − e^{r−x}
        assert logprob.grad.tolist() == pytest.approx([1 - math.exp(-1), 1 - math.exp(1)])

    @settings(deadline=None)
    @given(st.lists(st.floats(-(2**-10), 2**-10, width=32), min_size=1, max_size=20))
    def test_never_negative_near_zero(self, differences):
        logprob = torch.tensor(differences, dtype=torch.float32)
        assert (kl_k3(logprob, torch.zeros_like(logprob)) >= 0).all()

    def test_shapes(self):
        with pytest.raises(ValueError, match="same shape"):
            kl_k3(torch.zeros(3), torch.zeros(3, 1))


class TestExplainedVariance:
    def test_by_hand(self):
        returns = torch.tensor([1.0, 2.0, 3.0, 4.0])  # variance 1.25
        assert explained_variance(returns, returns) == 1
        assert explained_variance(returns + 10, returns) == 1  # a constant error is no variance
        assert explained_variance(torch.zeros(4), returns) == 0
        assert explained_variance(-returns, returns) == pytest.approx(-3)
        assert explained_variance(torch.tensor([1.0, 2.0, 3.0, 3.0]), returns) == pytest.approx(1 - 0.1875 / 1.25)

    def test_undefined_where_returns_are_equal(self):
        assert math.isnan(explained_variance(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0])))

    def test_shapes(self):
        with pytest.raises(ValueError, match="same shape"):
            explained_variance(torch.zeros(3), torch.zeros(3, 1))


def response_scores(token_logprobs, lengths):
    tokens = torch.tensor(token_logprobs)
    mask = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
    total = (tokens * mask).sum(1)
    return Scores(total, total, torch.zeros_like(total), tokens * mask, mask, torch.tensor(lengths))


def test_the_response_ratio_is_that_of_the_weighted_sums():
    new, old = response_scores([[-1.0, -1.0]], [2]), response_scores([[-1.5, -1.0]], [2])
    losses, stats = ResponseRatio(cliprange=0.1, dual_clip=None)(new, old, torch.tensor([-2.0]))
    assert stats.ratio.tolist() == pytest.approx([math.exp(0.5)])
    assert losses.tolist() == pytest.approx([2 * math.exp(0.5)])


def test_the_kl_to_the_reference_is_a_mean_over_tokens():
    scored = response_scores([[-1.0, -2.0, 0.0], [-1.0, -1.0, -1.0]], [2, 3])
    reference = torch.tensor([[-1.5, -2.0, 99.0], [-1.0, -1.0, -1.0]])  # what stands in padding isn't read
    expected = (math.exp(-0.5) - 1 + 0.5) / 2
    assert reference_kl(scored, reference).tolist() == pytest.approx([expected, 0.0])


# --- one ratio per token --------------------------------------------------------------------------------------------


def token_scores(token_logprobs, lengths, action_starts):
    """Scores whose gradient reaches `token_logprobs`."""
    mask = torch.arange(token_logprobs.shape[1]) < torch.tensor(lengths)[:, None]
    none = token_logprobs.new_zeros(len(token_logprobs))
    return Scores(none, none, none, token_logprobs, mask, torch.tensor(action_starts))


def token_loss(new, old, lengths, action_starts, advantages, thought_coef=1.0, high=None):
    objective = TokenRatio(cliprange=0.2, dual_clip=None, cliprange_high=high, thought_coef=thought_coef)
    starts = lengths, action_starts
    return objective(token_scores(new, *starts), token_scores(old, *starts), torch.tensor(advantages))


def test_every_token_is_clipped_on_its_own():
    # Ratios 1.5 and 0.9 with advantage 2: clipped at 1.2, and not at all.
    new = torch.tensor([[1.5, 0.9]]).log()
    losses, stats = token_loss(new, torch.zeros(1, 2), [2], [0], [2.0])
    assert losses.tolist() == pytest.approx([-2 * (1.2 + 0.9) / 2])
    assert stats.ratio.tolist() == pytest.approx([1.5, 0.9])
    assert stats.clipped.tolist() == [True, False]


def test_thought_tokens_are_weighed_in_the_mean():
    new = torch.tensor([[1.1, 0.9, 1.0]]).log()  # two thought tokens, one action token
    losses, _ = token_loss(new, torch.zeros(1, 3), [3], [2], [1.0], thought_coef=0.5)
    assert losses.tolist() == pytest.approx([-(0.5 * 1.1 + 0.5 * 0.9 + 1.0) / 2])


def test_a_response_without_an_action_is_learned_from_without_thought_weight():
    new = torch.zeros(2, 2, requires_grad=True)
    losses, _ = token_loss(new, torch.zeros(2, 2), [2, 2], [2, 1], [1.0, 1.0], thought_coef=0.0)  # λ = 0
    losses.sum().backward()
    assert losses.tolist() == [-1.0, -1.0]
    assert new.grad.tolist() == [[-0.5, -0.5], [0.0, -1.0]]  # the first has no action: all its tokens count


def test_padding_plays_no_part_however_wide():
    new, old = torch.tensor([[0.1, 9.0, 9.0], [0.1, -0.1, 0.0]]), torch.tensor([[0.0, -7.0], [0.0, 0.0]])
    objective = TokenRatio(0.2, None, None, 1.0)
    losses, stats = objective(
        token_scores(new, [1, 2], [0, 0]), token_scores(old, [1, 2], [0, 0]), torch.tensor([1.0, 1.0])
    )
    assert losses.tolist() == pytest.approx([-math.exp(0.1), -(math.exp(0.1) + math.exp(-0.1)) / 2])
    assert len(stats.ratio) == 3


@pytest.mark.parametrize("before", [(-0.6, -0.9), (-0.9, -0.6)], ids=["inside", "one clipped"])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_the_gradient_of_two_tokens_is_that_of_autograd(advantage, before):
    """Logits of a vocabulary of two; the loss is written out anew and differentiated by autograd."""
    logits = torch.tensor([[0.3, -0.2], [0.5, 0.1]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([before], dtype=torch.float64)
    chosen = torch.log_softmax(logits, dim=1)[[0, 1], [0, 1]][None]
    losses, _ = token_loss(chosen, old, [2], [1], [advantage], thought_coef=0.5)
    (found,) = torch.autograd.grad(losses.sum(), logits)

    probabilities = logits.exp() / logits.exp().sum(dim=1, keepdim=True)
    written = 0.0
    for weight, probability, then in zip(
        (0.5, 1.0), (probabilities[0, 0], probabilities[1, 1]), old[0].tolist(), strict=True
    ):
        ratio = probability / math.exp(then)
        bounded = min(max(ratio, ratio.new_tensor(0.8)), ratio.new_tensor(1.2))
        written = written - weight * min(advantage * ratio, advantage * bounded) / 1.5
    (expected,) = torch.autograd.grad(written, logits)
    assert losses.item() == pytest.approx(written.item())
    torch.testing.assert_close(found, expected)


def test_micro_batches_of_token_losses_add_up():
    rng = torch.Generator().manual_seed(0)
    new, old = torch.randn(4, 5, generator=rng), torch.randn(4, 5, generator=rng)
    lengths, starts, advantages = [5, 2, 3, 1], [3, 1, 3, 0], [1.0, -2.0, 0.5, -0.1]
    whole, _ = token_loss(new, old, lengths, starts, advantages)
    parts = [
        token_loss(new[i : i + 1], old[i : i + 1], lengths[i : i + 1], starts[i : i + 1], advantages[i : i + 1])[0]
        for i in range(4)
    ]
    torch.testing.assert_close(whole, torch.cat(parts))


def test_clip_higher_leaves_more_room_above_one():
    new = torch.tensor([1.25, 0.75]).log()
    for high, clipped, ratio in ((None, [True, True], 1.2), (0.28, [False, True], 1.25)):
        loss, stats = policy_loss(new, torch.zeros(2), torch.ones(2), 0.2, None, high)
        assert stats.clipped.tolist() == clipped
        assert loss.tolist() == pytest.approx([-ratio, -0.75])
        assert token_loss(new[None], torch.zeros(1, 2), [2], [0], [1.0], high=high)[0].tolist() == pytest.approx(
            [-(ratio + 0.75) / 2]
        )
