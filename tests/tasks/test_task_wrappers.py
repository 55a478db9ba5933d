"""Cuts, marks and pools: what `make_env` puts around the points games, also over the original's live lists."""

from __future__ import annotations

import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from trl_gtr.tasks import make_task

SYMBOLS = [*(str(n) for n in range(1, 11)), "+", "-", "*", "/", "(", ")", "="]
HAND = ["HT", "SA", "C9", "D4"]
UNSOLVABLE = ["HA", "SA", "CA", "DA"]


def dealt(cards: list[str], **options: Any) -> gym.Env:
    evaluation = options.pop("evaluation", False)
    env = make_task("points24", **options).make_env(evaluation=evaluation)
    env.reset(seed=0, options={"cards": cards})
    return env


def steps(env: gym.Env, *symbols: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    for symbol in symbols:
        result = env.step(SYMBOLS.index(symbol))
    return result


# -- cuts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symbols", [(")",), ("+",), ("4", "9"), ("4", "*")])
def test_a_dead_end_is_cut_and_costs_one(symbols):
    env = dealt(HAND)
    for symbol in symbols[:-1]:
        _, reward, terminated, truncated, info = steps(env, symbol)
        assert (reward, terminated, truncated) == (0, False, False)
        assert not {"cut", "bootstrap"} & set(info)
    _, reward, terminated, truncated, info = steps(env, symbols[-1])
    assert (reward, terminated, truncated) == (-1, False, True)
    assert (info["cut"], info["bootstrap"]) == ("dead end", False)


def test_a_cut_never_overwrites_a_reward_just_earned():
    env = dealt(HAND)
    for _ in range(13):  # numbers that aren't there leave a space each: 7 elements still fit into 20
        _, reward, _, truncated, info = steps(env, "2")
        assert (reward, truncated, "cut" in info) == (-1, False, False)
    _, reward, _, truncated, info = steps(env, "2")
    assert (reward, truncated, info["cut"]) == (-1, True, "dead end")

    _, reward, terminated, truncated, info = steps(dealt(HAND), "4", "+", "9", "+", "1", "+", "10", "=")
    assert (reward, terminated, truncated) == (10, True, False)
    assert "cut" not in info


def test_an_unsolvable_deal_ends_after_one_step_and_is_nobody_s_fault():
    _, reward, terminated, truncated, info = steps(dealt(UNSOLVABLE), "1")
    assert (reward, terminated, truncated) == (0, False, True)
    assert (info["cut"], info["bootstrap"]) == ("unsolvable deal", False)
    _, reward, _, truncated, info = steps(dealt(UNSOLVABLE), "2")  # a card that isn't there: the game's own -1 stays
    assert (reward, truncated, info["cut"]) == (-1, True, "unsolvable deal")
    _, reward, terminated, truncated, info = steps(dealt(UNSOLVABLE), "=")  # the game's own end
    assert (reward, terminated, truncated, "cut" in info) == (-1, True, False, False)


@pytest.mark.parametrize("options", [{"cut": False}, {"evaluation": True}, {"cut": True, "evaluation": True}])
def test_cuts_can_be_switched_off_and_evaluation_has_none(options):
    for cards in (HAND, UNSOLVABLE):
        env = dealt(cards, **options)
        for _ in range(20):
            _, reward, terminated, truncated, info = steps(env, ")")
            assert (reward, terminated, truncated) == (0, False, False)
            assert "cut" not in info


@pytest.mark.parametrize("evaluation", [False, True])
def test_an_over_long_formula_has_no_future(evaluation):
    env = dealt(HAND, cut=False, evaluation=evaluation)
    for _ in range(21):
        _, _, _, truncated, info = steps(env, "(")
        assert not truncated
        assert "bootstrap" not in info
    _, reward, terminated, truncated, info = steps(env, "(")
    assert (reward, terminated, truncated) == (-1, False, True)
    assert info["bootstrap"] is False
    assert "cut" not in info


def test_ezpoints_is_cut_too():
    task = make_task("ezpoints")
    env = task.make_env()
    env.reset(options={"cards": ["H3", "S4"]})
    env.step(2)
    _, reward, _, truncated, info = env.step(10)  # 3+ can't make 12 with 4
    assert (reward, truncated, info["cut"]) == (-1, True, "dead end")
    env.reset(options={"cards": ["H3", "S9"]})
    env.step(2)
    _, reward, _, truncated, info = env.step(10)
    assert (reward, truncated) == (0, False)


def test_other_truncations_keep_their_future():
    """NumberLine's limit is no part of the state; nothing marks it."""
    env = make_task("number_line").make_env()
    env.reset(options={"target": 5, "current": 1})
    for _ in range(9):
        assert not env.step(0)[3]
    _, _, terminated, truncated, info = env.step(0)
    assert truncated
    assert not terminated
    assert "bootstrap" not in info


def test_an_environment_pickles_in_the_middle_of_an_episode():
    env = make_task("points24", hands=[["4", "9", "A", "10"], ["3", "3", "8", "8"]]).make_env()
    env.reset(seed=5)
    env.step(SYMBOLS.index("("))
    copy = pickle.loads(pickle.dumps(env))
    for symbol in ("(", ")"):
        one, other = env.step(SYMBOLS.index(symbol)), copy.step(SYMBOLS.index(symbol))
        assert np.array_equal(one[0], other[0])
        assert one[1:] == other[1:]
    assert [env.reset()[1]["Cards"] for _ in range(6)] == [copy.reset()[1]["Cards"] for _ in range(6)]


# -- pools -------------------------------------------------------------------------------------------------------


def test_hands_come_from_the_pool():
    pool = [["H4", "S9", "DA", "CK"], ["3", "3", "8", "8"], ["10", 1, "Q", 5]]
    env = make_task(
        "points24", hands=[[str(card).replace("1", "A") if card == 1 else card for card in h] for h in pool]
    ).make_env()
    deals = [env.reset(seed=3 if k == 0 else None)[1]["Cards"] for k in range(90)]
    ranks = {"".join(sorted(name[1:] for name in cards)) for cards in deals}
    assert ranks == {"49AK", "3388", "5AQT"}
    assert all(
        cards == ["H4", "S9", "DA", "CK"] for cards in deals if "DA" in cards and "CK" in cards and "S9" in cards
    )
    suits = {tuple(name[0] for name in cards) for cards in deals if cards[0][1:] == "3"}
    assert len(suits) > 5  # a rank alone gets a new suit with every deal


def test_a_seed_decides_the_hands():
    task = make_task("points24", hands=[["4", "9", "A", "K"], ["3", "3", "8", "8"], ["2", "2", "6", "J"]])
    runs = []
    for _ in range(2):
        env = task.make_env()
        runs.append([env.reset(seed=11 if k == 0 else None)[1]["Cards"] for k in range(8)])
    assert runs[0] == runs[1]
    firsts = {tuple(task.make_env().reset(seed=seed)[1]["Cards"]) for seed in range(12)}
    assert len(firsts) > 6


def test_options_set_the_hand_in_spite_of_a_pool():
    env = make_task("ezpoints", hands=[["3", "4"]]).make_env()
    assert env.reset(options={"cards": ["H5", "S7"]})[1]["Cards"] == ["H5", "S7"]
    assert env.reset()[1]["Numbers"] == [3, 4]


@pytest.mark.parametrize(
    "hands", [[], [["4", "9", "A"]], [["4", "9", "A", "11"]], [["4", "9", "A", "X4"]], [["H4", "S9", "DA", "C10"]]]
)
def test_what_is_no_hand_is_refused(hands):
    with pytest.raises(ValueError, match="hand"):
        make_task("points24", hands=hands)
    with pytest.raises(ValueError, match="make 12"):
        make_task("ezpoints", hands=[["3", "9"], ["S3", "H5"]])


# -- the original ------------------------------------------------------------------------------------------------


class OriginalLike(gym.Env):
    """As the original hands its state out: live lists, which the next step changes. It takes no options."""

    observation_space = gym.spaces.Box(0, 255, (2, 2, 3), np.uint8)
    action_space = gym.spaces.Discrete(17)

    def __init__(self) -> None:
        self.cards, self.numbers = ["HT", "SA", "C9", "D4"], [10, 1, 9, 4]
        self.formula: list[Any] = []

    def _state(self) -> dict[str, Any]:
        return {"Cards": self.cards, "Numbers": self.numbers, "Formula": self.formula}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.formula.clear()
        return np.zeros((2, 2, 3), np.uint8), self._state()

    def step(self, action):
        over = len(self.formula) > 20
        symbol = SYMBOLS[action]
        if symbol == "=":
            right = "".join(map(str, self.formula)) == "4+9+1+10"
            return np.zeros((2, 2, 3), np.uint8), 10.0 if right else -1.0, True, False, self._state()
        if not over:
            self.formula.append(int(symbol) if symbol.isdigit() else symbol)
        return np.zeros((2, 2, 3), np.uint8), -1.0 if over else 0.0, False, over, self._state()


@pytest.fixture
def original():
    """The original's registration in place of ours."""
    ours = gym.registry.get("gym_cards/Points24-v0")
    gym.registry.pop("gym_cards/Points24-v0", None)
    gym.register("gym_cards/Points24-v0", entry_point=OriginalLike, max_episode_steps=300)
    yield
    gym.registry.pop("gym_cards/Points24-v0")
    if ours is not None:
        gym.registry["gym_cards/Points24-v0"] = ours


@pytest.mark.usefixtures("original")
def test_the_task_runs_on_the_original():
    task = make_task("points24")
    env = task.make_env()
    assert isinstance(env.unwrapped, OriginalLike)
    observation, info = env.reset(seed=0)
    infos, prompts = [info], [task.prompt(observation, info)]
    reward = terminated = 0
    while not terminated:
        response = task.expert(info)
        assert all(task.judge(response, info).values())
        # the stand-in knows one solution only: the agent's own aim, which the expert keeps
        aim = "4+9+1+10"
        place = "".join(map(str, info["Formula"]))
        symbol = "=" if place == aim else "10" if place == "4+9+1+" else aim[len(place)]
        words = {
            "cards": ["10", "A", "9", "4"],
            "formula": place,
            "thoughts": f"{aim}=24, so the next symbol is {symbol}.",
        }
        hint = task.format.parse(task.format.render(words, symbol))
        response = task.expert(info, hint=hint)
        assert response == hint
        observation, reward, terminated, truncated, info = env.step(task.to_env_action(response, info))
        assert not truncated
        infos.append(info)
        prompts.append(task.prompt(observation, info))
    assert reward == 10
    lengths = [len(info["Formula"]) for info in infos]
    assert lengths == [0, 1, 2, 3, 4, 5, 6, 7, 7]  # every info keeps its own state
    assert len(set(prompts)) == 8


@pytest.mark.usefixtures("original")
def test_cuts_and_marks_over_the_original():
    env = make_task("points24").make_env()
    env.reset()
    _, reward, _, truncated, info = env.step(SYMBOLS.index(")"))
    assert (reward, truncated, info["cut"]) == (-1, True, "dead end")
    env = make_task("points24").make_env(evaluation=True)
    env.reset()
    for _ in range(21):
        assert not env.step(SYMBOLS.index("("))[3]
    _, reward, _, truncated, info = env.step(0)
    assert (reward, truncated, info["bootstrap"]) == (-1, True, False)


@pytest.mark.usefixtures("original")
def test_a_pool_of_hands_needs_our_environment():
    env = make_task("points24", hands=[["H2", "S3", "D4", "C5"]]).make_env()
    with pytest.raises(ValueError, match=r"needs the games in trl_gtr\.environments"):
        env.reset()


class OriginalLikeBlackjack(gym.Env):
    """One live list of cards for the whole episode."""

    observation_space = gym.spaces.Box(0, 255, (2, 2, 3), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.dealer, self.player = [(10, "K", "H"), (7, "7", "S")], [(2, "2", "H"), (3, "3", "S")]
        return np.zeros((2, 2, 3), np.uint8), {"Dealer Card": self.dealer, "Player Card": self.player}

    def step(self, action):
        self.player.append((4, "4", "D"))
        info = {"Dealer Card": self.dealer, "Player Card": self.player}
        return np.zeros((2, 2, 3), np.uint8), 0.0, False, False, info


def test_blackjack_infos_stay_as_they_are(monkeypatch):
    spec = gym.envs.registration.EnvSpec("gym_cards/Blackjack-v0", entry_point=OriginalLikeBlackjack)
    monkeypatch.setitem(gym.registry, "gym_cards/Blackjack-v0", spec)
    task = make_task("blackjack")
    env = task.make_env()
    infos = [env.reset()[1], env.step(1)[4], env.step(1)[4]]
    assert [len(info["Player Card"]) for info in infos] == [2, 3, 4]
    thoughts = [task.expert(info).fields["thoughts"] for info in infos]
    assert ["5" in thoughts[0], "9" in thoughts[1], "13" in thoughts[2]] == [True] * 3
