"""The grid worlds' tasks: reading, judging, experts."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, strategies as st
from minigrid_cases import needs_minigrid
from rollout_cases import transition

from trl_gtr.correctors import ExpertCorrector
from trl_gtr.tasks import Task, make_task
from trl_gtr.tasks.grids.words import named_move, read_position, same_reading
from trl_gtr.types import CorrectionRequest, Response

NAMES = ["sokoban", "frozen_lake", "taxi", "cliff_walking"]
LAKE = ["SFFF", "FHFH", "FFFH", "HFFG"]

# A state of each game, a true answer and every best move, all worked out by hand.
INFOS: dict[str, dict[str, Any]] = {
    "sokoban": {"Room": ["######", "#    #", "# $. #", "# @  #", "#    #", "######"]},
    "frozen_lake": {"map": LAKE, "observation": 9},
    "taxi": {"observation": ((3 * 5 + 0) * 5 + 3) * 4 + 2},
    "cliff_walking": {"observation": 2 * 12 + 11},
}
ANSWERS: dict[str, tuple[dict[str, Any], str]] = {
    "sokoban": (
        {"player": "4,3", "boxes": ["3,3"], "targets": ["3,4"], "thoughts": "I have to get behind it: I go left."},
        "left",
    ),
    "frozen_lake": (
        {
            "player": "3,2",
            "goal": "4,4",
            "holes": ["2,2", "2,4", "3,4", "4,1"],
            "thoughts": "There is a hole above me, so I go down.",
        },
        "down",
    ),
    "taxi": (
        {"taxi": "4,1", "passenger": "blue", "destination": "yellow", "thoughts": "A wall is beside me: I drive up."},
        "up",
    ),
    "cliff_walking": ({"player": "3,12", "goal": "4,12", "thoughts": "The goal is below me. I go down."}, "down"),
}
BEST = {"sokoban": {"left"}, "frozen_lake": {"down", "right"}, "taxi": {"up"}, "cliff_walking": {"down"}}


def answer(name: str, action: str | None = None, **changes: Any) -> Response:
    fields, right = ANSWERS[name]
    return make_task(name).format.respond({**fields, **changes}, action or right)


def wrong_parts(name: str, response: Response) -> list[str]:
    return [part for part, true in make_task(name).judge(response, INFOS[name]).items() if not true]


def play(task: Task, seed: int) -> tuple[int, bool]:
    """Moves of one episode of the expert, and whether it won. Every response must be true and legal."""
    env = task.make_env(evaluation=True)
    _, info = env.reset(seed=seed)
    moves, ended = 0, False
    while not ended:
        expert = task.expert(info)
        assert expert is not None
        assert task.format.parse(expert.text) == expert
        assert all(task.judge(expert, info).values()), (expert.text, info)
        assert task.solvable(info)
        _, reward, terminated, truncated, info = env.step(task.to_env_action(expert, info))
        moves, ended = moves + 1, terminated or truncated
    env.close()
    return moves, task.success([transition(reward=float(reward), terminated=terminated, truncated=truncated)])


@pytest.mark.parametrize("name", NAMES)
def test_best_moves_by_hand(name: str) -> None:
    assert set(make_task(name).best_moves(INFOS[name])) == BEST[name]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_a_true_answer(name: str) -> None:
    assert wrong_parts(name, answer(name)) == []


@pytest.mark.parametrize(
    ("name", "changes", "wrong"),
    [
        ("sokoban", {"player": "3,4"}, ["player"]),
        ("sokoban", {"boxes": []}, ["boxes"]),
        ("sokoban", {"boxes": ["3,3", "3,3"]}, ["boxes"]),
        ("sokoban", {"targets": ["3,5"]}, ["targets"]),
        ("sokoban", {"thoughts": "I go up."}, ["move"]),
        ("sokoban", {"thoughts": "I have to get behind it."}, ["move"]),
        ("sokoban", {"action": "up"}, ["move"]),
        ("sokoban", {"thoughts": "I go up.", "action": "up"}, ["move"]),
        ("frozen_lake", {"holes": ["4,1", "(2, 4)", "row 2, column 2", "3,4"]}, []),
        ("frozen_lake", {"holes": ["4,1", "2,4", "2,2"]}, ["holes"]),
        ("frozen_lake", {"holes": ["4,1", "2,4", "2,2", "ice"]}, ["holes"]),
        ("frozen_lake", {"goal": "3,4"}, ["goal"]),
        ("frozen_lake", {"thoughts": "I go right.", "action": "right"}, []),
        ("frozen_lake", {"thoughts": "I go left.", "action": "left"}, ["move"]),
        ("taxi", {"passenger": " Blue"}, []),
        ("taxi", {"passenger": "in taxi"}, ["passenger"]),
        ("taxi", {"destination": "red", "taxi": "1,4"}, ["taxi", "destination"]),
        ("taxi", {"thoughts": "I pick up the passenger.", "action": "pickup"}, ["move"]),
        ("cliff_walking", {"player": "12,3"}, ["player"]),
        ("cliff_walking", {"goal": "4,11"}, ["goal"]),
    ],
)
def test_judge(name: str, changes: dict[str, Any], wrong: list[str]) -> None:
    assert wrong_parts(name, answer(name, **changes)) == wrong


@pytest.mark.parametrize("name", NAMES)
def test_any_text_can_be_judged(name: str) -> None:
    task = make_task(name)
    parts = [field.key for field in task.format.fields][:-1]
    assert wrong_parts(name, task.format.parse("no JSON")) == [*parts, "move"]
    assert list(task.reading_parts) == parts
    assert make_task(name, thoughts=False).format.fields == ()


@pytest.mark.parametrize("name", NAMES)
def test_the_expert_wins(name: str) -> None:
    if name != "sokoban":
        pytest.importorskip("pygame")
    task = make_task(name)
    results = [play(task, seed) for seed in range(3)]
    assert all(won for _, won in results)
    if name == "cliff_walking":
        assert results == [(13, True)] * 3


def correct(name: str, response: Response) -> Any:
    task = make_task(name)
    (correction,) = ExpertCorrector().correct(
        [CorrectionRequest(None, "", response, {}, INFOS[name], task)]  # type: ignore[arg-type]
    )
    return correction


@pytest.mark.parametrize("name", NAMES)
def test_the_expert_corrects(name: str) -> None:
    assert correct(name, answer(name)).verdict == "right"
    opposite = {"up": "down", "down": "up", "left": "right", "right": "left"}[ANSWERS[name][1]]
    correction = correct(name, answer(name, opposite, thoughts=f"I go {opposite}."))
    assert (correction.verdict, correction.action in BEST[name]) == ("corrected", True)


def test_the_expert_keeps_what_is_right() -> None:
    """Either move is best: the agent's own stays, with its words, where only the reading is wrong."""
    correction = correct(
        "frozen_lake", answer("frozen_lake", "right", goal="1,1", thoughts="I like it right, so right.")
    )
    assert correction.thought["thoughts"] == "I like it right, so right."
    assert (correction.thought["goal"], correction.action) == ("4,4", "right")
    correction = correct("frozen_lake", answer("frozen_lake", "right", thoughts="Hm."))
    assert (correction.thought["thoughts"].split(", ")[-1], correction.action) == ("so I go right.", "right")


def test_a_dead_end_is_known_and_cut() -> None:
    task = make_task("sokoban")
    stuck = {"Room": ["#####", "#$  #", "# @ #", "#  .#", "#####"]}
    assert not task.solvable(stuck)
    assert task.expert(stuck) is None
    room = ["#####", "# $ #", "# @ #", "#  .#", "#####"]  # the box is at the upper wall, the target isn't
    for evaluation, ended in ((False, True), (True, False)):
        env = task.make_env(evaluation=evaluation)
        env.reset(seed=0, options={"room": room})
        _, reward, terminated, truncated, info = env.step(2)
        assert (terminated, truncated, info.get("cut")) == (False, ended, "dead end" if ended else None)
        assert reward == pytest.approx(-1.1 if ended else -0.1)


@pytest.mark.parametrize("name", ["frozen_lake", "taxi", "cliff_walking"])
def test_a_belief_is_a_state(name: str) -> None:
    task = make_task(name)
    believed = task.believed_info(ANSWERS[name][0], {})
    assert believed is not None
    assert all(task.judge(answer(name), believed).values())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("frozen_lake", {"player": "5,1"}),
        ("frozen_lake", {"player": "2,2"}),
        ("frozen_lake", {"goal": "far away"}),
        ("taxi", {"taxi": "0,1"}),
        ("taxi", {"destination": "blue"}),
        ("cliff_walking", {"player": "4,5"}),
        ("cliff_walking", {"player": "5,5"}),
    ],
)
def test_impossible_beliefs(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"row,column|different|cliff"):
        make_task(name).believed_info({**ANSWERS[name][0], **changes}, {})


@pytest.mark.parametrize(
    ("name", "difficulty"),
    [("sokoban", "1 box"), ("frozen_lake", "distance 03"), ("taxi", "other side"), ("cliff_walking", "dry")],
)
def test_difficulty(name: str, difficulty: str) -> None:
    assert make_task(name).difficulty(INFOS[name]) == difficulty


def test_falls_are_counted() -> None:
    steps = [transition(reward=-1.0), transition(reward=-100.0), transition(reward=-1.0, terminated=True)]
    task = make_task("cliff_walking")
    assert task.metrics(steps) == {"falls": 1.0}
    assert task.success(steps)


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("The box is to the right of me, so I go left.", "left"),
        ("I walk up.", "up"),
        ("The right move is down.", "down"),
        ("I go up to push the box left.", "up"),
        ("I push the box to the right.", "right"),
        ("Two boxes are left.", None),
        ("The target is left of me.", None),
        ("I don't go left but right.", "right"),
        ("Going north brings me closer.", "up"),
        ("I pick the passenger up.", "pickup"),
        ("We are there, so I drop them off.", "dropoff"),
        ("I go down because the hole is up.", "down"),
        ("Up or down?", None),
        ("", None),
    ],
)
def test_named_move(text: str, move: str | None) -> None:
    assert named_move(text) == move


@pytest.mark.parametrize(
    ("text", "position"),
    [("2,3", (2, 3)), ("(2, 3)", (2, 3)), ("Row 2, column 3", (2, 3)), ("23", None), ("2,3,4", None), (None, None)],
)
def test_positions(text: Any, position: tuple[int, int] | None) -> None:
    assert read_position(text) == position


def test_lists_are_not_positions() -> None:
    assert not same_reading("2,3", ["2,3"])
    assert not same_reading(["2,3"], "2,3")


@given(st.text(alphabet="leftrighupdown ,.;I so'not0123()", max_size=60))
def test_no_text_is_too_odd(text: str) -> None:
    assert named_move(text) in {None, "up", "down", "left", "right", "pickup", "dropoff"}
    position = read_position(text)
    assert position is None or min(position) >= 0
    assert not same_reading([text, text], ["1,1"])


# -- gymnasium's own rules --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error", r"ignore:.*is different from the unwrapped version")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in NAMES),
        *(pytest.param("minigrid", {"view": view}, marks=needs_minigrid) for view in ("partial", "full")),
    ],
)
def test_environments_keep_gymnasiums_rules(name: str, options: dict[str, str]) -> None:
    check_env(make_task(name, **options).make_env(), skip_render_check=True)  # drawing to a window needs a display


@pytest.mark.parametrize("name", NAMES)
def test_environments_can_be_made_again_from_their_spec(name: str) -> None:
    env = make_task(name).make_env()
    assert env.spec is not None
    again = gym.make(env.spec, disable_env_checker=True)
    assert str(again) == str(env)
    np.testing.assert_array_equal(again.reset(seed=3)[0], env.reset(seed=3)[0])


@pytest.mark.parametrize("view", [pytest.param(view, marks=needs_minigrid) for view in ("partial", "full")])
def test_a_levels_spec_has_its_view(view: str) -> None:
    spec = make_task("minigrid", view=view).make_env().spec
    assert spec is not None
    assert [(each.name, each.kwargs) for each in spec.additional_wrappers] == [
        ("GuidedLevel", {"view": view}),
        ("RenderedObservation", {}),
    ]
