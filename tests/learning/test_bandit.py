"""Every way to learn on a bandit with two states and a parameter for each: through the real estimators and losses.

An episode has two steps, one in each state. Of two answers one is right; the policy's parameters are their log-odds.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from rollout_cases import transition
from torch.nn.functional import logsigmoid

from trl_gtr.learning.advantages import GAE, GroupRelative, Values
from trl_gtr.learning.losses import ResponseRatio, TokenRatio
from trl_gtr.policy.scores import Scores
from trl_gtr.types import Rollout

GROUPS, SIZE, STATES = 8, 4, 2
IMAGES = [np.full((2, 2, 3), state, np.uint8) for state in range(STATES)]
GROUP = GroupRelative("grpo", SIZE, 1.0, 0.0, norm="std", gamma=0.95, step_coef=1.0)
ESTIMATORS = {
    "gae": GAE(gamma=0.9, lam=0.95, reward_scale=1.0, format_reward=0.0, min_std=0.1),
    "grpo": GROUP,
    "rloo": replace(GROUP, method="rloo", norm="mean"),
    "gigpo": replace(GROUP, method="gigpo", norm="mean"),
}
OBJECTIVES = {"response": ResponseRatio(0.2, None), "token": TokenRatio(0.2, None, None, 1.0)}


def scores(odds, states, right):
    """Each answer is one token, the action."""
    logprobs = torch.where(right, logsigmoid(odds[states]), logsigmoid(-odds[states]))[:, None]
    summed, mask = logprobs[:, 0], torch.ones_like(logprobs, dtype=torch.bool)
    return Scores(summed, torch.zeros_like(summed), summed, logprobs, mask, torch.zeros(len(states), dtype=torch.long))


def play(odds, rng):
    """A rollout of all groups, step by step, and for each step its state and whether the answer was right."""
    steps, states, rights = [], [], []
    for state in range(STATES):
        for env in range(GROUPS * SIZE):
            right = bool(rng.random() < torch.sigmoid(odds[state]).item())
            ends = state == STATES - 1
            steps.append(
                transition(env, state, float(right), image=IMAGES[state], episode_step=state, terminated=ends)
            )
            states.append(state)
            rights.append(right)
    rollout = Rollout(steps, [None] * len(steps), [IMAGES[0]] * GROUPS * SIZE, [""] * GROUPS * SIZE)
    return rollout, torch.tensor(states), torch.tensor(rights)


def learn(estimator, objective, sign, updates=40):
    """The chance of a right answer in each state after training; at the start it is one half."""
    odds, rng = torch.zeros(STATES, requires_grad=True), np.random.default_rng(0)
    optimizer = torch.optim.Adam([odds], lr=0.1)
    for _ in range(updates):
        rollout, states, right = play(odds.detach(), rng)
        with torch.no_grad():
            old = scores(odds, states, right)
        values = None
        if estimator.needs_values:
            values = Values(*(torch.zeros(n) for n in (len(states), len(states), GROUPS * SIZE)))
        estimated = estimator(rollout, values)
        advantages = estimator.normalize(estimated.advantages, lambda own: [own])
        kept = torch.ones(len(states), dtype=torch.bool) if estimated.kept is None else estimated.kept
        for _ in range(2):
            losses, _ = objective(scores(odds, states, right), old, sign * advantages)
            losses[kept].sum().div(max(1, int(kept.sum()))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.sigmoid(odds).tolist()


@pytest.mark.parametrize("ratio_level", OBJECTIVES)
@pytest.mark.parametrize("method", ESTIMATORS)
def test_each_estimator_learns_and_a_flipped_sign_shows(method, ratio_level):
    learned = learn(ESTIMATORS[method], OBJECTIVES[ratio_level], sign=1)
    assert min(learned) > 0.9
    flipped = learn(ESTIMATORS[method], OBJECTIVES[ratio_level], sign=-1)
    assert max(flipped) < 0.1
