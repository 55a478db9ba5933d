"""The THOR backend, over a stand-in for the simulator and alfworld's genuine `AlfredThorEnv`; and `--check`."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import thor_stand_in
from alfworld_cases import needs_alfworld, without_data

import trl_gtr.environments  # noqa: F401  registers the games
from trl_gtr.environments.alfworld import ALFWorldEnv
from trl_gtr.environments.alfworld.belief import Belief
from trl_gtr.environments.alfworld.check import missing_for_thor, report
from trl_gtr.environments.replay import Replayable
from trl_gtr.tasks.alfworld import ALFWorldTask


@pytest.fixture
def games(tmp_path: Path) -> list[Path]:
    """A game's folder as it is in ALFWorld's data, as far as THOR reads it."""
    place = tmp_path / "pick_and_place_simple-Mug-None-Desk-308" / "trial_1"
    place.mkdir(parents=True)
    targets = {"object_target": "Mug", "parent_target": "Desk", "toggle_target": "", "mrecep_target": ""}
    scene: dict[str, Any] = {"scene_num": 308, "object_poses": [], "object_toggles": [], "dirty_and_empty": False}
    trajectory = {
        "task_type": "pick_and_place_simple",
        "pddl_params": {**targets, "object_sliced": False},
        "scene": {**scene, "init_action": {}},
    }
    (place / "traj_data.json").write_text(json.dumps(trajectory))
    (place / "game.tw-pddl").write_text('{"solvable": true}')
    return [place / "game.tw-pddl"]


class TestStandIn:
    pytestmark = needs_alfworld

    @pytest.fixture(autouse=True)
    def simulator(self, monkeypatch: pytest.MonkeyPatch) -> None:
        thor_stand_in.install(monkeypatch)

    def make(self, games: list[Path], **options: Any) -> gym.Env:
        return gym.make("trl_gtr/ALFWorld-v0", backend="thor", games=games, **options)

    def test_frames_are_rgb(self, games: list[Path]) -> None:
        env = self.make(games)
        observation, _ = env.reset(seed=0)
        assert (observation.shape, observation.dtype) == ((300, 300, 3), np.uint8)
        assert observation[150, 150].tolist() == [thor_stand_in.RED, 0, thor_stand_in.BLUE]

    def test_the_expert_wins_and_the_simulator_hears_put(self, games: list[Path]) -> None:
        env = self.make(games)
        _, info = env.reset(seed=0)
        assert info["task"] == "put a mug in desk"
        rewards, terminated = [], False
        while not terminated:
            _, reward, terminated, _, info = env.step(info["extra.expert_plan"][0])
            rewards.append(reward)
        assert thor_stand_in.Controller.sent == [
            "go to countertop 1",
            "take mug 1 from countertop 1",
            "go to desk 1",
            "put mug 1 in/on desk 1",
        ]
        assert rewards == [0, 0, 0, 51]
        assert info["previous_actions"][-1] == "move mug 1 to desk 1"

    def test_both_dialects_are_legal(self, games: list[Path]) -> None:
        env = self.make(games)
        env.reset(seed=0)
        for command in ("go to countertop 1", "take mug 1 from countertop 1", "go to desk 1"):
            env.step(command)
        _, _, terminated, _, info = env.step("put mug 1 in/on desk 1")
        assert info["legal"]
        assert terminated

    def test_fifty_steps_at_most_and_a_second_episode(self, games: list[Path]) -> None:
        env = self.make(games)
        for _ in range(2):
            env.reset(seed=0)
            ends = [env.step("look")[2:4] for _ in range(50)]
            assert ends == [(False, False)] * 49 + [(False, True)]

    def test_a_copy_replays_its_commands(self, games: list[Path]) -> None:
        env = self.make(games)
        env.reset(seed=0)
        env.step("go to fridge 1")
        twin = pickle.loads(pickle.dumps(env))
        assert env.step("open fridge 1")[4] == twin.step("open fridge 1")[4]

    def test_plain_data_replays_its_commands(self, games: list[Path]) -> None:
        env, twin = (
            Replayable(ALFWorldTask(env_kwargs={"backend": "thor", "games": games}).make_env()) for _ in range(2)
        )
        env.reset(seed=0)
        env.reset()
        env.step("go to fridge 1")
        state = env.get_state()
        state["outcome"]["observation"] = "drawn by another GPU"
        with pytest.warns(UserWarning, match="another observation"):
            twin.set_state(json.loads(json.dumps(state)))
        assert env.step("open fridge 1")[4] == twin.step("open fridge 1")[4]

    def test_an_error_in_the_simulator_surfaces(self, games: list[Path]) -> None:
        env = self.make(games).unwrapped
        assert isinstance(env, ALFWorldEnv)
        env.reset(seed=0)
        assert env._engine is not None
        for _ in range(2):
            with pytest.raises(RuntimeError, match="breaks on purpose"):
                env._engine.step("break")
        env.reset(seed=0)
        assert env.step("look")[4]["legal"]

    def test_the_global_generator_is_left_alone(self, games: list[Path]) -> None:
        import random

        random.seed(5)
        expected = random.random()
        random.seed(5)
        env = self.make(games)
        env.reset(seed=0)
        assert random.random() == expected


def test_what_is_missing_is_named(games: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_data(monkeypatch, tmp_path)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setitem(sys.modules, "ai2thor", None)
    names = {finding.name for finding in missing_for_thor()}
    assert "X display" in names
    assert "ALFWorld's games" not in names  # which can be named one by one
    if any(finding.name == "ai2thor" for finding in missing_for_thor()):
        with pytest.raises(ImportError, match=r"(?s)THOR can't start.*DISPLAY is not set.*startx"):
            ALFWorldEnv(backend="thor", games=games)


def test_a_display_without_a_server_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPLAY", ":4711")
    assert "missing X display: DISPLAY=:4711, but no server answers there" in report()[0]


def test_check_says_what_is_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trl_gtr.environments.alfworld", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    able = 'can run: backend="text" on bundled games' in done.stdout
    assert done.returncode == (0 if able else 1)
    assert "360, made when they are played" in done.stdout
    assert able or 'pip install "trl-gtr[alfworld]"' in done.stdout


# -- what can be known from the texts --------------------------------------------------------------------------------


def test_belief_follows_the_texts() -> None:
    intro = (
        "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see "
        "a drawer 10, a drawer 2, a desk 1, and a fridge 1.\n\nYour task is to: put a mug in desk."
    )
    belief = Belief(intro, frozenset({"drawer", "fridge"}), frozenset())
    assert belief.room == ["desk 1", "drawer 2", "drawer 10", "fridge 1"]
    belief.follow("go to desk 1", "You arrive at loc 3. On the desk 1, you see a mug 1, a desklamp 1, and a pen 2.")
    belief.follow("take mug 1 from desk 1", "You pick up the mug 1 from the desk 1.")
    belief.follow("use desklamp 1", "You turn on the desklamp 1.")
    belief.follow("go to fridge 1", "You arrive at loc 5. The fridge 1 is closed. ")
    assert (belief.world().view()["here"], belief.holding) == ([["fridge 1", "closed", []]], "mug 1")
    belief.follow("cool mug 1 with fridge 1", "You cool the mug 1 using the fridge 1.")
    belief.follow("open fridge 1", "You open the fridge 1. The fridge 1 is open. In it, you see nothing.")
    belief.follow("put mug 1 in/on fridge 1", "You put the mug 1 in/on the fridge 1.")
    belief.follow("go to drawer 2", "Nothing happens.")
    world = belief.world()
    assert world.contents == {
        "desk 1": ["desklamp 1", "pen 2"],
        "drawer 2": [],
        "drawer 10": [],
        "fridge 1": ["mug 1"],
    }
    assert set(belief.seen) == {"desk 1", "fridge 1"}
    assert (world.holding, world.location, world.opened) == (None, "fridge 1", {"fridge 1"})
    assert world.states == {"desklamp 1": {"on"}, "mug 1": {"cool"}}


@pytest.mark.alfworld
@pytest.mark.skipif(needs_alfworld[1].args[0], reason=needs_alfworld[1].kwargs["reason"])
def test_belief_agrees_with_the_truth_of_a_text_game(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a room whose places are not shared, the texts tell everything that can be seen."""
    without_data(monkeypatch, tmp_path)
    env = ALFWorldEnv(games=["bundled:pick_two_obj_and_place/41"], expert="explorer")
    _, info = env.reset(seed=0)
    openable = frozenset({"cabinet", "drawer", "fridge", "microwave", "safe"})
    belief = Belief(info["observation_text"], openable, frozenset())
    terminated, steps = False, 0
    while not terminated:
        _, _, terminated, _, info = env.step(info["extra.expert_plan"][0])
        belief.follow(info["previous_actions"][-1], info["observation_text"])
        view = belief.world().view()
        here = [entry for entry in info["view"]["here"] if entry[0] == belief.here]
        assert (view["room"], view["here"], view["holding"]) == (info["view"]["room"], here, info["view"]["holding"])
        steps += 1
    assert steps > 6
