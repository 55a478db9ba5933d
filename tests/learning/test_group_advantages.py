"""Group advantages against hand-worked tables and an implementation in plain Python that shares no code."""

import math
import random
import statistics

import pytest
import torch

from trl_gtr.learning.group_advantages import discounted_returns, gigpo, grpo, rloo, same_states


def group(*episodes):
    return [torch.tensor(episode, dtype=torch.float64) for episode in episodes]


def numbers(advantages):
    return [advantage.tolist() for advantage in advantages]


def close(found, expected):
    assert [len(episode) for episode in found] == [len(episode) for episode in expected]
    for own, other in zip(numbers(found), expected, strict=True):
        assert own == pytest.approx(other, abs=1e-9)


# Returns 3, 0, 0; episodes of different lengths. Mean 1, sample variance (4 + 1 + 1) / 2 = 3.
UNEQUAL = [[1.0, 2.0], [0.0], [-1.0, 0.0, 1.0]]


class TestByHand:
    def test_grpo(self):
        scale = math.sqrt(3) + 1e-6
        close(grpo(group(*UNEQUAL)), [[2 / scale] * 2, [-1 / scale], [-1 / scale] * 3])

    def test_grpo_without_division(self):
        close(grpo(group(*UNEQUAL), "mean"), [[2.0] * 2, [-1.0], [-1.0] * 3])

    def test_rloo(self):
        # 3 − (0 + 0)/2; 0 − (3 + 0)/2
        close(rloo(group(*UNEQUAL)), [[3.0] * 2, [-1.5], [-1.5] * 3])

    def test_two_episodes(self):
        scale = math.sqrt(2) + 1e-6  # of 1 and 3: the sample variance is ((−1)² + 1²) / 1
        close(grpo(group([1.0], [3.0])), [[-1 / scale], [1 / scale]])
        close(rloo(group([1.0], [3.0])), [[-2.0], [2.0]])

    def test_a_dead_group_is_worth_nothing(self):
        dead = group([1.0, 0.0], [1.0], [0.5, 0.5])
        zeros = [[0.0, 0.0], [0.0], [0.0, 0.0]]
        close(grpo(dead), zeros)
        close(rloo(dead), zeros)

    def test_gigpo(self):
        # γ = .5: discounted returns are 0 + .5·4 = 2, 4 | −1 + .5·0 = −1, 0 | 6.
        rewards = group([0.0, 4.0], [-1.0, 0.0], [6.0])
        states = [["start", "a"], ["start", "b"], ["start"]]
        # A_E: returns 4, −1, 6, mean 3. A_S: at the start 2, −1, 6 with mean 7/3; "a" and "b" occur once.
        low, none, high = 2 - 7 / 3, -1 - 7 / 3, 6 - 7 / 3
        close(gigpo(rewards, states, 0.5, 1.0), [[1 + low, 1.0], [-4 + none, -4.0], [3 + high]])
        close(gigpo(rewards, states, 0.5, 0.25), [[1 + low / 4, 1.0], [-4 + none / 4, -4.0], [3 + high / 4]])

    def test_gigpo_with_division(self):
        # Returns 2 and 0: mean 1, sample deviation √2. The same for the only shared state: γ = 1.
        rewards, states = group([2.0], [0.0, 0.0]), [["start"], ["start", "later"]]
        unit = 1 / (math.sqrt(2) + 1e-6)
        close(gigpo(rewards, states, 1.0, 1.0, "std"), [[2 * unit], [-2 * unit, -unit]])

    def test_a_state_may_recur_within_an_episode(self):
        rewards, states = group([0.0, 1.0], [0.0]), [["start", "start"], ["start"]]
        # γ = .5: .5, 1, 0 with mean .5; returns 1 and 0 with mean .5.
        close(gigpo(rewards, states, 0.5, 1.0), [[0.5 + 0.0, 0.5 + 0.5], [-0.5 - 0.5]])

    def test_discounted_returns(self):
        assert discounted_returns(torch.tensor([1.0, 2.0, 4.0]), 0.5).tolist() == [3.0, 4.0, 4.0]

    def test_same_states(self):
        assert same_states([["a", "b"], ["b"], ["c", "a", "b"]]) == [[0, 4], [1, 2, 5]]


def slow_spread(values, norm):
    return statistics.stdev(values) + 1e-6 if norm == "std" else 1.0


def slow_grpo(rewards, norm):
    returns = [sum(episode) for episode in rewards]
    scale = slow_spread(returns, norm)
    return [[(own - statistics.fmean(returns)) / scale] * len(e) for own, e in zip(returns, rewards, strict=True)]


def slow_rloo(rewards):
    returns = [sum(episode) for episode in rewards]
    others = [statistics.fmean(returns[:i] + returns[i + 1 :]) for i in range(len(returns))]
    return [[r - o] * len(e) for r, o, e in zip(returns, others, rewards, strict=True)]


def slow_gigpo(rewards, states, gamma, omega, norm):
    """Every step looks for its companions anew."""
    worth = [
        [sum(gamma**k * r for k, r in enumerate(episode[t:])) for t in range(len(episode))] for episode in rewards
    ]
    result = []
    for e, (episode, shared) in enumerate(zip(rewards, slow_grpo(rewards, norm), strict=True)):
        row = []
        for t in range(len(episode)):
            company = [
                worth[other][s]
                for other in range(len(rewards))
                for s in range(len(rewards[other]))
                if states[other][s] == states[e][t]
            ]
            own = 0.0
            if len(company) > 1:
                own = (worth[e][t] - statistics.fmean(company)) / slow_spread(company, norm)
            row.append(shared[t] + omega * own)
        result.append(row)
    return result


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("norm", ["std", "mean"])
def test_random_groups_match_the_slow_implementation(seed, norm):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 6) for _ in range(rng.randint(2, 8))]
    rewards = [[rng.choice([-1.0, 0.0, 1.0, 10.0]) + rng.random() for _ in range(length)] for length in lengths]
    states = [[rng.choice("abcde") for _ in range(length)] for length in lengths]
    close(grpo(group(*rewards), norm), slow_grpo(rewards, norm))
    close(rloo(group(*rewards)), slow_rloo(rewards))
    close(gigpo(group(*rewards), states, 0.95, 0.7, norm), slow_gigpo(rewards, states, 0.95, 0.7, norm))
