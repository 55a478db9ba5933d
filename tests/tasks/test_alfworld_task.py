"""ALFWorld in words: prompt, actions, judge, expert, cuts. Needs no engine but where it says so."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alfworld_cases import COMMANDS, INFO, REAL_GAMES, RIGHT, needs_alfworld, needs_real_games, without_data
from function_engine import make_collector
from hypothesis import given, strategies as st

from trl_gtr.engines.transformers import TransformersEngine
from trl_gtr.environments.alfworld import TASK_TYPES, project
from trl_gtr.environments.alfworld.commands import as_move, as_put
from trl_gtr.environments.alfworld.generator import bundled_games
from trl_gtr.evaluation.agents import ExpertAgent, PolicyAgent, RandomAgent
from trl_gtr.evaluation.evaluate import evaluate_agent
from trl_gtr.policy.loading import load_policy
from trl_gtr.policy.scoring import VLMPolicy
from trl_gtr.rollouts.vector_envs import unpack_infos
from trl_gtr.rollouts.workers import WorkerVectorEnv
from trl_gtr.tasks import Task, make_task
from trl_gtr.tasks.alfworld.prompt import fold, list_commands, unfold
from trl_gtr.tasks.alfworld.task import ActionLimit, ALFWorldTask, RepetitionEnds
from trl_gtr.tasks.base import contradicts
from trl_gtr.types import Generation, Response, Transition


@pytest.fixture
def task() -> ALFWorldTask:
    return ALFWorldTask()


def respond(task: ALFWorldTask, action: str, thoughts: str = RIGHT) -> Response:
    return task.format.parse(task.format.render({"thoughts": thoughts}, action))


def with_subgoal(*subgoal: str, holding: str = "", **changes: Any) -> dict[str, Any]:
    return {**INFO, "subgoal": list(subgoal), "view": {**INFO["view"], "holding": holding}, **changes}


# -- actions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("go to drawer 1", "go to drawer 1"),
        ("go to drawer 10", "go to drawer 10"),
        ("Go to  drawer 1.", "go to drawer 1"),
        ('"look"', "look"),
        ("I will go to drawer 10 now", "go to drawer 10"),
        ("go to drawer 100", None),
        ("go to drawer", None),
        ("drawer 1", None),
        ("go to cabinet 1 or go to cabinet 2", None),
        ("", None),
        ("take mug 1", None),
        ("look at the mug", None),
        ("I need help to open fridge 7", None),
        ("go to drawer 99, look", None),
        ("go to drawer 1-12", None),
        ("go to drawer 1.5", None),
        ("go to drawer 1. Then look", "go to drawer 1"),
    ],
)
def test_projection(text: str, command: str | None) -> None:
    assert project(text, COMMANDS) == command


@pytest.mark.parametrize("offered", ["move mug 1 to desk 1", "put mug 1 in/on desk 1"])
@pytest.mark.parametrize(
    "said", ["move mug 1 to desk 1", "put mug 1 in/on desk 1", "put the mug 1 on the desk 1", "put mug 1 in desk 1"]
)
def test_projection_knows_both_dialects(offered: str, said: str) -> None:
    assert project(said, [offered, offered.replace("desk 1", "desk 10"), "look"]) == offered
    assert project(said.replace("mug 1", "mug 12"), [offered]) is None


@given(st.text(max_size=60))
def test_projection_takes_any_text(text: str) -> None:
    found = project(text, COMMANDS)
    assert found is None or found in " ".join(text.casefold().split())


def test_dialects_are_each_other_s_inverse() -> None:
    assert as_put("move mug 1 to desk 1") == "put mug 1 in/on desk 1"
    assert as_move("put mug 1 in/on desk 1") == "move mug 1 to desk 1"
    assert as_put("go to desk 1") == as_move("go to desk 1") == "go to desk 1"


def test_actions(task: ALFWorldTask) -> None:
    assert isinstance(task, Task)
    assert task.to_env_action(respond(task, "go to cabinet 10"), INFO) == "go to cabinet 10"
    assert task.to_env_action(respond(task, "go to cabinet 3"), INFO) is None
    assert task.to_env_action(task.format.parse("look"), INFO) is None  # no valid object
    hiding = ALFWorldTask(hide=("help", "examine"))
    assert list(hiding.legal_actions(INFO)) == [c for c in COMMANDS if c != "help" and not c.startswith("examine")]
    assert hiding.to_env_action(respond(hiding, "help"), INFO) is None
    assert "help" not in hiding.prompt(None, INFO).split("Answer")[0]


# -- prompt ----------------------------------------------------------------------------------------------------------


def test_prompt_has_what_the_player_may_know(task: ALFWorldTask) -> None:
    prompt = task.prompt(None, INFO)
    assert "Your task: heat some mug and put it in cabinet\n" in prompt
    assert "Your last actions: go to drawer 1, go to countertop 1\n" in prompt
    assert all(command in prompt for command in COMMANDS)
    assert task.format.parse(prompt).valid  # its example is a response
    hidden = {**INFO, "extra.expert_plan": ["dig"], "subgoal": ["take", "ladle", ""], "goal": {}, "view": {}}
    assert task.prompt(None, hidden) == prompt
    assert set(task.public_state(INFO)) == {"task", "previous_actions", "actions"}


def test_an_earlier_prompt_leaves_out_what_was_for_its_own_step(task: ALFWorldTask) -> None:
    earlier = task.earlier_prompt(None, INFO)
    assert task.prompt(None, INFO).startswith(f"{earlier}\nYour last actions")
    assert earlier.endswith("Your task: heat some mug and put it in cabinet")


def test_prompt_shows_the_last_actions_only() -> None:
    info = {**INFO, "previous_actions": [f"go to cabinet {number}" for number in range(20)]}
    assert "actions: go to cabinet 18, go to cabinet 19\n" in ALFWorldTask(history=2).prompt(None, info)
    assert "actions: none\n" in ALFWorldTask(history=0).prompt(None, info)
    assert ALFWorldTask(history=0).public_state(info)["previous_actions"] == []


def test_prompt_with_the_whole_history() -> None:
    info = {**INFO, "previous_actions": [f"go to cabinet {number}" for number in range(45)]}
    assert f"actions: {', '.join(info['previous_actions'])}\n" in ALFWorldTask(history=None).prompt(None, info)
    assert ALFWorldTask(history=99).prompt(None, info) == ALFWorldTask(history=None).prompt(None, info)


def test_prompt_with_the_words_of_the_game(task: ALFWorldTask) -> None:
    reading = ALFWorldTask(observation_text=True)
    words = "On the countertop 1, you see a mug 1, and a plate 2."
    assert f"\nYou read: {words}\nYour last actions" in reading.prompt(None, INFO)
    assert reading.public_state(INFO)["observation"] == words
    assert words not in task.prompt(None, INFO)
    intro = (
        "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see "
        "a bed 1.\n\nYour task is to: put some mug on bed."
    )
    first = reading.prompt(None, {**INFO, "observation_text": intro})
    assert "You read: You are in the middle of a room. Looking quickly around you, you see a bed 1.\n" in first
    assert "Welcome" not in first
    assert "put some mug on bed" not in first


def test_action_only_prompt() -> None:
    task = ALFWorldTask(thoughts=False)
    assert "thoughts" not in task.prompt(None, INFO)
    expert = task.expert(INFO)
    assert expert is not None
    assert expert.text == '{"action": "take mug 1 from countertop 1"}'


def test_a_long_list_is_folded_and_loses_nothing() -> None:
    commands = sorted(
        [f"go to cabinet {n}" for n in range(1, 30) if n != 13]
        + [f"go to drawer {n}" for n in (1, 2, 3)]
        + [f"take mug {n} from shelf 2" for n in (1, 3)]
        + ["take pen 1 from shelf 2", "open drawer 2", "heat mug 1 with microwave 1", "look"]
    )
    assert list_commands(commands, limit=10_000) == ", ".join(commands)
    folded = list_commands(commands, limit=300)
    assert len(folded) < 300
    assert "go to (cabinet 1-12, cabinet 14-29, drawer 1-3)" in folded
    assert "take (mug 1, mug 3, pen 1) from shelf 2" in folded
    assert unfold(folded) == commands


NAMES = st.builds("{} {}".format, st.sampled_from(["mug", "cd", "desk", "drawer"]), st.integers(1, 120))
COMMAND = st.one_of(
    st.sampled_from(["look", "help", "inventory"]),
    st.builds("{} {}".format, st.sampled_from(["go to", "open", "examine", "use"]), NAMES),
    st.builds("take {} from {}".format, NAMES, NAMES),
    st.builds("move {} to {}".format, NAMES, NAMES),
    st.builds("slice {} with {}".format, NAMES, NAMES),
)


@given(st.lists(COMMAND, min_size=1, max_size=40, unique=True))
def test_folding_can_be_undone(commands: list[str]) -> None:
    assert unfold(fold(commands)) == sorted(commands)


# -- which command a thought concludes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thoughts", "command"),
    [
        (RIGHT, "take mug 1 from countertop 1"),
        ("I need to find a mug, so the next action is to go to cabinet 10.", "go to cabinet 10"),
        ("I must heat the mug, so I go to Microwave 1, then heat mug 1 with microwave 1.", "go to microwave 1"),
        ("So I go to cabinet 1. If it isn't there, I go to cabinet 2.", "go to cabinet 1"),
        ("I came here to go to drawer 1. Now I have to take the mug, so I open the fridge 1.", "open fridge 1"),
        ("I put mug 1 in/on desk 1.", "move mug 1 to desk 1"),
        ("I have to use the desk lamp, so I use desk lamp 1.", "use desklamp 1"),
        ("My sub-goal is to take the mug.", None),
        ("I am at cabinet 1 and see mug 1.", None),
        ("", None),
    ],
)
def test_the_command_that_a_thought_concludes(task: ALFWorldTask, thoughts: str, command: str | None) -> None:
    assert task.format.conclusion({"thoughts": thoughts}) == command


def test_words_that_conclude_another_command_are_not_kept(task: ALFWorldTask) -> None:
    """Things and sub-goal are right, and still the thought leads elsewhere: to a legal command or to none at all."""
    for elsewhere in ("go to cabinet 1", "open microwave 1"):
        thoughts = RIGHT.replace("I take mug 1 from countertop 1", f"I {elsewhere}")
        response = respond(task, "take mug 1 from countertop 1", thoughts)
        assert all(task.judge(response, INFO).values())
        assert contradicts(task, response.fields, "take mug 1 from countertop 1", INFO)
        expert = task.expert(INFO, hint=response)
        assert expert is not None
        assert task.format.conclusion(expert.fields) == "take mug 1 from countertop 1"
    expert = task.expert(INFO, hint=respond(task, "look", RIGHT))
    assert expert is not None
    assert expert.fields["thoughts"] == RIGHT


def test_both_dialects_conclude_the_same(task: ALFWorldTask) -> None:
    info = {**INFO, "admissible_commands": ["move mug 1 to desk 1", "move mug 1 to desk 2"]}
    assert not contradicts(task, {"thoughts": "So I put mug 1 in/on desk 1."}, "move mug 1 to desk 1", info)
    assert contradicts(task, {"thoughts": "So I put mug 1 in/on desk 1."}, "move mug 1 to desk 2", info)


# -- judge -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thoughts", "right"),
    [
        (RIGHT, True),
        ("I see a mug and a plate.", True),
        ("There is a mug on countertop 1. I must get it to microwave 1.", True),
        ("I see mug 2.", False),  # there is only mug 1
        ("I see an apple.", False),
        ("I see no apple.", True),
        ("I see no mug here.", False),
        ("I hold mug 1.", True),  # named, and in view; the claim of holding by number is the number's business
        ("I hold a mug.", False),
        ("I see nothing of use, so I look for a potato.", True),  # a kind that is only wanted
        ("I go to cabinet 10.", True),
        ("I go to cabinet 3.", False),  # no such cabinet in the room
        ("I see a salt shaker.", False),
        ("", True),
    ],
)
def test_objects_named_are_there(task: ALFWorldTask, thoughts: str, right: bool) -> None:
    assert task.judge(respond(task, "look", thoughts), INFO)["objects"] is right


def test_objects_in_the_hand_count(task: ALFWorldTask) -> None:
    info = with_subgoal("put", "cellphone", "cabinet", holding="cellphone 1")
    assert task.judge(respond(task, "look", "I hold a cell phone and see mug 1."), info)["objects"]
    assert not task.judge(respond(task, "look", "I am holding a mug."), info)["objects"]


@pytest.mark.parametrize(
    ("thoughts", "subgoal", "right"),
    [
        (RIGHT, ("take", "mug", ""), True),
        (RIGHT, ("find", "mug", ""), False),
        ("I need to pick up the mug.", ("take", "mug", ""), True),
        ("I should get a mug.", ("take", "mug", ""), True),
        ("I should get a mug.", ("find", "mug", ""), True),
        ("Next I look for a remote control in drawer 1.", ("find", "remotecontrol", ""), True),
        ("I have to heat the mug, so I go to microwave 1.", ("heat", "mug", "microwave"), True),
        ("I have to heat the plate, so I go to microwave 1.", ("heat", "mug", "microwave"), False),
        ("I must put the hot mug in the cabinet.", ("put", "mug", "cabinet"), True),
        ("I must put the mug in the drawer.", ("put", "mug", "cabinet"), False),
        ("I must put down the plate first.", ("drop", "plate", ""), True),
        ("I must put down the plate first.", ("put", "plate", "cabinet"), False),
        ("I want to turn on the desk lamp.", ("use", "desklamp", ""), True),
        ("My subgoal is washing the fork.", ("clean", "fork", "sinkbasin"), True),
        ("I need to find a mug. Now I have to take the mug.", ("take", "mug", ""), True),  # the last one counts
        ("The mug is nice.", ("take", "mug", ""), False),
        ("I take the mug.", ("take", "mug", ""), False),  # an action without a sub-goal
        ("", ("take", "mug", ""), False),
        (RIGHT, (), False),  # nothing is left to do
    ],
)
def test_subgoal(task: ALFWorldTask, thoughts: str, subgoal: tuple[str, ...], right: bool) -> None:
    info = with_subgoal(*subgoal)
    assert task.judge(respond(task, "look", thoughts), info)["subgoal"] is right


@pytest.mark.parametrize(
    "unit", ["i see ", "no mug ", "mug 1 ", "i need to find a ", "there is a mug. ", " ", "cell "]
)
def test_judge_is_quick_on_long_texts(unit: str) -> None:
    text = unit * (50_000 // len(unit))
    start = time.perf_counter()
    ALFWorldTask().judge(Response(text, {"thoughts": text}, "look"), INFO)
    project(text, COMMANDS)
    assert time.perf_counter() - start < 2.0


@given(st.text(max_size=80))
def test_judge_takes_any_text(text: str) -> None:
    judged = ALFWorldTask().judge(Response(text, {"thoughts": text}, "look"), INFO)
    assert set(judged) == {"objects", "subgoal"}


# -- expert ----------------------------------------------------------------------------------------------------------


def test_expert_says_what_is_seen_the_subgoal_and_the_action(task: ALFWorldTask) -> None:
    expert = task.expert(INFO)
    assert expert is not None
    assert expert.action == "take mug 1 from countertop 1"
    assert expert.fields["thoughts"] == (
        "I am at countertop 1 and see mug 1 and plate 2. My hand is empty. "
        "I need to take the mug, so the next action is to take mug 1 from countertop 1."
    )
    assert all(task.judge(expert, INFO).values())
    assert task.target(expert, INFO) == "take mug"


def test_expert_keeps_a_true_thought_and_mends_a_wrong_one(task: ALFWorldTask) -> None:
    kept = task.expert(INFO, hint=respond(task, "look"))
    assert kept is not None
    assert (kept.fields["thoughts"], kept.action) == (RIGHT, "take mug 1 from countertop 1")
    corrected = task.expert(INFO, hint=respond(task, "look", "I see an egg. I need to cool the egg."))
    assert corrected == task.expert(INFO)


def test_no_expert_where_nothing_helps(task: ALFWorldTask) -> None:
    stuck = {**INFO, "extra.expert_plan": [], "subgoal": []}
    assert task.expert(stuck) is None
    assert not task.solvable(stuck)
    assert task.solvable(INFO)
    assert task.solvable({**stuck, "won": True})


# -- episodes --------------------------------------------------------------------------------------------------------


def transition(final_info: dict[str, Any] | None = None, info: dict[str, Any] = INFO) -> Transition:
    nothing = np.zeros(0)
    return Transition(0, 0, nothing, "", Response(""), nothing, 0.0, False, False, False, True, info, final_info)


def test_success_by_task_type(task: ALFWorldTask) -> None:
    won = [transition(), transition({**INFO, "won": True, "goal_condition_success_rate": 1.0})]
    assert task.success(won)
    assert task.metrics(won) == {
        "success_pick_heat_then_place_in_recep": 1.0,
        "goal_condition_success_rate": 1.0,
    }
    assert not task.success([transition(INFO)])
    assert task.metrics([transition(INFO)])["success_pick_heat_then_place_in_recep"] == 0.0
    assert not task.success([])
    assert task.reward_scale == 1 / 50


class Paying:
    """An environment that pays what it is told, and never ends."""

    def __init__(self, rewards: list[float], terminated: bool = False) -> None:
        self.rewards, self.terminated = rewards, terminated

    def reset(self, **_: Any) -> tuple[None, dict[str, Any]]:
        return None, {}

    def step(self, action: str) -> tuple[None, float, bool, bool, dict[str, Any]]:
        return None, self.rewards.pop(0), self.terminated, False, {}


def ends(actions: str, rewards: list[float], terminated: bool = False) -> list[tuple[float, bool, dict[str, Any]]]:
    env = RepetitionEnds.__new__(RepetitionEnds)
    env.env = Paying(rewards, terminated)  # type: ignore[assignment]
    env.reset()
    return [(reward, truncated, info) for _, reward, _, truncated, info in (env.step(a) for a in actions)]  # type: ignore[misc]


def test_five_identical_actions_end_an_episode() -> None:
    cut = {"cut": "repetition", "bootstrap": False}
    assert ends("aaaaa", [0.0] * 5)[-2:] == [(0.0, False, {}), (-3.0, True, cut)]
    assert not any(truncated for _, truncated, _ in ends("aaaabaaaab", [0.0] * 10))
    assert ends("aaaaa", [0.0] * 4 + [0.5])[-1] == (0.5, True, cut)  # what was earned stays
    assert ends("aaaaa", [0.0] * 4 + [-1.0])[-1] == (-1.0, True, cut)
    assert ends("aaaaa", [0.0] * 4 + [50.0], terminated=True)[-1] == (50.0, False, {})


class Counting(Paying):
    """Tells what was done, as ALFWorld does."""

    def reset(self, **_: Any) -> tuple[None, dict[str, Any]]:
        self.done: list[str] = []
        return None, {}

    def step(self, action: str) -> tuple[None, float, bool, bool, dict[str, Any]]:
        self.done.append(action)
        return None, self.rewards.pop(0), self.terminated, False, {"previous_actions": list(self.done)}


@pytest.mark.parametrize(("last", "paid"), [(0.0, -3.0), (0.5, 0.5), (-3.0, -3.0)])
def test_more_actions_than_the_limit_end_an_episode(last: float, paid: float) -> None:
    env = ActionLimit.__new__(ActionLimit)
    env.env, env.max_actions = Counting([0.0] * 40 + [last]), 40  # type: ignore[assignment]
    env.reset()
    results = [env.step("look") for _ in range(41)]
    assert not any(truncated for _, _, _, truncated, _ in results[:-1])
    _, reward, _, truncated, info = results[-1]
    assert (reward, truncated, info["cut"], info["bootstrap"]) == (paid, True, "too many actions", False)


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="max_actions must be at least 1"):
        ALFWorldTask(max_actions=0)


def says_nothing(prompts: list[str], images: list[np.ndarray]) -> list[Generation]:
    return [Generation(np.zeros(1, np.int64), "") for _ in prompts]


class TestPlayed:
    pytestmark = needs_alfworld

    @pytest.fixture(autouse=True)
    def no_data(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        without_data(monkeypatch, tmp_path)

    def test_cut_in_training_only(self) -> None:
        task = make_task("alfworld")
        for options, cut in (({}, True), ({"evaluation": True}, False)):
            env = task.make_env(**options)  # type: ignore[arg-type]
            env.reset(seed=0)
            results = [env.step("look") for _ in range(5)]
            assert [bool(truncated) for _, _, _, truncated, _ in results] == [False] * 4 + [cut]
            assert results[-1][1] == (-3.0 if cut else 0.0)
        assert "cut" not in ALFWorldTask(cut=False).make_env().reset(seed=0)[1]

    def test_the_paper_s_limit_and_weights_are_for_training_only(self) -> None:
        """The 41st action ends the episode; no five in a row are the same."""
        weights = {kind: float(kind == "look_at_obj_in_light") for kind in TASK_TYPES}
        task = make_task("alfworld", max_actions=40, task_type_weights=weights, env_kwargs={"games": "bundled"})
        for evaluation in (False, True):
            env = task.make_env(evaluation=evaluation)
            kinds = [env.reset(seed=seed)[1]["task_type"] for seed in range(4)]
            assert (set(kinds) == {"look_at_obj_in_light"}) == (not evaluation)
            results = [env.step(("look", "inventory")[number % 2]) for number in range(41)]
            assert [bool(truncated) for _, _, _, truncated, _ in results] == [False] * 40 + [not evaluation]
            assert results[-1][1] == (0.0 if evaluation else -3.0)

    def test_splits(self) -> None:
        task = make_task("alfworld", env_kwargs={"games": "bundled"})
        assert len(task.make_env().unwrapped.games) == 240  # type: ignore[attr-defined]
        assert len(task.make_env(evaluation=True).unwrapped.games) == 48  # type: ignore[attr-defined]

    def test_each_game_is_evaluated_once(self) -> None:
        """In worker processes, and by two of them as by one."""
        short = {"games": "bundled", "task_types": ["look_at_obj_in_light"], "max_episode_steps": 1}
        task = make_task("alfworld", evaluation_split="valid_unseen", env_kwargs=short)
        games = {
            f"bundled:look_at_obj_in_light/{seed}"
            for kind, seed in bundled_games("valid_unseen")
            if kind in short["task_types"]
        }
        assert len(games) == 12
        report = evaluate_agent(RandomAgent(), task, "all", num_envs=3)
        played = [episode.start for episode in report.episodes]
        assert {start["gamefile"] for start in played} == games
        assert len(played) == 12
        assert played[0].items() >= {"task_type": "look_at_obj_in_light", "source": "bundled games"}.items()
        assert report.different_starts() == {"bundled games": 12}
        half = evaluate_agent(RandomAgent(), task, range(1, 12, 2), num_envs=2)
        assert [episode.start for episode in half.episodes] == played[1::2]

    @needs_real_games
    def test_real_games_are_named_as_such(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ALFWORLD_DATA", str(REAL_GAMES))
        task = make_task("alfworld", evaluation_split="valid_unseen", env_kwargs={"max_episode_steps": 1})
        report = evaluate_agent(RandomAgent(), task, "all", num_envs=2)
        assert report.different_starts() == {"real games": 6}
        assert {episode.start["task_type"] for episode in report.episodes} == set(TASK_TYPES)
        assert all(Path(episode.start["gamefile"]).is_file() for episode in report.episodes)

    def test_an_illegal_command_costs_one_in_training_and_evaluation(self) -> None:
        """A random command is played for it, so that the environment itself never sees an illegal one."""
        lamp = {"games": ["bundled:look_at_obj_in_light/1"], "max_episode_steps": 4}
        for options, price in (({}, -1.0), ({"illegal_reward": -0.25}, -0.25), ({"illegal_reward": 0}, 0.0)):
            task = make_task("alfworld", env_kwargs=lamp, **options)
            collector = make_collector(task, says_nothing, num_envs=1)
            try:
                steps = collector.collect(4).transitions
            finally:
                collector.close()
            assert [(step.legal, step.reward) for step in steps] == [(False, price)] * 4
            (episode,) = evaluate_agent(RandomAgent(), task, 1).episodes
            assert episode.total_reward == 4 * price

    def test_in_worker_processes(self) -> None:
        """A killed worker costs its episode; the other one, and the run, go on."""
        task = make_task("alfworld", env_kwargs={"games": ["bundled:pick_and_place_simple/1"]})
        envs = WorkerVectorEnv(task.make_env, 2)
        try:
            _, infos = envs.reset(seed=0)
            os.kill(envs.workers[0].pid, signal.SIGKILL)
            with pytest.warns(UserWarning, match="its episode is lost"):
                _, _, _, truncated, infos = envs.step(
                    [info["extra.expert_plan"][0] for info in unpack_infos(infos, 2)]
                )
            assert truncated.tolist() == [True, False]
            first, second = unpack_infos(infos, 2)
            assert first["final_info"]["worker_lost"]
            assert (first["previous_actions"], second["previous_actions"]) == ([], ["go to sidetable 1"])
            won = np.zeros(2, np.bool_)
            for _ in range(4):
                plans = [info["extra.expert_plan"][0] for info in unpack_infos(infos, 2)]
                _, _, terminated, _, infos = envs.step(plans)
                won |= terminated
            assert won.all()
        finally:
            envs.close()

    @pytest.mark.parametrize("task_type", TASK_TYPES)
    def test_expert_wins_with_true_thoughts(self, task_type: str) -> None:
        """After wrong steps too: it plans anew from where they led."""
        task = make_task(
            "alfworld", env_kwargs={"task_types": [task_type], "expert": "explorer"}, split="valid_unseen"
        )
        env = task.make_env()
        rng = np.random.default_rng(0)
        observation, info = env.reset(seed=5)
        for step in range(49):
            expert = task.expert(info)
            assert expert is not None
            assert task.judge(expert, info) == {"objects": True, "subgoal": True}, (expert.text, info["subgoal"])
            assert expert.action in task.prompt(observation, info)
            wrong = str(rng.choice(info["admissible_commands"]))
            observation, _, terminated, _, info = env.step(wrong if step % 4 == 1 else expert.action)
            if terminated:
                break
        assert info["won"]

    def test_the_embedded_model_wins_about_as_often_as_stated(self) -> None:
        """docs/alfworld.md: 0.52 [0.38, 0.66] of the games of training, greedy; here on other episodes."""
        options = {"env_kwargs": {"task_types": ["pick_and_place_simple"], "expert": "explorer"}}
        task = make_task("alfworld", evaluation_split="train", **options)
        model, processor = load_policy("tiny-alfworld")
        policy = VLMPolicy(model, processor, max_completion_length=56, temperature=1.0)
        agent = PolicyAgent(TransformersEngine(policy, model))
        report = evaluate_agent(agent, task, 24, seed=7, num_envs=8)
        low, high = report.success.interval
        assert low < 0.66
        assert high > 0.38
        assert report.metrics()["valid"] > 0.95
        expert = evaluate_agent(ExpertAgent(task), task, 6, seed=7, num_envs=3)
        assert expert.success.value == 1.0
