"""The task of MiniGrid and BabyAI levels: words, judge, and what it says without the package."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from minigrid_cases import needs_minigrid

from trl_gtr.correctors import ExpertCorrector
from trl_gtr.rollouts.playing import PlayingRules
from trl_gtr.rollouts.vector_envs import unpack_infos
from trl_gtr.tasks import make_task
from trl_gtr.types import CorrectionRequest

INFO = {
    "mission": "go to the red ball",
    "carrying": "yellow key",
    "player": [7, 4],
    "facing": "up",
    "ahead": "nothing",
    "objects": [[3, 4, "red ball"], [5, 6, "locked yellow door"]],
    "expert": 2,
    "plan": "go to the red ball",
}
TRUE = {
    "ahead": "nothing",
    "objects": ["locked yellow door at 5,6", "red ball at 3,4"],
    "thoughts": "The ball is in front of me, so I go forward.",
}


def test_the_prompt_has_the_mission_and_what_the_picture_hides() -> None:
    partial, full = (make_task("minigrid", view=view).prompt(None, INFO) for view in ("partial", "full"))
    for prompt in (partial, full):
        assert prompt.startswith(
            "You are an agent in a grid world. Your mission: go to the red ball. You carry the ye"
        )
        assert prompt.startswith(earlier := make_task("minigrid").earlier_prompt(None, INFO))
        assert earlier.endswith("You carry the yellow key.")
    assert "out of sight" in partial
    assert '"facing": "..."' not in partial
    assert '"facing": "..."' in full
    assert "You carry nothing." in make_task("minigrid").prompt(None, {**INFO, "carrying": "nothing"})


@pytest.mark.parametrize(
    ("changes", "action", "wrong"),
    [
        ({}, "go forward", []),
        ({"objects": ["The red ball at 3,4", "a locked  yellow door at 5,6"]}, "go forward", []),
        ({"objects": ["red ball at 3,4"]}, "go forward", ["objects"]),
        ({"objects": ["red ball at 3,4", "closed yellow door at 5,6"]}, "go forward", ["objects"]),
        ({"ahead": "wall"}, "go forward", ["ahead"]),
        ({"thoughts": "So I turn left."}, "turn left", ["move"]),
        ({"thoughts": "So I turn left."}, "go forward", ["move"]),
        ({}, "turn left", ["move"]),
    ],
)
def test_judge(changes: dict[str, Any], action: str, wrong: list[str]) -> None:
    task = make_task("minigrid")
    response = task.format.parse(task.format.render({**TRUE, **changes}, action))
    assert [part for part, true in task.judge(response, INFO).items() if not true] == wrong


def test_the_whole_level_shows_where_the_agent_stands() -> None:
    task = make_task("minigrid", view="full")
    right = {"player": "7,4", "facing": "Up", **TRUE}
    assert all(task.judge(task.format.respond(right, "go forward"), INFO).values())
    assert not task.judge(task.format.respond({**right, "player": "4,7"}, "go forward"), INFO)["player"]
    assert not task.judge(task.format.respond({**right, "facing": "down"}, "go forward"), INFO)["facing"]


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("I want to go to the red ball, so I turn left.", "turn left"),
        ("I want to pick up the key, so I go forward.", "go forward"),
        ("I want to open the locked yellow door, so I toggle it.", "toggle"),
        ("The ball is to my right. I turn right.", "turn right"),
        ("The key is right here: I pick it up.", "pick up"),
        ("I don't need the key any more, so I drop it.", "drop"),
        ("I open the door.", "toggle"),
        ("There is an open door. I keep straight on.", "go forward"),
        ("I must not drop it but turn to the right.", "turn right"),
        ("The ball is on my left.", None),
        ("Turn left or turn right?", None),
    ],
)
def test_conclusions(text: str, move: str | None) -> None:
    assert make_task("minigrid").format.conclusion({"thoughts": text}) == move


def test_the_expert_corrects_with_the_bots_move() -> None:
    task = make_task("minigrid")
    request = CorrectionRequest(None, "", task.format.respond(TRUE, "go forward"), {}, INFO, task)  # type: ignore[arg-type]
    assert ExpertCorrector().correct([request])[0].verdict == "right"
    expert = task.expert({**INFO, "expert": 3, "plan": "pick up the red ball"})
    assert expert is not None
    assert (expert.fields["thoughts"], expert.action) == (
        "I want to pick up the red ball, so I pick it up.",
        "pick up",
    )
    assert task.expert({**INFO, "expert": None, "plan": ""}) is None
    assert task.solvable({**INFO, "expert": None})


@pytest.mark.parametrize(
    ("mission", "difficulty"),
    [
        ("go to the red ball", "go to"),
        ("pick up the box on your left", "pick up"),
        ("open a red door, then go to the key", "several"),
        ("put the red ball next to a key", "put"),
        ("get to the green goal square", "reach the goal"),
    ],
)
def test_difficulty(mission: str, difficulty: str) -> None:
    assert make_task("minigrid").difficulty({**INFO, "mission": mission}) == difficulty


def test_tasks_can_be_pickled_and_options_are_checked() -> None:
    task = pickle.loads(pickle.dumps(make_task("minigrid", view="full")))
    assert task.view == "full"
    with pytest.raises(ValueError, match="partial, full"):
        make_task("minigrid", view="half")


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = "trl_gtr.environments.grids.minigrid"
    for module in [name for name in sys.modules if name.startswith(("minigrid.", ours))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "minigrid", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r'pip install "trl-gtr\[minigrid\]"'):
        make_task("minigrid").make_env()


# -- levels without an expert, by `gym:ID` ----------------------------------------------------------------------------

LEVELS = ["MiniGrid-Empty-8x8-v0", "BabyAI-GoToObj-v0"]


@pytest.fixture
def not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had imported MiniGrid yet."""
    for module in [name for name in sys.modules if name.partition(".")[0] == "minigrid"]:
        monkeypatch.delitem(sys.modules, module)
    for level in [name for name in gym.registry if name.startswith(("MiniGrid-", "BabyAI-"))]:
        monkeypatch.delitem(gym.registry, level)


@pytest.mark.usefixtures("not_imported")
@pytest.mark.parametrize("level", [pytest.param(level, marks=needs_minigrid) for level in LEVELS])
def test_every_level_is_a_gym_task(level: str) -> None:
    task = make_task(f"gym:{level}")
    envs = SyncVectorEnv([PlayingRules(task).make_env] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    pictures, infos = envs.reset(seed=[0, 1])
    assert list(task.legal_actions({}))[:3] == ["left", "right", "forward"]
    for picture, info in zip(pictures, unpack_infos(infos, 2), strict=True):
        assert f"Goal: {info['observation']['mission']}.\n" in task.prompt(picture, info)


@pytest.mark.usefixtures("not_imported")
@pytest.mark.parametrize("level", LEVELS)
def test_a_gym_task_says_what_to_install(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minigrid", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r'pip install "trl-gtr\[minigrid\]"'):
        make_task(f"gym:{level}")
