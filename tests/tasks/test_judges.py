"""What is true in a thought: how it is read, judged, and corrected with as few changes as possible."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from trl_gtr.tasks import make_task
from trl_gtr.tasks.blackjack import read_dealer, read_total
from trl_gtr.tasks.number_line import named_direction
from trl_gtr.tasks.points.thoughts import FIRST_FRAMES, FRAMES, read_aim, read_symbol, write_thought
from trl_gtr.types import Response

SYMBOLS = [*(str(n) for n in range(1, 11)), "+", "-", "*", "/", "(", ")", "="]
INFOS: dict[str, dict[str, Any]] = {
    "points24": {"Cards": ["HT", "SA", "C9", "D4"], "Numbers": [10, 1, 9, 4], "Formula": ["4", "+", "9"]},
    "ezpoints": {"Cards": ["H3", "S9"], "Numbers": [3, 9], "Formula": ["3", "+"]},
    "number_line": {"Target": 4, "Current": 1},
    "blackjack": {"Dealer Card": [(10, "K", "H"), (7, "7", "S")], "Player Card": [(9, "9", "C"), (6, "6", "D")]},
}
GOOD: dict[str, tuple[dict[str, Any], str]] = {
    "points24": (
        {
            "cards": ["4", "9", "A", "10"],
            "formula": "4+9",
            "thoughts": "I aim at 4+9+1+10=24, so the next symbol is +.",
        },
        "+",
    ),
    "ezpoints": ({"cards": ["9", "3"], "formula": "3+", "thoughts": "3+9=12, so I append 9."}, "9"),
    "number_line": ({"current number": 1, "target number": 4, "thoughts": "1 is less than 4, so I go up: +."}, "+"),
    "blackjack": ({"thoughts": "My total is 15 and the dealer shows a king, so I hit."}, "hit"),
}
JUDGED = {
    "points24": ["cards", "formula", "aim", "action"],
    "ezpoints": ["cards", "formula", "aim", "action"],
    "number_line": ["current", "target", "direction"],
    "blackjack": ["total", "dealer"],
}
NAMES = list(GOOD)


def answer(name: str, action: str | None = None, **changes: Any) -> Response:
    thought, good_action = GOOD[name]
    changed = {key.replace("_", " "): value for key, value in changes.items()}
    task = make_task(name)
    return task.format.parse(task.format.render({**thought, **changed}, action or good_action))


def wrong_parts(name: str, response: Response, info: dict[str, Any] | None = None) -> list[str]:
    judged = make_task(name).judge(response, info or INFOS[name])
    assert list(judged) == JUDGED[name]
    assert all(isinstance(value, bool) for value in judged.values())
    return [part for part, true in judged.items() if not true]


# -- judging -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_true_thought_is_true_in_every_part(name):
    assert wrong_parts(name, answer(name)) == []


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"cards": ["10", "9", "4", "A"]}, []),  # any order
        ({"cards": ["T", "9", "4", "a"]}, []),
        ({"cards": ["10", "9", "4", "1"]}, ["cards"]),  # ranks as printed
        ({"cards": ["J", "9", "4", "A"]}, ["cards"]),
        ({"cards": ["10", "9", "4"]}, ["cards"]),
        ({"cards": ["10", "9", "4", "A", "A"]}, ["cards"]),
        ({"formula": " 4 + 9 "}, []),
        ({"formula": "4+9+"}, ["formula"]),
        ({"formula": ""}, ["formula"]),
        # every right formula that goes on from 4+9 is a right aim
        ({"thoughts": "4+9+10+1=24. Next: +"}, []),
        ({"thoughts": "4 + 9 + 10 × 1 = 24, so the next symbol is +."}, ["aim"]),  # that is 23
        ({"thoughts": "4+9+10/1=24, so the next symbol is +."}, ["aim"]),
        ({"thoughts": "9+4+10+1=24, so the next symbol is +."}, ["aim"]),  # doesn't go on from 4+9
        ({"thoughts": "4+9+11=24, so the next symbol is +."}, ["aim"]),  # not the hand
        ({"thoughts": "4+9+1=24, so the next symbol is +."}, ["aim"]),
        ({"thoughts": "4+9+1+10=240, so the next symbol is +."}, ["aim"]),
        ({"thoughts": "The next symbol is +."}, ["aim"]),
        ({"thoughts": "4+9+1+10=24"}, ["action"]),
        ({"thoughts": "4+9+1+10=24, so the next symbol is -."}, ["action"]),  # names another action than its own
        ({"thoughts": "4+9+1+10=24, so the next symbol is -.", "action": "-"}, ["action"]),  # contradicts its aim
        ({"thoughts": "9+4+10+1=24, so the next symbol is -.", "action": "-"}, ["aim"]),  # names its own action
        ({"action": "-"}, ["action"]),
        ({"action": "plus"}, ["action"]),
        ({"thoughts": ""}, ["aim", "action"]),
    ],
)
def test_judge_of_points24(changes, wrong):
    assert wrong_parts("points24", answer("points24", **changes)) == wrong


def test_one_is_not_ten():
    info = {**INFOS["points24"], "Formula": ["4", "+", "9", "+"]}
    right = "I aim at 4+9+10+1=24 and append 10."
    assert wrong_parts("points24", answer("points24", "10", formula="4+9+", thoughts=right), info) == []
    wrong = "I aim at 4+9+10+1=24 and append 1."
    assert wrong_parts("points24", answer("points24", "1", formula="4+9+", thoughts=wrong), info) == ["action"]
    started = {**INFOS["points24"], "Formula": ["1"]}
    thought = {"formula": "1", "thoughts": "10+9+4+1=24, so the next symbol is +."}
    assert wrong_parts("points24", answer("points24", **thought), started) == ["aim"]  # "10…" doesn't go on from "1"


def test_a_complete_formula_calls_for_the_equals_sign():
    info = {**INFOS["points24"], "Formula": ["4", "+", "9", "+", "1", "+", "10"]}
    thought = {"formula": "4+9+1+10", "thoughts": "4+9+1+10=24 is complete, so the next symbol is =."}
    assert wrong_parts("points24", answer("points24", "=", **thought), info) == []


def test_exact_fractions_count():
    info = {"Cards": ["H8", "S3", "C8", "D3"], "Numbers": [8, 3, 8, 3], "Formula": ["8", "/"]}
    response = answer(
        "points24", "(", cards=["8", "8", "3", "3"], formula="8/", thoughts="8/(3-8/3)=24, so I append (."
    )
    assert wrong_parts("points24", response, info) == []


def test_spaces_in_the_formula_are_ignored_but_use_up_its_length():
    info = {**INFOS["points24"], "Formula": ["4", " ", " ", "+", "9"]}
    assert wrong_parts("points24", answer("points24"), info) == []
    full = {**INFOS["points24"], "Formula": ["4", *[" "] * 13, "+", "9"]}  # 7 elements and 13 spaces: 20 fit
    assert wrong_parts("points24", answer("points24"), full) == []
    over = {**INFOS["points24"], "Formula": ["4", *[" "] * 14, "+", "9"]}
    assert wrong_parts("points24", answer("points24"), over) == ["aim"]


def test_judge_of_ezpoints_knows_its_own_signs():
    info = {"Cards": ["H3", "S4"], "Numbers": [3, 4], "Formula": []}
    thought = {"cards": ["3", "4"], "formula": ""}
    assert wrong_parts("ezpoints", answer("ezpoints", "3", **thought, thoughts="3*4=12, next is 3."), info) == []
    assert wrong_parts("ezpoints", answer("ezpoints", "3", **thought, thoughts="(3*4)=12, next is 3."), info) == [
        "aim"
    ]
    assert wrong_parts("ezpoints", answer("ezpoints", "3", **thought, thoughts="3*4=24, next is 3."), info) == ["aim"]


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"current_number": 2}, ["current"]),
        ({"target_number": 5, "current_number": 4}, ["current", "target"]),
        ({"thoughts": "I go down."}, ["direction"]),
        ({"thoughts": ""}, ["direction"]),
        ({"thoughts": "not -, but +"}, []),
        ({"action": "-"}, ["direction"]),
    ],
)
def test_judge_of_number_line(changes, wrong):
    assert wrong_parts("number_line", answer("number_line", **changes)) == wrong


@pytest.mark.parametrize(
    ("thoughts", "wrong"),
    [
        ("I have a total of 15 against the dealer's 10.", []),
        ("9 and 6 make a total of 15. The dealer has Q.", []),  # a ten-valued card is a ten-valued card
        ("My total is 16 and the dealer shows 10.", ["total"]),
        ("My total is 15 and the dealer shows 9.", ["dealer"]),
        ("My total is 15 and the dealer has 17.", ["dealer"]),  # the hole card is nobody's to know
        ("I hit.", ["total", "dealer"]),
    ],
)
def test_judge_of_blackjack(thoughts, wrong):
    assert wrong_parts("blackjack", answer("blackjack", thoughts=thoughts)) == wrong


def test_an_ace_counts_both_ways():
    info = {"Dealer Card": [(1, "A", "H"), (7, "7", "S")], "Player Card": [(1, "A", "C"), (6, "6", "D")]}
    for total in ("soft 17", "17", "7"):
        thoughts = f"My total is {total} and the dealer shows an ace."
        assert wrong_parts("blackjack", answer("blackjack", thoughts=thoughts), info) == []
    thoughts = "My total is 27 and the dealer shows A."
    assert wrong_parts("blackjack", answer("blackjack", thoughts=thoughts), info) == ["total"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
WORDS = st.lists(
    st.sampled_from(
        ["next", "is", "+", "4+9", "=24", "=", "24", "(", ")", "²", "10", "dealer", "total", "A", "up", ",", "."]
    )
).map(" ".join)


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_judge_and_expert_take_any_response(name, data):
    keys = ["cards", "formula", "thoughts", "current number", "target number"]
    fields = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(keys, VALUES | WORDS)))
    response = Response(
        data.draw(st.text(max_size=20)),
        fields,
        data.draw(st.none() | st.text(max_size=5) | st.sampled_from(SYMBOLS)),
        error=data.draw(st.sampled_from([None, "broken"])),
    )
    task, info = make_task(name), INFOS[name]
    judged = task.judge(response, info)
    assert list(judged) == JUDGED[name]
    expert = task.expert(info, hint=response)
    assert expert.valid
    assert all(task.judge(expert, info).values())


# -- reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "aim"),
    [
        ("I aim at 4+9+1+10=24.", "4+9+1+10"),
        ("4 + 9 + 1 + 10 = 24", "4+9+1+10"),
        ("(4−1)×(9−1)=24, since 3*8=24.", "(4-1)*(9-1)"),
        ("3*8=24, so (4-1)*(9-1)=24", "(4-1)*(9-1)"),
        ("first 4+9+1+10=24, better 10+9+4+1=24", "10+9+4+1"),
        ("4*6=24", "4*6"),
        ("4+9+1+10=24.5", None),
        ("4+9+1+10=2400", None),
        ("4+9+1+10", None),
        ("= 24", None),
        ("", None),
    ],
)
def test_read_aim(text, aim):
    read = read_aim(text, 24, 4)
    assert (None if read is None else "".join(read)) == aim


@pytest.mark.parametrize(
    ("text", "symbol"),
    [
        ("The formula so far is 4, so the next symbol is +.", "+"),
        ("The next symbol is + because the formula so far is 4.", "+"),
        ("I append 10 next.", "10"),
        ("With 4 down, + is next.", "+"),
        ("I choose 10 next, then +.", "10"),
        ('The next symbol is "(".', "("),
        ("the next symbol is (+)", "+"),
        ("The next action: ×", "*"),
        ("Next I play x", "*"),
        ("4+9+1+10=24. After 4+9 I append +.", "+"),
        ("4 + 9 + 1 + 10 = 24 is my next aim.", None),
        ("It has to be =.", "="),
        ("next is 11", None),
        ("next is 10.", "10"),
        ("append 1", "1"),
        ("next is +4", None),
        ("Nothing here.", None),
        ("", None),
    ],
)
def test_read_symbol(text, symbol):
    assert read_symbol(text, SYMBOLS, 24) == symbol


@pytest.mark.parametrize(
    ("text", "direction"),
    [
        ("so I go up.", "+"),
        ("so the action is -.", "-"),
        ("I must decrease it", "-"),
        ("I move right", "+"),
        ("that is right", None),
        ("'+1'", "+"),
        ("4-1 is 3", None),
        ("a well-known case", None),
        ("−", "-"),
        ("up? no: down", "-"),
        ("", None),
    ],
)
def test_named_direction(text, direction):
    assert named_direction(text) == direction


@pytest.mark.parametrize(
    ("text", "total", "dealer"),
    [
        ("My total is 15 and the dealer shows 10.", 15, 10),
        ("The dealer shows 10 and my total is 15.", 15, 10),
        ("I have 12 against the dealer's A.", 12, 1),
        ("With 20 in total I stand against a 6 from the dealer.", 20, 6),
        ("My hand is 10 and 6, a sum of 16. Dealer: queen.", 16, 10),
        ("The dealer's total is unknown. My total is 9; the dealer shows 11.", 9, 1),
        ("I would hit.", None, None),
        ("The total is 1000.", None, None),
    ],
)
def test_read_blackjack(text, total, dealer):
    assert (read_total(text), read_dealer(text)) == (total, dealer)


# -- which action a thought concludes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("My total is 20 and the dealer shows 10, so I hit.", "hit"),
        ("The dealer shows 6. I have a total of 12, so it is best to stand.", "stand"),
        ("With a total of 15 against the dealer's 10 I hit.", "hit"),
        ("I should not hit, so I stand.", "stand"),
        ("I stand, because a hit would be too much.", "stand"),
        ("I stand: if I hit I go over 21.", "stand"),
        ("If I hit I may go over, therefore I will stay.", "stand"),
        ("The dealer must hit up to 17, so I stand. Then the dealer will hit.", "stand"),
        ("I stand rather than hit.", "stand"),
        ("I won't stand, I draw another card.", "hit"),
        ("Hitting is best.", "hit"),
        ("Hitting would be too risky; standing is right.", "stand"),
        ("So I HIT!", "hit"),
        ("My total is 20 and the dealer shows 10.", None),
        ("I don't hit.", None),
        ("The dealer hits on 16.", None),
        ("", None),
    ],
)
def test_the_choice_that_a_blackjack_thought_concludes(text, choice):
    assert make_task("blackjack").format.conclusion({"thoughts": text}) == choice


@pytest.mark.parametrize(
    ("name", "thoughts", "action"),
    [
        ("points24", "I aim at 4+9+1+10=24, so the next symbol is +.", "+"),
        ("points24", "I aim at 4+9+1+10=24.", None),
        ("ezpoints", "3+9=12, so I append 9.", "9"),
        ("number_line", "1 is less than 4, so I go up.", "+"),
        ("number_line", "1 is less than 4.", None),
    ],
)
def test_the_action_that_a_thought_concludes(name, thoughts, action):
    assert make_task(name).format.conclusion({"thoughts": thoughts}) == action


@pytest.mark.parametrize("name", NAMES)
def test_experts_conclude_what_they_do(name):
    """In every frame, over many deals; and formats without thoughts conclude nothing."""
    task = make_task(name, env_kwargs={"solvable_only": True} if name == "points24" else {})
    env = task.make_env(evaluation=True)
    concluded = set()
    for seed in range(60):
        _, info = env.reset(seed=seed)
        expert = task.expert(info)
        assert task.format.conclusion(expert.fields) == expert.action
        concluded.add(expert.action)
    assert len(concluded) > 1
    assert make_task(name, thoughts=False).format.conclusion({}) is None


def test_words_that_conclude_another_action_are_not_kept():
    """Blackjack's judge looks at the reading alone, so a true reading may be followed by the wrong choice."""
    thoughts = "My total is 15 and the dealer shows a king, so I stand."
    assert wrong_parts("blackjack", answer("blackjack", "stand", thoughts=thoughts)) == []
    expert = corrected("blackjack", answer("blackjack", "stand", thoughts=thoughts))
    assert (expert.fields["thoughts"], expert.action) == ("My total is 15 and the dealer shows 10, so I hit.", "hit")


def test_reading_long_texts_takes_linear_time():
    task, info = make_task("points24"), INFOS["points24"]
    started = time.process_time()
    for unit in ("1 ", "=24", "4+9=24 next + ", "next ", "(", ",", "then "):
        task.judge(
            Response("", {"cards": [], "formula": unit * 5000, "thoughts": unit * (50_000 // len(unit))}, "+"), info
        )
    for unit in ("total 1 ", "dealer A ", "up ", "+ ", "I hit ", "not stand ", "if I ", "dealer must "):
        for name in ("blackjack", "number_line"):
            make_task(name).judge(Response("", {"thoughts": unit * (50_000 // len(unit))}, "hit"), INFOS[name])
    assert time.process_time() - started < 10


# -- correcting --------------------------------------------------------------------------------------------------


def corrected(name: str, response: Response, info: dict[str, Any] | None = None) -> Response:
    task = make_task(name)
    expert = task.expert(info or INFOS[name], hint=response)
    assert all(task.judge(expert, info or INFOS[name]).values())
    return expert


@pytest.mark.parametrize("name", NAMES)
def test_a_true_response_stays_as_it_is(name):
    response = answer(name)
    assert corrected(name, response) == response


def test_only_what_is_wrong_changes():
    own = {"cards": ["9", "4", "10", "A"], "thoughts": "Clearly 4+9+10+1=24, hence the next symbol is +!"}
    expert = corrected("points24", answer("points24", **own, formula="4+"))
    assert expert.fields == {**own, "formula": "4+9"}
    expert = corrected("points24", answer("points24", cards=["9", "4", "10", "K"], thoughts=own["thoughts"]))
    assert sorted(expert.fields["cards"]) == ["10", "4", "9", "A"]
    assert expert.fields["thoughts"] == own["thoughts"]
    expert = corrected("points24", answer("points24", "-", **own))  # the thought is right, the action isn't
    assert (dict(expert.fields), expert.action) == ({**own, "formula": "4+9"}, "+")


def test_a_right_aim_with_a_wrong_next_symbol_keeps_the_aim():
    info = {**INFOS["points24"], "Formula": ["4", "+"]}
    expert = corrected("points24", answer("points24", "9", formula="4+", thoughts="4+10+1+9=24, so I append 9."), info)
    assert "4+10+1+9=24" in expert.fields["thoughts"]
    assert expert.action == "10"
    assert make_task("points24").target(expert, info) == "4+10+1+9"


def test_a_wrong_aim_is_replaced():
    expert = corrected("points24", answer("points24", thoughts="I aim at 4+9+2+10=24, so the next symbol is +."))
    assert make_task("points24").target(expert, INFOS["points24"]) in {"4+9+1+10", "4+9+10+1"}


@pytest.mark.parametrize("formula", [["4", "9"], [")"], ["+"], ["4", "*", "10", "*"], ["4", "+", "9", *[" "] * 14]])
def test_nothing_is_right_in_a_dead_end(formula):
    task, info = make_task("points24"), {**INFOS["points24"], "Formula": formula}
    assert task.expert(info) is None
    assert task.expert(info, hint=answer("points24")) is None
    assert not task.solvable(info)


def test_number_line_and_blackjack_keep_true_words():
    expert = corrected("number_line", answer("number_line", current_number=3, thoughts="Up we go!"))
    assert dict(expert.fields) == {"current number": 1, "target number": 4, "thoughts": "Up we go!"}
    expert = corrected("number_line", answer("number_line", "-", thoughts="Down we go!"))
    assert (expert.action, named_direction(expert.fields["thoughts"])) == ("+", "+")
    thoughts = "A total of 15, the dealer has a K: hm."
    assert corrected("blackjack", answer("blackjack", "stand", thoughts=thoughts)).fields["thoughts"] == thoughts
    expert = corrected("blackjack", answer("blackjack", thoughts="A total of 14, the dealer has a K: hm."))
    assert expert.fields["thoughts"] == "My total is 15 and the dealer shows 10, so I hit."


def test_the_expert_s_frames_say_what_they_should():
    aim, target = ("4", "+", "9", "+", "1", "+", "10"), 24
    texts = {write_thought(aim, aim[:k], target, (*aim, "=")[k]) for k in range(8)}
    assert "I aim at 4+9+1+10=24. The formula so far is 4+9+1, so the next symbol is +." in texts
    assert "4+9+1+10=24 uses every card. After 4+9 I append +." in texts
    assert "The cards make 4+9+1+10=24. With 4 written I choose +." in texts
    assert "4+9+1+10=24 uses every card. First I append 4." in texts
    assert len(texts) == 8
    for k in range(8):
        text = write_thought(aim, aim[:k], target, (*aim, "=")[k])
        assert read_aim(text, target, 4) == aim
        assert read_symbol(text, SYMBOLS, target) == (*aim, "=")[k]
    for frames in (FRAMES, FIRST_FRAMES):
        assert len({frame.split("{")[0] for frame in frames}) == 3


# -- speed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_each_call_takes_well_under_a_millisecond(name):
    task, info, response = make_task(name), INFOS[name], answer(name)
    calls = {
        "prompt": lambda: task.prompt(None, info),
        "judge": lambda: task.judge(response, info),
        "action": lambda: task.to_env_action(response, info),
        "expert": lambda: task.expert(info),
    }
    for call in calls.values():
        call()
        started = time.process_time()
        for _ in range(200):
            call()
        assert (time.process_time() - started) / 200 < 1e-3
