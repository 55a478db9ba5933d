"""The THOR backend over a stand-in for Unity, with the genuine ai2thor, `ThorEnv` and `OracleAgent`; and `--check`."""

from __future__ import annotations

import importlib.metadata
import json
import pickle
import random
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from alfworld_cases import needs_alfworld, without_data
from thor_cases import GOALS, Unity, needs_ai2thor, write_game

import trl_gtr.environments  # noqa: F401  registers the games
from trl_gtr.environments.alfworld import ALFWorldEnv
from trl_gtr.environments.alfworld.belief import Belief
from trl_gtr.environments.alfworld.check import missing_for_thor, report, thor_findings
from trl_gtr.rollouts.replay import Replayable
from trl_gtr.rollouts.workers import WorkerVectorEnv
from trl_gtr.tasks.alfworld.task import ALFWorldTask

SIMPLE = "pick_and_place_simple"
SMALL = "look_at_obj_in_light"  # in the room with the fewest receptacles


@pytest.fixture
def unity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Unity]:
    unity = Unity(monkeypatch, tmp_path)
    yield unity
    for pid in unity.pids:  # of a test that has failed
        subprocess.run(["kill", "-9", str(pid)], capture_output=True)


class TestThor:
    pytestmark = needs_ai2thor

    @pytest.fixture
    def make(self, unity: Unity, tmp_path: Path) -> Iterator[Any]:
        """Makes an environment over games of these task types, or over these files, and closes it."""
        made = []

        def make(*games: str | Path) -> gym.Env:
            files = [write_game(tmp_path / "games", game) if isinstance(game, str) else game for game in games]
            # gymnasium's checker breaks at the first step after a reset that failed.
            options = {"backend": "thor", "games": files, "disable_env_checker": True}
            made.append(gym.make("trl_gtr/ALFWorld-v0", **options))
            return made[-1]

        yield make
        for env in made:
            env.close()
        assert unity.gone()

    def test_the_expert_wins_all_task_types(self, make: Any, unity: Unity, tmp_path: Path) -> None:
        unexplored = (SIMPLE, SMALL)  # one of each room
        env = make(*(write_game(tmp_path / "games", each, explored=each not in unexplored) for each in GOALS))
        won = {}
        for i, task_type in enumerate(GOALS):
            _, info = env.reset(seed=0, options={"game": i})
            assert info["task_type"] == task_type
            won[task_type], _, _ = play(env, info)
        assert won == dict.fromkeys(GOALS, True)
        assert len(unity.pids) == 1

    def test_what_an_episode_looks_like(self, make: Any, unity: Unity) -> None:
        env = make(SIMPLE)
        _, info = env.reset(seed=0)
        assert info["task"] in ("put some mug on cabinet", "put a mug in cabinet")
        _, commands, rewards = play(env, info)
        assert commands == [
            "go to countertop 1",
            "take mug 1 from countertop 1",
            "go to cabinet 1",
            "open cabinet 1",
            "move mug 1 to cabinet 1",
        ]
        assert rewards == [0, 0, 0, 0, 51]
        assert unity.actions[-1]["action"] == "PutObject"  # which THOR's controller does at "put" only

    def test_frames_are_rgb(self, make: Any) -> None:
        """The stand-in paints what it shows in the colours 40, 65, 90 … by its number: red by its place in eight."""
        env = make(SIMPLE)
        env.reset(seed=0)
        observation, *_ = env.step("go to countertop 1")
        assert (observation.shape, observation.dtype) == ((300, 300, 3), np.uint8)
        assert observation[10, 10].tolist() == [40 + 25 * 4, 40, 40]  # the fifth thing of the room

    def test_both_dialects_are_legal(self, make: Any) -> None:
        env = make(SIMPLE)
        env.reset(seed=0)
        for command in ("go to countertop 1", "take mug 1 from countertop 1", "go to cabinet 1", "open cabinet 1"):
            env.step(command)
        _, _, terminated, _, info = env.step("put mug 1 in/on cabinet 1")
        assert info["legal"]
        assert terminated

    def test_fifty_steps_at_most_and_a_second_episode(self, make: Any) -> None:
        env = make(SMALL)
        for _ in range(2):
            env.reset(seed=0)
            ends = [env.step("look")[2:4] for _ in range(50)]
            assert ends == [(False, False)] * 49 + [(False, True)]

    def test_a_copy_replays_its_commands(self, make: Any) -> None:
        env = make(SIMPLE)
        env.reset(seed=0)
        env.step("go to fridge 1")
        twin = pickle.loads(pickle.dumps(env))
        try:
            assert env.step("open fridge 1")[4] == twin.step("open fridge 1")[4]
        finally:
            twin.close()

    def test_plain_data_replays_its_commands(self, unity: Unity, tmp_path: Path) -> None:
        task = ALFWorldTask(env_kwargs={"backend": "thor", "games": [write_game(tmp_path / "games", SIMPLE)]})
        env, twin = (Replayable(task.make_env()) for _ in range(2))
        try:
            env.reset(seed=0)
            env.reset()
            env.step("go to fridge 1")
            state = env.get_state()
            state["outcome"]["observation"] = "drawn by another GPU"
            with pytest.warns(UserWarning, match="different observation"):
                twin.set_state(json.loads(json.dumps(state)))
            assert env.step("open fridge 1")[4] == twin.step("open fridge 1")[4]
        finally:
            env.close()
            twin.close()
        assert unity.gone()

    def test_the_global_generator_is_left_alone(self, make: Any) -> None:
        random.seed(5)
        expected = random.random()
        random.seed(5)
        make(SMALL).reset(seed=0)
        assert random.random() == expected

    def test_alfworlds_own_expert_is_not_asked(self, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from alfworld.agents.expert import HandCodedThorAgent

        asked = []
        for name in ("act", "observe"):
            monkeypatch.setattr(HandCodedThorAgent, name, lambda *arguments: asked.append(arguments))
        env = make(SMALL)
        env.reset(seed=0)
        env.step("look")
        assert asked == []

    # -- failures --------------------------------------------------------------------------------------------------

    def test_a_game_that_can_not_start_says_why(self, make: Any, tmp_path: Path) -> None:
        broken = write_game(tmp_path / "broken", SIMPLE)
        trajectory = broken.with_name("traj_data.json")
        content = json.loads(trajectory.read_text())
        del content["plan"]
        trajectory.write_text(json.dumps(content))
        env = make(broken, write_game(tmp_path / "games", SIMPLE))
        with pytest.raises(KeyError, match="plan"):
            env.reset(seed=0, options={"game": 0})
        with pytest.raises(ValueError, match=r"call reset\(\) before step"):
            env.unwrapped.step("look")
        _, info = env.reset(seed=0, options={"game": 1})
        assert info["task_type"] == SIMPLE

    @pytest.mark.parametrize("fault", ["exit_on", "hang_on"])
    @pytest.mark.parametrize("event", ["start", "SetObjectPoses", "PickupObject"])
    def test_a_lost_unity_is_told(
        self, make: Any, unity: Unity, monkeypatch: pytest.MonkeyPatch, fault: str, event: str
    ) -> None:
        """At its start, in a reset, or in a step, whose errors alfworld's controller swallows."""
        from trl_gtr.environments.alfworld import simulator

        monkeypatch.setattr(simulator, "ANSWER_TIMEOUT", 5.0)
        if fault == "hang_on":
            monkeypatch.setattr(simulator, "START_TIMEOUT", 5.0 if event == "start" else 60.0)
        unity.set(**{fault: event})
        env = make(SIMPLE)
        begin = time.monotonic()
        reason = "ended with exit code 9" if fault == "exit_on" else "no answer within 5 s"
        with pytest.raises(simulator.SimulatorLost, match=rf"{reason}.*Reset the environment"):
            play(env, env.reset(seed=0)[1])
        assert time.monotonic() - begin < 60
        assert unity.gone()
        with pytest.raises((RuntimeError, ValueError), match=r"reset"):
            env.unwrapped.step("look")
        unity.set()
        assert play(env, env.reset(seed=0)[1])[0]
        assert len(unity.pids) == 2

    def test_a_worker_whose_unity_is_lost_is_replaced(self, unity: Unity, tmp_path: Path) -> None:
        game = write_game(tmp_path / "games", SIMPLE)
        unity.set(exit_on="PickupObject")
        envs = WorkerVectorEnv(lambda: ALFWorldEnv(backend="thor", games=[game]), 1)
        try:
            envs.reset(seed=0)
            envs.step(["go to countertop 1"])
            with pytest.warns(UserWarning, match=r"(?s)its episode is lost.*SimulatorLost.*ended with exit code 9"):
                _, _, _, truncated, _ = envs.step(["take mug 1 from countertop 1"])
            assert truncated[0]
            assert (envs.lost_episodes, len(unity.pids)) == (1, 2)
        finally:
            envs.close()
        assert unity.gone()

    # -- no Unity survives -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("place", ["here", "worker"])
    @pytest.mark.parametrize("ending", ["close", "SIGTERM", "SIGKILL"])
    def test_no_unity_survives(self, unity: Unity, tmp_path: Path, place: str, ending: str) -> None:
        game = write_game(tmp_path / "games", SMALL)
        make = f"lambda: ALFWorldEnv(backend='thor', games=[{str(game)!r}])"
        script = (
            "import os, sys, time\n"
            "from trl_gtr.environments.alfworld import ALFWorldEnv\n"
            "from trl_gtr.rollouts.workers import WorkerVectorEnv\n"
            f"make = {make}\n"
            f"env = make() if {place!r} == 'here' else WorkerVectorEnv(make, 1)\n"
            "env.reset(seed=0)\n"
            "print('ready', file=sys.stdout, flush=True)\n"
            f"if {ending!r} == 'close': env.close(); os._exit(0)\n"
            "time.sleep(600)\n"
        )
        with unity.python(script) as process:
            assert process.stdout is not None
            assert "ready\n" in iter(process.stdout.readline, "")
            if ending.startswith("SIG"):
                process.send_signal(getattr(signal, ending))
        assert len(unity.pids) == 1
        assert unity.gone()

    def test_no_unity_survives_its_worker(self, unity: Unity, tmp_path: Path) -> None:
        game = write_game(tmp_path / "games", SMALL)
        envs = WorkerVectorEnv(lambda: ALFWorldEnv(backend="thor", games=[game]), 1)
        try:
            envs.reset(seed=0)
            envs.workers[0]._process.send_signal(signal.SIGKILL)
            assert unity.gone()
        finally:
            envs.close()

    # -- what THOR refuses -----------------------------------------------------------------------------------------

    def test_where_a_command_is_refused_the_expert_does_something_else(self, make: Any, unity: Unity) -> None:
        """Two cabinets have no room for the mug; the other two have."""
        unity.set(refuse=[["PutObject", "Cabinet|+01.66|+02.05"]])
        env = make(SIMPLE)
        won, commands, _ = play(env, env.reset(seed=0)[1])
        assert won
        assert [command for command in commands if command.startswith("move")] == [
            "move mug 1 to cabinet 1",
            "move mug 1 to cabinet 2",
            "move mug 1 to cabinet 3",
        ]

    def test_where_nothing_helps_the_expert_says_so(self, make: Any, unity: Unity) -> None:
        unity.set(refuse=[["PutObject", "Cabinet"]])
        env = make(SIMPLE)
        won, commands, _ = play(env, env.reset(seed=0)[1])
        assert not won
        assert len(commands) == len(set(commands)) == 2 + 4 * 3  # four cabinets: go, open, put

    def test_an_open_microwave_is_closed_by_the_first_attempt(self, make: Any) -> None:
        """THOR's controller can't heat in a microwave that is open; it closes it, and says that nothing happened."""
        env = make("pick_heat_then_place_in_recep")
        env.reset(seed=0)
        for command in ("go to countertop 1", "take mug 1 from countertop 1", "go to microwave 1", "open microwave 1"):
            *_, info = env.step(command)
        won, commands, _ = play(env, info)
        assert won
        assert commands[:2] == ["heat mug 1 with microwave 1"] * 2
        assert "heat mug 1 with microwave 1" not in commands[2:]

    def test_a_lamp_that_does_not_work_is_tried_once(self, make: Any, unity: Unity) -> None:
        unity.set(refuse=[["ToggleObjectOn", "DeskLamp"]])
        env = make("look_at_obj_in_light")
        won, commands, _ = play(env, env.reset(seed=0)[1])
        assert not won
        assert commands.count("use desklamp 1") == 1
        assert len(commands) < 20


def play(env: gym.Env, info: dict[str, Any]) -> tuple[bool, list[str], list[float]]:
    """Follow the expert to the end, or until it has nothing to say: was it won, the commands, the rewards."""
    commands: list[str] = []
    rewards: list[float] = []
    ended = False
    while not ended and info["extra.expert_plan"]:
        commands.append(info["extra.expert_plan"][0])
        _, reward, terminated, truncated, info = env.step(commands[-1])
        rewards.append(float(reward))
        ended = terminated or truncated
    return info["won"], commands, rewards


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    games = [write_game(tmp_path / "games", SIMPLE, explored=False)]
    without_data(monkeypatch, tmp_path)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setitem(sys.modules, "ai2thor", None)
    names = {finding.name for finding in missing_for_thor()}
    assert "X display" in names
    assert "ALFWorld's games" not in names  # which can be named one by one
    if any(finding.name == "ai2thor" for finding in missing_for_thor()):
        with pytest.raises(ImportError, match=r"(?s)THOR can't start.*DISPLAY is not set.*startx"):
            ALFWorldEnv(backend="thor", games=games)


def test_opencv_counts_by_whatever_distribution_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    opencv = types.ModuleType("cv2")
    opencv.__version__ = "5.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cv2", opencv)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0" if name != "opencv-python" else missing(name))
    assert "ok      cv2: 5.0" in map(str, thor_findings())
    monkeypatch.setitem(sys.modules, "cv2", None)
    finding = next(finding for finding in missing_for_thor() if finding.name == "cv2")
    assert "opencv-python-headless" in finding.remedy


def missing(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_a_display_without_a_server_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPLAY", ":4711")
    assert "missing X display: DISPLAY=:4711, but no server answers there" in report()[0]


def test_check_says_what_is_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trl_gtr.environments.alfworld", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    able = 'can run: backend="text" on bundled games' in done.stdout
    assert done.returncode == (0 if able else 1)
    assert "360, generated when played" in done.stdout
    assert able or 'pip install "trl-gtr[alfworld]"' in done.stdout


# -- what can be known from the texts --------------------------------------------------------------------------------


def test_belief_remembers_what_was_refused() -> None:
    intro = "-= Welcome to TextWorld, ALFRED! =-\n\nYou see a drawer 1, and a fridge 1.\n\nYour task is to: x"
    belief = Belief(
        intro.replace("You see", "Looking around you, you see"), frozenset({"drawer", "fridge"}), frozenset()
    )
    belief.follow("go to drawer 1", "You arrive at loc 1. The drawer 1 is closed. ")
    belief.follow("put mug 1 in/on drawer 1", "Nothing happens.")
    assert belief.refused() == {"move mug 1 to drawer 1"}
    belief.follow("open drawer 1", "You open the drawer 1. The drawer 1 is open. In it, you see a pen 1.")
    assert belief.refused() == frozenset()
    belief.follow("move mug 1 to drawer 1", "Nothing happens.")
    belief.follow("go to fridge 1", "You arrive at loc 2. The fridge 1 is closed. ")
    assert belief.refused() == {"move mug 1 to drawer 1"}
    belief.follow("take pen 1 from drawer 1", "You pick up the pen 1 from the drawer 1.")
    assert belief.refused() == frozenset()


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
