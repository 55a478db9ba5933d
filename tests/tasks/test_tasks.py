"""The card games in words: prompts that hide what must be read, experts that win, judges that know what is true."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import sys
from functools import cache
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from toy import ColourTask

from trl_gtr.responses.action_text import match_action
from trl_gtr.tasks import Task, make_task, name_of
from trl_gtr.tasks.blackjack import best_action
from trl_gtr.types import Response, Transition

NAMES = ["points24", "ezpoints", "number_line", "blackjack"]
RANKS = ["A", "2", "3", "4", "5", "6", "7", "8", "9", "10", "J", "Q", "K"]
SYMBOLS = [*(str(n) for n in range(1, 11)), "+", "-", "*", "/", "(", ")", "="]
JUDGED = {
    "points24": ["cards", "formula", "aim", "action"],
    "ezpoints": ["cards", "formula", "aim", "action"],
    "number_line": ["current", "target", "direction"],
    "blackjack": ["total", "dealer"],
}
INFOS: dict[str, dict[str, Any]] = {
    "points24": {"Cards": ["HT", "SA", "C9", "D4"], "Numbers": [10, 1, 9, 4], "Formula": ["4", "+", "9"]},
    "ezpoints": {"Cards": ["H3", "S9"], "Numbers": [3, 9], "Formula": []},
    "number_line": {"Target": 4, "Current": 1},
    "blackjack": {"Dealer Card": [(10, "K", "H"), (7, "7", "S")], "Player Card": [(9, "9", "C"), (6, "6", "D")]},
}


def names_of(ranks) -> list[str]:
    return ["HSDC"[i % 4] + ("T" if rank == "10" else rank) for i, rank in enumerate(ranks)]


def hand(numbers, formula=()) -> dict[str, Any]:
    return {"Cards": names_of([RANKS[n - 1] for n in numbers]), "Numbers": list(numbers), "Formula": list(formula)}


def transition(reward: float, terminated: bool = False, truncated: bool = False) -> Transition:
    """Only what a task's success looks at."""
    names = [field.name for field in dataclasses.fields(Transition)]
    known = {"reward": reward, "terminated": terminated, "truncated": truncated}
    return Transition(**{name: known.get(name) for name in names})


def play(task: Task, env: gym.Env, reset: dict[str, Any], limit: int = 60) -> list[Transition]:
    """One episode of the expert through the text interface; every response must be true and legal."""
    observation, info = env.reset(**reset)
    episode: list[Transition] = []
    while len(episode) < limit:
        assert task.prompt(observation, info)
        expert = task.expert(info)
        assert expert is not None
        response = task.format.parse(expert.text)
        assert response == expert
        assert all(task.judge(response, info).values()), (response, info)
        assert task.solvable(info)
        action = task.to_env_action(response, info)
        assert action is not None
        observation, reward, terminated, truncated, info = env.step(action)
        episode.append(transition(float(reward), terminated, truncated))
        if terminated or truncated:
            return episode
    raise AssertionError("the expert does not come to an end")


# -- the seam ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("thoughts", [True, False])
def test_tasks_fit_the_protocol_and_pickle(name, thoughts):
    task = make_task(name, thoughts=thoughts)
    assert isinstance(task, Task)
    assert task.name == name
    copy = pickle.loads(pickle.dumps(task))
    info = INFOS[name]
    assert copy.prompt(None, info) == task.prompt(None, info)
    assert copy.expert(info) == task.expert(info)
    assert copy.rubric == task.rubric


@pytest.mark.parametrize(
    ("wrong", "right"), [("point24", "points24"), ("NumberLine", "number_line"), ("BlackJack", "blackjack")]
)
def test_an_unknown_name_gets_the_nearest_suggested(wrong, right):
    with pytest.raises(ValueError, match=f"did you mean '{right}'"):
        make_task(wrong)


def test_unknown_names_and_options_say_what_there_is():
    with pytest.raises(ValueError, match="points24, ezpoints, number_line, blackjack"):
        make_task("zzz")
    with pytest.raises(ValueError, match=r"no option hands.*env_kwargs"):
        make_task("blackjack", hands=[["A"]])


@pytest.mark.parametrize("name", NAMES)
def test_prompt_and_parser_agree(name):
    for thoughts in (True, False):
        task = make_task(name, thoughts=thoughts)
        response = task.format.parse(task.prompt(None, INFOS[name]))
        assert response.valid, response.error
        assert list(response.fields) == [field.key for field in task.format.fields]


def test_schemas():
    keys = {name: [field.key for field in make_task(name).format.fields] for name in NAMES}
    assert keys == {
        "points24": ["cards", "formula", "thoughts"],
        "ezpoints": ["cards", "formula", "thoughts"],
        "number_line": ["current number", "target number", "thoughts"],
        "blackjack": ["thoughts"],
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_action_only_variant_has_no_thoughts(name):
    task = make_task(name, thoughts=False)
    prompt = task.prompt(None, INFOS[name])
    assert '{"action": "..."}' in prompt
    assert "thoughts" not in prompt
    assert '"cards"' not in prompt
    response = task.expert(INFOS[name])
    assert json.loads(response.text) == {"action": make_task(name).expert(INFOS[name]).action}
    assert not any(task.judge(response, INFOS[name]).values())


def test_prompts_are_complete():
    words = {
        "points24": ["24", "J, Q and K count 10", "exactly once", '"4+9"', ", ".join(SYMBOLS)],
        "ezpoints": ["12", "J, Q and K count 10", "exactly once", 'so far: ""', "9, 10, +, *, =\n"],
        "number_line": ["0 to 5", "-, +", "target number", "current number"],
        "blackjack": ["21", "stand, hit", "dealer", "J, Q and K count 10"],
    }
    for name, expected in words.items():
        prompt = make_task(name).prompt(None, INFOS[name])
        for word in [*expected, '"action"', "You are"]:
            assert word in prompt, (name, word)
    assert "A counts 1, J 11, Q 12 and K 13" in make_task(
        "points24", env_kwargs={"treat_face_cards_as_10": False}
    ).prompt(None, INFOS["points24"])


def test_prompts_and_public_states_hide_what_must_be_read_from_the_picture():
    """Only the formula may tell two states apart: no card, number or position gets through."""
    changed = {
        "points24": {**INFOS["points24"], "Cards": ["H2", "S3", "CK", "D7"], "Numbers": [2, 3, 10, 7]},
        "ezpoints": {**INFOS["ezpoints"], "Cards": ["H4", "S8"], "Numbers": [4, 8]},
        "number_line": {"Target": 0, "Current": 5},
        "blackjack": {"Dealer Card": [(2, "2", "C"), (3, "3", "C")], "Player Card": [(4, "4", "C"), (5, "5", "C")]},
    }
    for name in NAMES:
        task = make_task(name)
        assert task.prompt(None, INFOS[name]) == task.prompt(None, changed[name])
        assert task.public_state(INFOS[name]) == task.public_state(changed[name])
        json.dumps(task.public_state(INFOS[name]))
    assert make_task("points24").public_state(INFOS["points24"]) == {
        "formula": "4+9",
        "target": 24,
        "symbols": SYMBOLS,
    }


def test_a_formula_with_braces_or_spaces_is_shown_as_it_is():
    info = {**INFOS["points24"], "Formula": ["4", "+", " ", "9", "{x}"]}
    assert 'so far: "4+ 9{x}"' in make_task("points24").prompt(None, info)


# -- actions ------------------------------------------------------------------------------------------------------


def acting(name: str, action: str | None, **fields: Any) -> Response:
    return Response("", fields=fields, action=action)


@pytest.mark.parametrize("name", NAMES)
def test_legal_actions_are_the_environment_s_in_order(name):
    task = make_task(name)
    expected = {
        "points24": SYMBOLS,
        "ezpoints": [*(str(n) for n in range(1, 11)), "+", "*", "="],
        "number_line": ["-", "+"],
        "blackjack": ["stand", "hit"],
    }[name]
    assert list(task.legal_actions(INFOS[name])) == expected
    for index, text in enumerate(expected):
        assert task.to_env_action(acting(name, text), INFOS[name]) == index
    env = task.make_env()
    assert env.action_space.n == len(expected)


def test_action_texts_are_matched_exactly():
    points = make_task("points24")
    for text, expected in {
        "10": 9, "1": 0, " 1 ": 0, '"+"': 10, "`*`": 12, "×": 12, "x": 12, "X": 12, "−": 11, "÷": 13, "=": 16,
        "0": None, "11": None, "100": None, "1 0": None, "+-": None, "+ ": 10, "A": None, "K": None, "plus": None,
        "": None, "4+": None, "01": None, "1.0": None, "xx": None,
    }.items():  # fmt: skip
        assert points.to_env_action(acting("points24", text), INFOS["points24"]) == expected, text
    blackjack = make_task("blackjack")
    for text, expected in {"Hit": 1, "'STAND'": 0, "hit.": None, "I hit": None, "hits": None}.items():
        assert blackjack.to_env_action(acting("blackjack", text), INFOS["blackjack"]) == expected, text
    assert make_task("number_line").to_env_action(acting("number_line", "−"), {}) == 0
    assert make_task("number_line").to_env_action(acting("number_line", "+1"), {}) is None
    assert match_action("drawer 1", ["drawer 10", "drawer 1"]) == 1
    assert match_action("x", ["x"]) == 0


def test_an_invalid_response_names_no_action():
    task = make_task("blackjack")
    assert task.to_env_action(task.format.parse('{"action": "hit"}'), {}) is None  # the thoughts are missing
    assert task.to_env_action(acting("blackjack", None), {}) is None


def test_face_cards_with_numbers_of_their_own_have_actions_of_their_own():
    task = make_task("points24", env_kwargs={"treat_face_cards_as_10": False})
    assert len(task.legal_actions({})) == 20
    assert task.to_env_action(acting("points24", "13"), {}) == 12
    assert task.make_env().action_space.n == 20
    info = {"Cards": ["HK", "SJ", "CA", "DA"], "Numbers": [13, 11, 1, 1], "Formula": []}
    response = task.expert(info)
    assert response.fields["cards"] == ["K", "J", "A", "A"]
    assert all(task.judge(response, info).values())


# -- experts win ---------------------------------------------------------------------------------------------------


def test_the_expert_wins_every_solvable_deal_of_points24():
    """566 of the 715 hands of numbers up to 10 can make 24: a known count. The environment says which are won."""
    task = make_task("points24")
    env = task.make_env(evaluation=True)
    won = 0
    for numbers in itertools.combinations_with_replacement(range(1, 11), 4):
        info = hand(numbers)
        if not task.solvable(info):
            assert task.expert(info) is None
            continue
        episode = play(task, env, {"options": {"cards": info["Cards"]}})
        assert task.success(episode)
        assert sum(step.reward for step in episode) == 10
        won += 1
    assert won == 566


def test_the_expert_wins_ezpoints():
    task = make_task("ezpoints")
    env = task.make_env()
    for seed in range(150):
        episode = play(task, env, {"seed": seed})
        assert task.success(episode)
        assert len(episode) == 4


def test_the_expert_walks_straight_to_the_target():
    task = make_task("number_line")
    env = task.make_env()
    for target, current in itertools.permutations(range(6), 2):
        episode = play(task, env, {"options": {"target": target, "current": current}})
        assert len(episode) == abs(target - current)
        assert task.success(episode)
        assert task.metrics(episode) == {"no_wrong_move": 1.0}


CARD = {value: 4 / 13 if value == 10 else 1 / 13 for value in range(1, 11)}


def best_total(hard: int, ace: bool) -> int:
    return hard + 10 if ace and hard <= 11 else hard


@cache
def dealer_ends(hard: int, ace: bool) -> dict[int, float]:
    """The dealer's final totals (0 if bust) and their probabilities."""
    total = best_total(hard, ace)
    if total > 21:
        return {0: 1.0}
    if total >= 17:
        return {total: 1.0}
    ends: dict[int, float] = {}
    for value, p in CARD.items():
        for end, q in dealer_ends(hard + value, ace or value == 1).items():
            ends[end] = ends.get(end, 0.0) + p * q
    return ends


@cache
def value_of_standing(total: int, shown: int) -> float:
    return sum(
        p * q * ((total > end) - (total < end))
        for hole, p in CARD.items()
        for end, q in dealer_ends(shown + hole, 1 in (shown, hole)).items()
    )


@cache
def value_of_hitting(hard: int, ace: bool, shown: int) -> float:
    return sum(p * value_of_hand(hard + value, ace or value == 1, shown) for value, p in CARD.items())


def value_of_hand(hard: int, ace: bool, shown: int) -> float:
    if hard > 21:
        return -1.0
    return max(value_of_standing(best_total(hard, ace), shown), value_of_hitting(hard, ace, shown))


def test_the_blackjack_expert_is_optimal():
    for shown in range(1, 11):
        for hard in range(4, 22):
            better = value_of_standing(hard, shown) > value_of_hitting(hard, False, shown)
            assert best_action(hard, False, shown) == ("stand" if better else "hit"), (hard, shown)
        for hard in range(2, 12):
            better = value_of_standing(hard + 10, shown) > value_of_hitting(hard, True, shown)
            assert best_action(hard + 10, True, shown) == ("stand" if better else "hit"), (hard, shown)


def test_the_blackjack_expert_loses_as_little_as_it_must():
    """20000 hands against the exact value of the game, which the dynamic programme above gives."""
    exact = sum(
        p * q * r * value_of_hand(a + b, 1 in (a, b), shown)
        for a, p in CARD.items()
        for b, q in CARD.items()
        for shown, r in CARD.items()
    )
    assert exact == pytest.approx(-0.0466, abs=1e-4)
    task = make_task("blackjack", env_kwargs={"is_pixel": False})
    env = task.make_env()
    hands = 20_000
    returns = [play(task, env, {"seed": 1 if k == 0 else None})[-1].reward for k in range(hands)]
    assert set(returns) == {-1.0, 0.0, 1.0}
    assert np.mean(returns) == pytest.approx(exact, abs=4 * 0.95 / hands**0.5)  # four standard errors: 0.027


def test_the_expert_s_words_vary_with_the_state_and_only_with_it():
    for name in NAMES:
        task = make_task(name)
        assert task.expert(INFOS[name]) == task.expert(INFOS[name])
    task = make_task("points24")
    prefixes = [["4", "+", "9", "+", "1", "+", "10"][:k] for k in range(8)]
    openings = {task.expert(hand([10, 1, 9, 4], prefix)).fields["thoughts"].split()[0] for prefix in prefixes}
    assert len(openings) >= 3


# -- success -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "last", "expected"),
    [
        ("points24", transition(10.0, terminated=True), True),
        ("points24", transition(-1.0, terminated=True), False),
        ("points24", transition(0.0, truncated=True), False),
        ("ezpoints", transition(10.0, terminated=True), True),
        ("number_line", transition(1.0, terminated=True), True),
        ("number_line", transition(-1.0, truncated=True), False),
        ("blackjack", transition(1.0, terminated=True), True),
        ("blackjack", transition(1.5, terminated=True), True),
        ("blackjack", transition(0.0, terminated=True), False),
        ("blackjack", transition(-1.0, terminated=True), False),
    ],
)
def test_success_is_how_the_episode_ends(name, last, expected):
    task = make_task(name)
    assert task.success([transition(0.0), last]) is expected
    assert task.success([]) is False


def test_number_line_logs_the_original_s_success_too():
    task = make_task("number_line")
    late = [transition(-1.0), transition(0.0), transition(0.0), transition(1.0, terminated=True)]
    assert task.success(late)
    assert task.metrics(late) == {"no_wrong_move": 0.0}


def test_a_hand_over_21_is_lost():
    task = make_task("blackjack")
    cards = [(10, "K", "H"), (6, "6", "H"), (9, "9", "S")]
    assert not task.solvable({"Dealer Card": [(10, "K", "H"), (7, "7", "S")], "Player Card": cards})
    assert task.solvable({"Dealer Card": [(10, "K", "H"), (7, "7", "S")], "Player Card": cards[:2]})


@pytest.mark.parametrize(
    ("running", "name"),
    [
        ({"__file__": "/home/me/lamp.py", "__spec__": None}, "lamp:Lamp"),  # python lamp.py
        ({"__file__": "/home/me/my/lamp.py", "__spec__": SimpleNamespace(name="my.lamp")}, "my.lamp:Lamp"),  # -m
    ],
)
def test_a_task_of_a_script_is_named_by_the_script(running, name, monkeypatch):
    lamp = type("Lamp", (ColourTask,), {"__module__": "__main__"})
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(**running))
    assert name_of(lamp()) == name


@pytest.mark.parametrize("name", ["ezpoints", "gym:trl_gtr/FrozenLake-v0", "toy:ColourTask"])
def test_a_task_can_be_made_again_from_its_name(name):
    options = {"goal": "Reach it."} if name.startswith("gym:") else {}
    assert name_of(make_task(name, **options)) == name
