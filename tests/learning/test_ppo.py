"""`trl_gtr.learning.ppo` against closed forms and slow calculations that share no code with it."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from trl_gtr.learning.ppo import (
    advantage_moments,
    explained_variance,
    gae,
    kl_k3,
    normalize_advantages,
    policy_loss,
    policy_stats,
    value_loss,
)

GAMMA, LAM = 0.9, 0.95


def column(*values, dtype=torch.float64):
    """One environment's steps as (T, 1)."""
    return torch.tensor(values, dtype=dtype)[:, None]


def flags(*values):
    return torch.tensor(values, dtype=torch.bool)[:, None]


def random_rollout(num_steps, num_envs, seed):
    """Episodes that end in every way, at different times in each environment."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    ends = torch.rand(num_steps, num_envs, generator=rng)
    truncated = (ends > 0.15) & (ends < 0.3)
    shape = (num_steps, num_envs)
    # `final_values` is NaN wherever no truncation gives it a meaning: nobody may read it there
    final_values = torch.where(truncated, normal(*shape), torch.nan)
    return {
        "rewards": normal(*shape),
        "values": normal(*shape),
        "terminated": ends < 0.15,
        "truncated": truncated,
        "final_values": final_values,
        "last_values": normal(num_envs),
    }


def slow_gae(rollout, gamma, lam, env, num_steps):
    """Â_t = Σ_l (γλ)^l δ_{t+l} up to the end of t's own episode, written out for one environment."""
    rewards, values = rollout["rewards"][:, env].tolist(), rollout["values"][:, env].tolist()
    terminated, truncated = rollout["terminated"][:, env].tolist(), rollout["truncated"][:, env].tolist()
    final_values = rollout["final_values"][:, env].tolist()
    advantages = []
    for t in range(num_steps):
        total = 0.0
        for k in range(t, num_steps):
            if terminated[k]:
                after = 0.0
            elif truncated[k]:
                after = final_values[k]
            elif k == num_steps - 1:
                after = float(rollout["last_values"][env])
            else:
                after = values[k + 1]
            total += (gamma * lam) ** (k - t) * (rewards[k] + gamma * after - values[k])
            if terminated[k] or truncated[k]:
                break
        advantages.append(total)
    return advantages


class TestGAE:
    def test_two_steps_by_hand(self):
        advantages, returns = gae(
            rewards=column(1.0, 2.0),
            values=column(0.5, 0.25),
            terminated=flags(False, True),
            truncated=flags(False, False),
            final_values=column(0.0, 0.0),
            last_values=torch.tensor([100.0], dtype=torch.float64),  # belongs to the next episode
            gamma=0.5,
            lam=0.5,
        )
        # δ_1 = 2 − 0.25 = 1.75; δ_0 = 1 + 0.5·0.25 − 0.5 = 0.625; Â_0 = 0.625 + 0.25·1.75
        assert advantages[:, 0].tolist() == [1.0625, 1.75]
        assert returns[:, 0].tolist() == [1.5625, 2.0]

    def test_three_ways_to_follow_a_last_step(self):
        def target(terminated, truncated):
            _, returns = gae(
                column(1.0),
                column(7.0),
                flags(terminated),
                flags(truncated),
                column(20.0),
                torch.tensor([4.0]),
                0.5,
                0.9,
            )
            return returns.item()

        assert target(terminated=False, truncated=False) == 1 + 0.5 * 4  # the rollout goes on elsewhere
        assert target(terminated=False, truncated=True) == 1 + 0.5 * 20  # the true final observation
        assert target(terminated=True, truncated=False) == 1
        assert target(terminated=True, truncated=True) == 1

    @pytest.mark.parametrize("seed", range(5))
    def test_vectorised_environments_match_the_slow_sum(self, seed):
        rollout = random_rollout(num_steps=23, num_envs=6, seed=seed)
        advantages, returns = gae(**rollout, gamma=GAMMA, lam=LAM)
        assert rollout["terminated"].any()
        assert rollout["truncated"].any()
        for env in range(6):
            expected = slow_gae(rollout, GAMMA, LAM, env, num_steps=23)
            torch.testing.assert_close(advantages[:, env].tolist(), expected, rtol=0, atol=1e-12)
            values = rollout["values"][:, env].tolist()
            targets = [a + v for a, v in zip(expected, values, strict=True)]
            torch.testing.assert_close(returns[:, env].tolist(), targets, rtol=0, atol=1e-12)

    def test_lambda_one_is_the_discounted_return(self):
        rollout = random_rollout(num_steps=17, num_envs=4, seed=11)
        _, returns = gae(**rollout, gamma=GAMMA, lam=1.0)
        for env in range(4):
            after = rollout["last_values"][env].item()
            for t in reversed(range(17)):
                if rollout["terminated"][t, env]:
                    after = 0.0
                elif rollout["truncated"][t, env]:
                    after = rollout["final_values"][t, env].item()
                after = rollout["rewards"][t, env].item() + GAMMA * after  # Monte Carlo: the values play no part
                assert returns[t, env].item() == pytest.approx(after, abs=1e-12)

    def test_lambda_zero_is_the_one_step_target(self):
        rollout = random_rollout(num_steps=9, num_envs=3, seed=2)
        rollout["terminated"][:] = False
        rollout["truncated"][:] = False
        _, returns = gae(**rollout, gamma=GAMMA, lam=0.0)
        following = torch.cat([rollout["values"][1:], rollout["last_values"][None]])
        torch.testing.assert_close(returns, rollout["rewards"] + GAMMA * following)

    def test_over_long_formula_is_worth_minus_one(self):
        """The state shows its end, so the caller passes it as terminated: its target is −1.

        Bootstrapping it would make a value of −10 the one that agrees with itself: −1 + 0.9 · (−10) = −10.
        """
        minus_ten = torch.tensor([-10.0], dtype=torch.float64)

        def target(bootstrap):
            _, returns = gae(
                column(-1.0), column(-10.0), flags(not bootstrap), flags(True), column(-10.0), minus_ten, GAMMA, LAM
            )
            return returns.item()

        assert target(bootstrap=False) == -1.0
        assert target(bootstrap=True) == pytest.approx(-10.0)

    def test_nothing_leaks_across_an_episode_end(self):
        rollout = random_rollout(num_steps=8, num_envs=2, seed=3)
        rollout["terminated"][3] = True
        before, _ = gae(**rollout, gamma=GAMMA, lam=LAM)
        rollout["rewards"][4:] += 100
        rollout["values"][4:] -= 50
        after, _ = gae(**rollout, gamma=GAMMA, lam=LAM)
        torch.testing.assert_close(before[:4], after[:4], rtol=0, atol=0)
        assert not torch.allclose(before[4:], after[4:])

    def test_lengths_cut_a_shorter_environment(self):
        rollout = random_rollout(num_steps=10, num_envs=3, seed=4)
        lengths = torch.tensor([10, 4, 1])
        for env, length in enumerate(lengths.tolist()):
            for name in ("rewards", "values"):
                rollout[name][length:, env] = torch.nan
        advantages, returns = gae(**rollout, gamma=GAMMA, lam=LAM, lengths=lengths)
        for env, length in enumerate(lengths.tolist()):
            expected = slow_gae(rollout, GAMMA, LAM, env, num_steps=length) + [0.0] * (10 - length)
            torch.testing.assert_close(advantages[:, env].tolist(), expected, rtol=0, atol=1e-12)
            assert (returns[length:, env] == 0).all()

    @pytest.mark.parametrize("lengths", [[0, 1, 1], [1, 1, 11], [1, 1]])
    def test_bad_lengths_raise(self, lengths):
        with pytest.raises(ValueError, match=r"1\.\.10"):
            gae(**random_rollout(10, 3, seed=0), gamma=GAMMA, lam=LAM, lengths=torch.tensor(lengths))

    @pytest.mark.parametrize(
        ("name", "reshape"),
        [
            ("values", lambda x: x[:, :1]),
            ("rewards", lambda x: x[0]),
            ("truncated", lambda x: x.T),
            ("last_values", lambda x: x[:, None]),
            ("final_values", lambda x: x[-1]),
        ],
    )
    def test_shape_mismatch_raises(self, name, reshape):
        rollout = random_rollout(5, 3, seed=0)
        rollout[name] = reshape(rollout[name])
        with pytest.raises(ValueError, match="shape"):
            gae(**rollout, gamma=GAMMA, lam=LAM)

    def test_number_flags_raise(self):
        rollout = random_rollout(5, 3, seed=0)
        rollout["terminated"] = rollout["terminated"].float()
        with pytest.raises(ValueError, match=r"\.bool\(\)"):
            gae(**rollout, gamma=GAMMA, lam=LAM)

    def test_no_graph_is_kept(self):
        rollout = random_rollout(5, 3, seed=0)
        rollout["values"].requires_grad_()
        advantages, returns = gae(**rollout, gamma=GAMMA, lam=LAM)
        assert not advantages.requires_grad
        assert not returns.requires_grad


class TestNormalization:
    def test_by_hand(self):
        # mean 2, population variance (4 + 0 + 4) / 3
        normalized = normalize_advantages(torch.tensor([0.0, 2.0, 4.0]))
        scale = math.sqrt(8 / 3)
        torch.testing.assert_close(normalized, torch.tensor([-2 / scale, 0.0, 2 / scale]))

    def test_small_spread_is_not_blown_up(self):
        advantages = torch.tensor([0.99, 1.0, 1.01])
        expected = torch.tensor([-0.01, 0.0, 0.01]) / 0.3
        torch.testing.assert_close(normalize_advantages(advantages, min_std=0.3), expected)
        assert (normalize_advantages(torch.full((4,), 2.5)) == 0).all()

    def test_ranks_together_are_exact(self):
        everything = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3 + 1000
        ranks = [everything[:100], everything[100:350], everything[350:]]
        moments = torch.stack([advantage_moments(rank) for rank in ranks]).sum(dim=0)
        together = torch.cat([normalize_advantages(rank, moments) for rank in ranks])
        expected = (everything.double() - everything.double().mean()) / everything.double().std(correction=0)
        torch.testing.assert_close(together.double(), expected, rtol=0, atol=1e-3)
        alone = torch.cat([normalize_advantages(rank) for rank in ranks])
        assert (alone - together).abs().max() > 0.01  # each rank by itself is something else

    def test_moments_by_hand(self):
        assert advantage_moments(torch.tensor([[1.0, -2.0], [3.0, 0.0]])).tolist() == [4.0, 2.0, 14.0]

    def test_floor_must_be_positive(self):
        with pytest.raises(ValueError, match="min_std"):
            normalize_advantages(torch.ones(3), min_std=0.0)


def loss_and_gradient(log_ratio, advantage, **options):
    logprob = torch.tensor([log_ratio], requires_grad=True)
    loss, stats = policy_loss(logprob, torch.zeros(1), torch.tensor([advantage]), cliprange=0.1, **options)
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
            torch.log_softmax(logits, dim=0)[actions], old, torch.tensor([1.0, 0.0, -1.0]), cliprange=0.1
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
                policy, _ = policy_loss(out, old[rows], advantages[rows], cliprange=0.1)
                ((policy + 0.5 * value_loss(out, returns[rows])).sum() / 8).backward()
            return weights.grad

        whole = gradient(8)
        assert whole.abs().max() > 0.1
        torch.testing.assert_close(gradient(1), whole)
        torch.testing.assert_close(gradient(3), whole)

    @pytest.mark.parametrize("odd", [0, 1, 2])
    def test_column_beside_row_raises(self, odd):
        arguments = [torch.zeros(4), torch.zeros(4), torch.ones(4)]
        arguments[odd] = arguments[odd][:, None]
        with pytest.raises(ValueError, match=r"\(4, 1\)"):
            policy_loss(*arguments, cliprange=0.1)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_log_probs_raise(self, dtype):
        with pytest.raises(ValueError, match="float32"):
            policy_loss(torch.zeros(4, dtype=dtype), torch.zeros(4), torch.ones(4), cliprange=0.1)
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
