"""`trl_gtr/ALFWorld-v0`: on bundled games always, on real games where there are any."""

from __future__ import annotations

import json
import pickle
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from alfworld_cases import REAL_GAMES, needs_alfworld, needs_real_games, real_game, save_game, without_data
from gymnasium.utils.env_checker import check_env

import trl_gtr.environments  # noqa: F401  registers the games
from trl_gtr.environments.alfworld import TASK_TYPES, ALFWorldEnv
from trl_gtr.rollouts.vector_envs import unpack_infos
from trl_gtr.rollouts.workers import WorkerVectorEnv
from trl_gtr.storage.plain_data import decode, encode, fingerprint

pytestmark = needs_alfworld

ID = "trl_gtr/ALFWorld-v0"
KEYS = {
    *("task", "task_type", "goal", "observation_text", "admissible_commands", "won", "goal_condition_success_rate"),
    *("previous_actions", "legal", "view", "extra.gamefile", "extra.expert_plan", "subgoal"),
}
MUG = "bundled:pick_cool_then_place_in_recep/25"  # cool some mug and put it in microwave


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_data(monkeypatch, tmp_path)


def make(**options: Any) -> gym.Env:
    return gym.make(ID, **{"games": [MUG], **options})


def play(env: gym.Env, info: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Follow the plan to the end of the episode."""
    rewards, ended = [], False
    while not ended:
        _, reward, terminated, truncated, info = env.step(info["extra.expert_plan"][0])
        rewards.append(float(reward))
        ended = terminated or truncated
    return rewards, info


def test_check_env() -> None:
    check_env(make().unwrapped, skip_render_check=True)


def test_info_is_plain_and_complete() -> None:
    _, info = make().reset(seed=0)
    assert set(info) == KEYS
    assert (info["task"], info["task_type"]) == (
        "cool some mug and put it in microwave",
        "pick_cool_then_place_in_recep",
    )
    assert info["goal"] == {"object": "mug", "receptacle": "microwave", "toggle": ""}
    assert info["previous_actions"] == []
    assert info["view"]["here"] == []

    def check(value: Any) -> None:
        assert type(value) in (str, int, float, bool, list, dict)
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            check(inner)

    check(info)


@pytest.mark.parametrize("expert", ["planner", "explorer"])
@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_the_expert_wins_bundled_games(task_type: str, expert: str) -> None:
    env = make(games="bundled", split="valid_unseen", task_types=[task_type], expert=expert)
    _, info = env.reset(seed=1)
    assert info["task_type"] == task_type
    rewards, info = play(env, info)
    assert info["won"]
    assert info["goal_condition_success_rate"] == 1.0
    assert rewards[-1] > 50


def test_the_explorer_knows_only_what_was_seen() -> None:
    """The mug is on shelf 1. The planner goes there; the explorer looks for it from place to place."""
    _, info = make().reset(seed=0)
    assert info["extra.expert_plan"][:2] == ["go to shelf 1", "take mug 1 from shelf 1"]
    env = make(expert="explorer")
    _, info = env.reset(seed=0)
    visited = []
    while info["subgoal"][0] != "take":
        assert info["subgoal"] == ["find", "mug", ""]
        visited.append(info["extra.expert_plan"][0])
        _, _, _, _, info = env.step(visited[-1])
    assert visited[-1] == "go to shelf 1"
    assert len(visited) == len(set(visited)) > 1


def test_rewards_are_the_increase_of_the_goal_condition_rate() -> None:
    env = make()
    _, info = env.reset(seed=0)
    rewards, info = play(env, info)
    # go, take, go, cool (1 of 3 conditions), go, open, put (the other two, and the win)
    assert rewards == pytest.approx([0, 0, 0, 1 / 3, 0, 0, 50 + 2 / 3])
    env = make(reward_style="rl4vlm")
    _, info = env.reset(seed=0)
    rewards, info = play(env, info)
    assert rewards == pytest.approx([0, 0, 0, 1 / 3, 1 / 3, 1 / 3, 51])


def test_what_is_undone_is_taken_back() -> None:
    env = make()
    _, info = env.reset(seed=0)
    total = 0.0
    for command in (*info["extra.expert_plan"][:4], "go to microwave 1", "heat mug 1 with microwave 1"):
        _, reward, _, _, info = env.step(command)
        total += float(reward)
    assert total == pytest.approx(0)
    assert info["goal_condition_success_rate"] == 0


def test_an_illegal_action_costs_one_and_changes_nothing() -> None:
    env = make()
    _, before = env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step("go to shelf 10")
    assert (reward, terminated, truncated) == (-1.0, False, False)
    assert info["observation_text"] == "Nothing happens."
    assert info["legal"] is False
    for key in ("admissible_commands", "view", "extra.expert_plan"):
        assert info[key] == before[key]
    assert info["previous_actions"] == ["go to shelf 10"]
    _, _, _, _, info = env.step("  GO TO shelf 1. ")
    assert info["legal"] is True
    assert info["previous_actions"][-1] == "go to shelf 1"


def test_both_dialects() -> None:
    for words in ("put mug 1 in/on shelf 1", "put mug 1 on shelf 1", "move mug 1 to shelf 1"):
        env = make()
        env.reset(seed=0)
        for command in ("go to shelf 1", "take mug 1 from shelf 1", words):
            _, _, _, _, info = env.step(command)
            assert info["legal"], command
        assert info["previous_actions"][-1] == "move mug 1 to shelf 1"
        assert info["view"]["holding"] == ""


def test_games_of_the_older_dialect(tmp_path: Path) -> None:
    """Up to 0.3, games said "put X in/on Y"; the plan speaks as the game does."""
    path = save_game(tmp_path, "pick_and_place_simple", 1)
    path.write_text(path.read_text().replace("move {o} to {r}", "put {o} in/on {r}"))
    env = make(games=[path])
    _, info = play(env, env.reset(seed=0)[1])
    assert info["won"]
    assert info["previous_actions"][-1] == "put tissuebox 1 in/on garbagecan 1"


def test_fifty_steps_at_most() -> None:
    env = make()
    env.reset(seed=0)
    ends = [env.step("look")[2:4] for _ in range(50)]
    assert ends == [(False, False)] * 49 + [(False, True)]
    env = make(max_episode_steps=3)
    env.reset(seed=0)
    assert [env.step("look")[3] for _ in range(3)] == [False, False, True]


def test_a_finished_episode_has_to_be_reset() -> None:
    env = make()
    with pytest.raises(ValueError, match="call reset"):
        env.unwrapped.step("look")
    _, info = env.reset(seed=0)
    play(env, info)
    with pytest.raises(ValueError, match="call reset"):
        env.unwrapped.step("look")


def test_the_seed_chooses_the_game() -> None:
    env = make(games="bundled")
    chosen = [env.reset(seed=seed)[1]["extra.gamefile"] for seed in (0, 1, 0)]
    assert chosen[0] == chosen[2] != chosen[1]
    following = [env.reset()[1]["extra.gamefile"] for _ in range(2)]
    env.reset(seed=0)
    assert [env.reset()[1]["extra.gamefile"] for _ in range(2)] == following
    assert env.reset(options={"game": MUG.replace("/25", "/24")})[1]["extra.gamefile"].endswith("/24")
    with pytest.raises(ValueError, match="There is no game 'x'"):
        env.reset(options={"game": "x"})
    with pytest.raises(ValueError, match="no option deal"):
        env.reset(options={"deal": 1})


def test_task_types_are_drawn_by_their_weights() -> None:
    kinds = ["look_at_obj_in_light", "pick_and_place_simple", "pick_two_obj_and_place"]
    names = [f"bundled:{kind}/{seed}" for kind, count in zip(kinds, (1, 4, 2), strict=True) for seed in range(count)]
    weights = {"look_at_obj_in_light": 3, "pick_two_obj_and_place": 0}
    env = ALFWorldEnv(games=names, task_type_weights=weights)
    env.reset(seed=0)
    drawn = Counter(env._choose_game({}).task_type for _ in range(2000))
    assert set(drawn) == set(kinds[:2])
    assert drawn["look_at_obj_in_light"] / 2000 == pytest.approx(0.75, abs=0.04)  # four standard deviations
    games = Counter(env._choose_game({}).name for _ in range(2000))
    assert len(games) == 5
    assert env.reset(options={"game": names[-1]})[1]["task_type"] == "pick_two_obj_and_place"  # by hand always


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"cook": 1}, "there is no cook; the six are"),
        ({"pick_and_place_simple": -1}, "must be numbers from 0 on"),
        ({"pick_and_place_simple": float("nan")}, "must be numbers from 0 on"),
        ({"pick_cool_then_place_in_recep": 0}, "leave no game to play"),
    ],
)
def test_weights_that_make_no_sense_are_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ALFWorldEnv(games=[MUG], task_type_weights=weights)


def test_a_copy_goes_on_where_the_original_was() -> None:
    env = make(expert="explorer")
    _, info = env.reset(seed=0)
    for _ in range(3):
        _, _, _, _, info = env.step(info["extra.expert_plan"][0])
    saved = pickle.dumps(env)
    assert len(saved) < 20_000
    twin = pickle.loads(saved)
    for command in ("look", info["extra.expert_plan"][0]):
        (one, *rest), (other, *others) = env.step(command), twin.step(command)
        assert np.array_equal(one, other)
        assert rest == others
    assert env.reset()[1] == twin.reset()[1]


def test_workers_go_on_from_plain_data() -> None:
    """In other processes, in the middle of an episode and after its end; illegal commands are played again too."""
    envs, others = (WorkerVectorEnv(partial(make, games="bundled", expert="explorer"), 2) for _ in range(2))
    try:
        _, infos = envs.reset(seed=[0, 1])
        others.reset(seed=[5, 6])
        for illegal in (True, False):
            for step in range(25):
                commands = [plan[0] for plan in infos["extra.expert_plan"]]
                infos = envs.step(["dance", "go"] if illegal and step == 1 else commands)[4]
            states = json.loads(json.dumps(encode(envs.get_states())))
            observations, restored = others.set_states(decode(states))
            assert np.array_equal(observations, envs._observations())
            assert fingerprint(unpack_infos(restored, 2)) == fingerprint([info for _, info in envs._last])
            command = ["look", infos["extra.expert_plan"][1][0]]
            (one, *_, info), (other, *_, again) = envs.step(command), others.step(command)
            assert np.array_equal(one, other)
            assert fingerprint(unpack_infos(info, 2)) == fingerprint(unpack_infos(again, 2))
            infos = info
    finally:
        envs.close()
        others.close()


def test_a_copy_of_an_unused_environment() -> None:
    twin = pickle.loads(pickle.dumps(make()))
    assert twin.reset(seed=0)[1]["task_type"] == "pick_cool_then_place_in_recep"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "unity"}, "backend must be one of text, thor"),
        ({"reward_style": "sparse"}, "reward_style must be one of increase, rl4vlm"),
        ({"expert": "gpt"}, "expert must be one of planner, explorer"),
        ({"render_mode": "human"}, "render_mode must be one of None, rgb_array"),
        ({"backend": "thor", "games": "bundled"}, "The bundled games have no rooms in THOR"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ALFWorldEnv(**options)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl_gtr.environments.alfworld.text", None)
    with pytest.raises(ImportError, match=r'pip install "trl-gtr\[alfworld\]"'):
        ALFWorldEnv(games="bundled")


@needs_real_games
@pytest.mark.parametrize("name", ["look_at_obj_in_light-CD", "pick_two_obj_and_place-Newspaper"])
def test_the_expert_wins_real_games(name: str) -> None:
    env = make(games=[real_game(name)])
    _, info = env.reset(seed=0)
    assert set(info) == KEYS
    # A wrong step first: the plan starts from where it leads.
    _, _, _, _, info = env.step(next(c for c in info["admissible_commands"] if c.startswith("go to garbagecan")))
    _, info = play(env, info)
    assert info["won"]


@pytest.mark.slow
@needs_real_games
def test_the_expert_wins_all_real_games() -> None:
    for path in sorted(REAL_GAMES.glob("*/*/*/*/game.tw-pddl")):
        env = make(games=[path])
        _, info = play(env, env.reset(seed=0)[1])
        assert info["won"], path
