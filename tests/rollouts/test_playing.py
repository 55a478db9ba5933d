"""The rules of playing: which action a response stands for, what it costs, and when an episode ends."""

from __future__ import annotations

import numpy as np
import pytest
from toy import ColourTask

from trl_gtr import RandomAgent, RolloutCollector, evaluate_agent
from trl_gtr.rollouts.playing import DEFAULT_STEP_LIMIT, Choice, PlayingRules, SkippableStep, StepLimit
from trl_gtr.types import Response

INFO = {"colour": "red"}
RED = Response(text="", fields={"thoughts": "it is red"}, action="red")
NONSENSE = Response(text="", fields={}, action=None, error="no JSON")


class FiningTask(ColourTask):
    illegal_reward = -0.25


def choose(rules: PlayingRules, response: Response, seed: int = 0) -> Choice:
    space = rules.make_env().action_space
    return rules.choose(response, INFO, space, np.random.default_rng(seed))


@pytest.mark.parametrize("invalid_action", ["random", "penalty"])
def test_a_legal_action_is_played(invalid_action: str) -> None:
    task = ColourTask()
    rules = PlayingRules(task, invalid_action)
    assert choose(rules, RED) == Choice(task.to_env_action(RED, INFO), legal=True)


def test_a_random_action_is_legal_and_drawn_with_the_given_generator() -> None:
    rules = PlayingRules(ColourTask())
    drawn = [choose(rules, NONSENSE, seed) for seed in range(20)]
    assert drawn == [choose(rules, NONSENSE, seed) for seed in range(20)]
    assert len({choice.action for choice in drawn}) > 1
    assert not any(choice.legal for choice in drawn)
    assert {choice.substitute for choice in drawn} <= set(rules.task.legal_actions(INFO))


def test_a_penalty_skips_the_step() -> None:
    rules = PlayingRules(ColourTask(), "penalty")
    env = rules.make_env()
    assert isinstance(env, SkippableStep)
    first, info = env.reset(seed=0)
    action, legal, substitute = rules.choose(NONSENSE, info, env.action_space, np.random.default_rng(0))
    assert not legal
    assert substitute is None
    observation, reward, terminated, _, _ = env.step(action)
    assert reward == -1.0
    assert not terminated
    assert np.array_equal(observation, first)


def test_the_tasks_price_is_paid_where_a_random_action_is_played() -> None:
    assert PlayingRules(FiningTask()).reward(1.0, legal=True) == 1.0
    assert PlayingRules(FiningTask()).reward(1.0, legal=False) == 0.75
    assert PlayingRules(FiningTask(), "penalty").reward(-1.0, legal=False) == -1.0  # the skip has its own price
    assert PlayingRules(ColourTask()).reward(1.0, legal=False) == 1.0


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="'random' or 'penalty', not 'ignore'"):
        PlayingRules(ColourTask(), "ignore")
    with pytest.raises(ValueError, match="'random' or 'penalty'"):
        evaluate_agent(RandomAgent(), ColourTask(), 1, invalid_action="ignore")
    with pytest.raises(ValueError, match="'random' or 'penalty'"):
        RolloutCollector(ColourTask(), num_envs=1, seed=0, invalid_action="ignore")


def test_an_endless_game_ends_in_evaluation() -> None:
    report = evaluate_agent(RandomAgent(), ColourTask(length=10**9), 2, num_envs=2)
    assert [episode.length for episode in report.episodes] == [DEFAULT_STEP_LIMIT] * 2


def test_only_evaluation_and_skips_count_steps() -> None:
    assert isinstance(PlayingRules(ColourTask()).make_env(evaluation=True), StepLimit)
    assert not isinstance(PlayingRules(ColourTask()).make_env(), StepLimit)
