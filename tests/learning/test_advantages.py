"""`trl_gtr.learning.advantages` against closed forms and slow calculations that share no code with it."""

import math
from dataclasses import replace

import pytest
import torch
from rollout_cases import IMAGE, rollout, transition
from toy import ColourTask, quiet_config

from trl_gtr.config import GTRConfig
from trl_gtr.learning.advantages import (
    GAE,
    AdvantageEstimator,
    Advantages,
    GroupRelative,
    Values,
    advantage_moments,
    choose_estimator,
    gae,
    in_groups,
    normalize_advantages,
)
from trl_gtr.types import Rollout

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
        advantages = torch.tensor([0.0, 2.0, 4.0])
        normalized = normalize_advantages(advantages, advantage_moments(advantages), min_std=0.3)
        scale = math.sqrt(8 / 3)
        torch.testing.assert_close(normalized, torch.tensor([-2 / scale, 0.0, 2 / scale]))

    def test_a_small_spread_is_not_amplified(self):
        advantages = torch.tensor([0.99, 1.0, 1.01])
        expected = torch.tensor([-0.01, 0.0, 0.01]) / 0.3
        torch.testing.assert_close(normalize_advantages(advantages, advantage_moments(advantages), 0.3), expected)
        equal = torch.full((4,), 2.5)
        assert (normalize_advantages(equal, advantage_moments(equal), 0.3) == 0).all()

    def test_ranks_together_are_exact(self):
        everything = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3 + 1000
        ranks = [everything[:100], everything[100:350], everything[350:]]
        moments = torch.stack([advantage_moments(rank) for rank in ranks]).sum(dim=0)
        together = torch.cat([normalize_advantages(rank, moments, 0.3) for rank in ranks])
        expected = (everything.double() - everything.double().mean()) / everything.double().std(correction=0)
        torch.testing.assert_close(together.double(), expected, rtol=0, atol=1e-3)
        alone = torch.cat([normalize_advantages(rank, advantage_moments(rank), 0.3) for rank in ranks])
        assert (alone - together).abs().max() > 0.01  # each rank by itself is something else

    def test_moments_by_hand(self):
        assert advantage_moments(torch.tensor([[1.0, -2.0], [3.0, 0.0]])).tolist() == [4.0, 2.0, 14.0]

    def test_floor_must_be_positive(self):
        with pytest.raises(ValueError, match="min_std"):
            normalize_advantages(torch.ones(3), advantage_moments(torch.ones(3)), min_std=0.0)


ESTIMATOR = GAE(gamma=0.9, lam=0.0, reward_scale=1.0, format_reward=0.0, min_std=0.1)


def constant(value, steps, envs=1):
    return Values(torch.full((steps,), value), torch.full((steps,), value), torch.full((envs,), value))


class TestGAEEstimator:
    @pytest.mark.parametrize(
        ("ends", "expected"),
        [
            # Every value is 2; γ = 0.9, λ = 0, so that a return is r + γ · (the value that follows).
            ({}, [1 + 0.9 * 2, -1 + 0.9 * 2]),
            ({"terminated": True}, [1, -1]),
            # a step limit that the state doesn't show: the value of the true final observation follows
            ({"truncated": True, "bootstrap": True}, [1 + 0.9 * 2, -1 + 0.9 * 2]),
            # a cut, or a formula that became too long: an end, although the environment says truncated
            ({"truncated": True, "bootstrap": False}, [1, -1]),
        ],
    )
    def test_returns_follow_how_a_step_ended(self, ends, expected):
        estimated = ESTIMATOR(rollout([[1.0], [-1.0]], **ends), constant(2.0, steps=2))
        assert estimated.returns.tolist() == pytest.approx(expected)
        assert estimated.advantages.tolist() == pytest.approx([target - 2 for target in expected])

    def test_steps_of_several_environments_stay_apart(self):
        played = rollout([[1.0, 10.0], [2.0, 20.0]])
        values = Values(torch.tensor([0.0, 0.0, 4.0, 40.0]), torch.zeros(4), torch.tensor([5.0, 50.0]))
        estimated = ESTIMATOR(played, values)
        # r + 0.9 · the same environment's next value
        assert estimated.returns.tolist() == pytest.approx([1 + 3.6, 10 + 36, 2 + 4.5, 20 + 45])

    def test_rewards_and_the_bonus_are_scaled_and_the_bonus_is_no_return(self):
        estimator = replace(ESTIMATOR, reward_scale=0.1, format_reward=5.0)
        played = rollout([[1.0, 1.0]], terminated=True)
        played.transitions[1] = transition(1, 0, 1.0, terminated=True, legal=False)
        estimated = estimator(played, constant(0.0, steps=2, envs=2))
        assert estimated.returns.tolist() == pytest.approx([0.1, 0.1])
        assert estimated.advantages.tolist() == pytest.approx([0.1 + 0.5, 0.1])

    def test_it_is_normalised_over_all_processes(self):
        own, other = torch.tensor([0.0, 2.0]), torch.tensor([4.0])
        scale = math.sqrt(8 / 3)
        normalized = ESTIMATOR.normalize(own, lambda moments: [moments, advantage_moments(other)])
        assert normalized.tolist() == pytest.approx([-2 / scale, 0.0])

    def test_the_settings_reach_it(self, tmp_path):
        args = quiet_config(tmp_path, gamma=0.5, lam=0.25, format_reward=2.0, min_advantage_std=0.7)
        assert GAE.from_config(args, 0.1) == GAE(0.5, 0.25, 0.1, 2.0, 0.7)

    def test_values_are_needed(self):
        assert GAE.needs_values
        with pytest.raises(ValueError, match="GAE needs values"):
            ESTIMATOR(rollout([[1.0]]), None)


class Plain(AdvantageEstimator):
    """The reward of a step is its advantage."""

    def __call__(self, rollout, values):
        return Advantages(torch.tensor([step.reward for step in rollout.transitions]))


class Grouped(Plain):
    needs_groups = True


def test_an_estimator_needs_nothing_unless_it_says_so(tmp_path):
    estimator = Plain()
    assert not estimator.needs_values
    assert not estimator.needs_groups
    estimated = estimator(rollout([[1.0], [3.0]]), None)
    assert estimated.returns is None
    assert estimator.normalize(estimated.advantages, lambda own: [own]).tolist() == [1.0, 3.0]
    estimator.check(quiet_config(tmp_path))


def test_settings_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Plain trains no value head.*leave `value_warmup_updates` out"):
        Plain().check(quiet_config(tmp_path, value_warmup_updates=1))
    with pytest.raises(ValueError, match="Grouped compares the episodes of a group: set `group_size`"):
        choose_estimator(Grouped(), quiet_config(tmp_path), ColourTask())


def test_gae_is_chosen_and_scaled_by_the_settings_or_the_task(tmp_path):
    class TenTimes(ColourTask):
        reward_scale = 0.1

    given = Plain()
    assert choose_estimator(given, quiet_config(tmp_path), TenTimes()) is given
    for scale, expected in ((None, 0.1), (0.5, 0.5)):
        estimator = choose_estimator(None, quiet_config(tmp_path, reward_scale=scale), TenTimes())
        assert isinstance(estimator, GAE)
        assert estimator.reward_scale == expected


# --- groups ---------------------------------------------------------------------------------------------------------

RLOO = GroupRelative("rloo", group_size=2, reward_scale=1.0, format_reward=0.0, norm="mean", gamma=0.5, step_coef=1.0)


def grouped(*episodes, ends=True, **fields):
    """One episode per environment, as rewards; the rollout goes step by step through those that go on."""
    steps = [
        transition(env, step, rewards[step], terminated=ends and step == len(rewards) - 1, **fields)
        for step in range(max(map(len, episodes)))
        for env, rewards in enumerate(episodes)
        if step < len(rewards)
    ]
    return Rollout(steps, [None] * len(steps), [], [])


class TestGroupRelative:
    def test_steps_are_compared_within_their_group(self):
        estimated = RLOO(grouped([1.0], [0.0, 0.0], [5.0], [9.0]), None)
        # By step, then environment: 1 against 0; 5 against 9.
        assert estimated.advantages.tolist() == [1.0, -1.0, -4.0, 4.0, -1.0]
        assert estimated.returns is None
        assert estimated.kept.all()
        assert estimated.metrics == {"groups/cut": [0, 0], "groups/dead": [0, 0], "groups/refilled": [0, 0]}

    def test_groups_of_one_lane_stay_apart(self):
        played = grouped([1.0], [0.0])
        later = [transition(env, 1, reward, terminated=True, episode=1) for env, reward in ((0, 3.0), (1, 7.0))]
        played.transitions += later
        assert in_groups(played.transitions, 2) == [[[0], [1]], [[2], [3]]]
        assert RLOO(played, None).advantages.tolist() == [1.0, -1.0, -4.0, 4.0]

    def test_a_dead_group_is_counted_and_dropped(self):
        estimated = RLOO(grouped([1.0, 0.0], [0.5, 0.5], [1.0], [0.0]), None)
        assert estimated.kept.tolist() == [False, False, True, True, False, False]
        assert estimated.advantages.tolist() == [0.0, 0.0, 1.0, -1.0, 0.0, 0.0]
        assert estimated.metrics == {"groups/cut": [0, 0], "groups/dead": [1, 0], "groups/refilled": [0, 0]}

    def test_a_cut_episode_is_dropped_with_its_group(self):
        played = grouped([1.0, 2.0], [0.0], [1.0], [0.0])
        played.transitions[-1] = transition(0, 1, 2.0)  # it goes on
        estimated = RLOO(played, None)
        assert estimated.kept.tolist() == [False, False, True, True, False]
        assert estimated.metrics == {"groups/cut": [1, 0], "groups/dead": [0], "groups/refilled": [0, 0]}

    def test_refills_are_counted(self):
        played = grouped([1.0], [1.0], [1.0], [0.0])
        again = [replace(step, step=1, episode=1) for step in played.transitions[:2]]
        played.transitions += again  # by the environments of the first group
        assert RLOO(played, None).metrics["groups/refilled"] == [0, 0, 1]

    @pytest.mark.parametrize("missing", [True, False])
    def test_a_lost_or_missing_episode_is_dropped_with_its_group(self, missing):
        played = grouped([1.0], [0.0])
        lost = transition(1, 0, 0.0, truncated=True, final_info={"worker_lost": True})
        played.transitions[1:] = [] if missing else [lost]
        estimated = RLOO(played, None)
        assert not estimated.kept.any()
        assert estimated.metrics == {"groups/cut": [1], "groups/refilled": [0]}

    def test_the_format_reward_is_a_reward_and_is_scaled(self):
        estimator = replace(RLOO, reward_scale=0.1, format_reward=5.0)
        played = grouped([1.0], [1.0])
        played.transitions[1] = transition(1, 0, 1.0, terminated=True, legal=False)
        assert estimator(played, None).advantages.tolist() == pytest.approx([0.5, -0.5])

    def test_gigpo_compares_equal_images_with_equal_prompts(self):
        estimator = replace(RLOO, method="gigpo")
        played = grouped([0.0, 4.0], [2.0])
        # A_E: 4 and 2, mean 3. γ = .5: both returns from the shared first state are 2; the last step is alone.
        for change in ({"prompt": "later"}, {"image": IMAGE + 1}, {"image": IMAGE[:14]}):
            played.transitions[2] = transition(0, 1, 4.0, terminated=True, **change)
            assert estimator(played, None).advantages.tolist() == [1.0, -1.0, 1.0]
        # Had it looked the same, the subgroup were 2, 4, 2.
        played.transitions[2] = transition(0, 1, 4.0, terminated=True, image=IMAGE.copy())
        expected = [1 + 2 - 8 / 3, -1 + 2 - 8 / 3, 1 + 4 - 8 / 3]
        assert estimator(played, None).advantages.tolist() == pytest.approx(expected)

    def test_grpo_divides(self):
        estimated = replace(RLOO, method="grpo", norm="std")(grouped([1.0], [3.0]), None)
        assert estimated.advantages.tolist() == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)], rel=1e-5)


def group_config(method="grpo", **settings):
    usual = {"use_cpu": True, "report_to": "none", "output_dir": "unused", "num_envs": 4, "group_size": 2}
    return GTRConfig(advantage_estimator=method, **{**usual, "per_device_train_batch_size": 8, **settings})


@pytest.mark.parametrize(
    ("method", "norm", "gamma"), [("grpo", "std", 0.9), ("rloo", "mean", 0.9), ("gigpo", "mean", 0.7)]
)
def test_group_methods_are_chosen_by_name(method, norm, gamma):
    args = group_config(method, gamma=gamma, format_reward=2.0, reward_scale=0.5)
    chosen = choose_estimator(None, args, ColourTask())
    assert chosen == GroupRelative(method, 2, 0.5, 2.0, norm, gamma, 1.0)
    assert not chosen.needs_values


@pytest.mark.parametrize(
    ("method", "settings", "error"),
    [
        ("grpo", {"group_size": 1}, "set `group_size` to 2 or more"),
        ("grpo", {"vf_coef": 0.1}, "`vf_coef` is for a value head, but 'grpo' trains none: leave `vf_coef` out"),
        ("rloo", {"value_head_sizes": [16]}, "leave `value_head_sizes` out"),
        ("gigpo", {"value_learning_rate": 1e-3}, "leave `value_learning_rate` out"),
        ("gigpo", {"value_gradient_to_trunk": True}, "leave `value_gradient_to_trunk` out"),
        ("gigpo", {"cliprange_value": 0.2}, "leave `cliprange_value` out"),
        ("gigpo", {"value_warmup_updates": 1}, "leave `value_warmup_updates` out"),
        ("grpo", {"lam": 0.9}, "`lam` is for 'gae', but the run uses 'grpo'"),
        ("gigpo", {"min_advantage_std": 0.3}, "leave `min_advantage_std` out"),
        ("rloo", {"gamma": 0.99}, "`gamma` is for 'gae' and 'gigpo': 'rloo' doesn't discount"),
        ("grpo", {"step_advantage_coef": 0.5}, "`step_advantage_coef` is for 'gigpo', but the run uses 'grpo'"),
        ("rloo", {"group_norm": "std"}, "'rloo' never divides"),
        ("gae", {}, "`group_size` is for groups, but GAE doesn't compare any"),
        ("gae", {"group_size": 1, "refill_groups": 2}, "leave `refill_groups` out"),
    ],
)
def test_settings_that_do_not_suit_a_group_method(method, settings, error):
    with pytest.raises(ValueError, match=error):
        choose_estimator(None, group_config(method, **settings), ColourTask())
