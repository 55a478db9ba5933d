"""Any gymnasium environment as a task."""

from __future__ import annotations

import enum
import pickle
import random
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from rollout_cases import transition

from trl_gtr.correctors import ExpertCorrector
from trl_gtr.environments.rendered import RenderedObservation, is_picture
from trl_gtr.guides.sft_data import make_sft_dataset
from trl_gtr.rollouts.group_collector import GroupCollector
from trl_gtr.rollouts.playing import PlayingRules
from trl_gtr.rollouts.workers import WorkerVectorEnv
from trl_gtr.tasks import make_task, task_options, task_options_help
from trl_gtr.tasks.gym import GymTask
from trl_gtr.types import CorrectionRequest, Response

MOVES = ["left", "down", "right", "up"]
DRY = {"is_slippery": False}
# The shortest path on the 4x4 map, written by hand: state → move.
PATH = {0: "down", 4: "down", 8: "right", 9: "down", 13: "right", 14: "right"}


class Line(gym.Env):
    """Walk right to 3; the observation is the position, the picture a strip with one white column."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space: gym.Space = gym.spaces.Discrete(4)
    action_space: gym.Space = gym.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode, self.at = render_mode, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = int(self.np_random.integers(3))
        return self.at, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.at = max(0, self.at + (1 if action in (1, "right") else -1))
        return self.at, 0.0, self.at == 3, False, {"success": self.at == 3}

    def render(self) -> Any:
        picture = np.zeros((32, 32, 3), np.uint8)
        picture[:, 8 * self.at : 8 * self.at + 8] = 255
        return picture


class NoPictures(Line):
    metadata = {"render_modes": ["human"]}  # noqa: RUF012


class GreyPictures(Line):
    def render(self) -> Any:
        return super().render()[..., 0]


class Continuous(Line):
    action_space = gym.spaces.Box(-1, 1, (2,))


class Lamps(Line):
    action_space = gym.spaces.MultiBinary(2)


class Parts(Line):
    action_space = gym.spaces.Dict({"leg": gym.spaces.Discrete(2)})


class Growing(Line):
    """Its pictures are larger with some seeds."""

    def render(self) -> Any:
        return np.repeat(super().render(), self.at + 1, axis=0)


class OneSize(gym.Wrapper):
    def render(self) -> Any:
        picture: Any = super().render()
        return picture[:32]


class NoMode(Line):
    """Declares a render mode that nobody can ask for."""

    def __init__(self) -> None:
        super().__init__("rgb_array")


class FromFive(Line):
    """Its actions are 5 and 6."""

    action_space = gym.spaces.Discrete(2, start=5)


class Spoken(Line):
    action_space = gym.spaces.Text(10)


class Unseeded(Line):
    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        return self.at, {"drawn": random.random()}


class Sides(enum.IntEnum):
    back = 0
    ahead = 1


class Enumerated(Line):
    actions = Sides


class Meaningful(Line):
    def get_action_meanings(self) -> list[str]:
        return ["NOOP", "FIRE"]


@pytest.fixture(autouse=True)
def registered() -> Any:
    kinds = (
        *(Line, NoPictures, GreyPictures, Growing, NoMode, Continuous, Lamps, Parts, FromFive, Spoken, Unseeded),
        *(Enumerated, Meaningful),
    )
    for kind in kinds:
        gym.register(f"test/{kind.__name__}-v0", entry_point=kind)
    yield
    for kind in kinds:
        del gym.registry[f"test/{kind.__name__}-v0"]


def path_expert(info: Mapping[str, Any]) -> tuple[dict[str, str], str] | None:
    move = PATH.get(info["observation"])
    thought = {"observation": f"I stand on square {info['observation']}.", "thoughts": f"I go {move}."}
    return (thought, move) if move else None


def square_judge(response: Response, info: Mapping[str, Any]) -> dict[str, bool]:
    return {"square": str(info["observation"]) in str(response.fields.get("observation")).rstrip(".").split()}


def spoken(info: Mapping[str, Any]) -> list[str]:
    return ["right", "left"] if info["observation"] else ["right"]


def make_discrete(env: gym.Env) -> gym.Env:
    return gym.wrappers.DiscretizeAction(env, bins=2)


def frozen_lake(**options: Any) -> GymTask:
    pytest.importorskip("pygame")
    task = make_task("gym:FrozenLake-v1", **{"actions": MOVES, "env_kwargs": DRY, "goal": "Reach it."} | options)
    assert isinstance(task, GymTask)
    return task


# -- it works ---------------------------------------------------------------------------------------------------------


def test_five_lines_are_enough() -> None:
    task = frozen_lake()
    env = task.make_env()
    picture, info = env.reset(seed=0)
    assert picture.shape == (256, 256, 3)
    assert env.observation_space.contains(picture)
    assert info["observation"] == 0
    prompt = task.prompt(picture, info)
    assert "Goal: Reach it." in prompt
    assert "Allowed actions: left, down, right, up" in prompt
    assert [field.key for field in task.format.fields] == ["observation", "thoughts"]
    response = task.format.respond({"observation": "ice", "thoughts": "south"}, " Down ")
    assert task.to_env_action(response, info) == 1
    assert task.to_env_action(task.format.respond({"observation": "", "thoughts": ""}, "jump"), info) is None
    assert task.to_env_action(task.format.parse("down"), info) is None
    before = picture.copy()
    picture, *_, info = env.step(1)
    assert info["observation"] == 4
    assert not np.array_equal(before, picture)


def test_without_judge_and_expert_the_task_says_so() -> None:
    task = make_task("gym:test/Line-v0", actions=["left", "right"])
    assert not task.defines("judge")
    assert not task.defines("expert")
    assert task.judge(Response(""), {}) == {}
    assert task.expert({}) is None
    with pytest.raises(ValueError, match=r"has no expert.*to a GymTask with `expert=`"):
        ExpertCorrector().check(task)


def test_an_expert_plays_teaches_and_corrects() -> None:
    task = frozen_lake(expert=path_expert, judge=square_judge)
    ExpertCorrector().check(task)
    env = task.make_env()
    picture, info = env.reset(seed=0)
    moves = []
    terminated, reward = False, 0.0
    while not terminated:
        expert = task.expert(info)
        assert expert is not None
        assert expert.action is not None
        assert task.judge(expert, info) == {"square": True}
        moves.append(expert.action)
        picture, earned, terminated, _, info = env.step(task.to_env_action(expert, info))
        reward = float(earned)
    assert moves == list(PATH.values())
    assert reward == 1.0
    assert task.expert(info) is None
    wrong = task.format.respond({"observation": "I stand on square 7.", "thoughts": "I go up."}, "up")
    request = CorrectionRequest(picture, "", wrong, {}, {"observation": 4}, task)
    (correction,) = ExpertCorrector().correct([request])
    assert (correction.verdict, correction.action) == ("corrected", "down")
    rows = make_sft_dataset(task, 6, exploration=0.0)
    assert len(rows) == 6


def test_a_game_that_lists_its_transitions_has_an_expert() -> None:
    task = pickle.loads(pickle.dumps(frozen_lake()))
    ExpertCorrector().check(task)
    assert "expert" not in task.options
    env, squares = task.make_env(), []
    _, info = env.reset(seed=0)
    terminated, reward = False, 0.0
    while not terminated:
        squares.append(info["observation"])
        expert = task.expert(info)
        assert expert is not None
        assert expert.fields["observation"] == f"This is state {squares[-1]}."
        assert expert.fields["thoughts"] == f"The best action is {expert.action}."
        _, reward, terminated, _, info = env.step(task.to_env_action(expert, info))
    assert (reward, len(squares)) == (1.0, len(PATH))
    for end in (5, 15):  # a hole, the goal
        assert task.expert({"observation": end}) is None
    assert frozen_lake(thoughts=False).expert({"observation": 14}).action == "right"  # type: ignore[union-attr]


def test_the_expert_knows_which_actions_there_are() -> None:
    """Without "right", the lake's goal is out of reach; with "down" and "right" alone, it isn't."""
    assert frozen_lake(actions={"south": 1, "west": 0}).expert({"observation": 0}) is None
    expert = frozen_lake(actions={"east": 2, "south": 1}).expert({"observation": 8})
    assert expert is not None
    assert expert.action == "east"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("trl_gtr/FrozenLake-v0", {}),  # another map in every episode
        ("FrozenLake-v1", {"env_kwargs": {"map_name": None}}),  # another map in every environment
        ("FrozenLake-v1", {"wrap": gym.wrappers.Autoreset}),
        ("test/Line-v0", {}),
    ],
)
def test_other_games_have_no_expert_of_their_own(name: str, options: dict[str, Any]) -> None:
    count = 2 if "Line" in name else 4
    assert not GymTask(name, actions=MOVES[:count], **options).defines("expert")


def test_functions_can_be_named() -> None:
    task = frozen_lake(success="operator:truth", expert=f"{__name__}:path_expert")
    assert task.success([transition(reward=-1.0)])
    assert task.expert({"observation": 8}).action == "right"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("reward", "final", "success"),
    [(1.0, {}, True), (0.0, {}, False), (1.0, {"success": False}, False), (0.0, {"success": True}, True)],
)
def test_success_by_default(reward: float, final: dict[str, Any], success: bool) -> None:
    task = make_task("gym:test/Line-v0", actions=["left", "right"])
    assert task.success([transition(reward=0.5), transition(reward=reward, final_info=final)]) == success
    assert not task.success([])


def test_prompt_and_format_can_be_replaced() -> None:
    task = make_task("gym:test/Line-v0", actions=["left", "right"], prompt="{game}: {actions}! {{}} {instructions}")
    assert task.prompt(None, {}).startswith("test/Line-v0: left, right! {} Answer with one JSON object")
    plain = make_task("gym:test/Line-v0", actions=["left", "right"], thoughts=False)
    assert plain.format.fields == ()
    assert "thoughts" not in plain.prompt(None, {})


@pytest.mark.parametrize(
    ("name", "names"),
    [("test/Enumerated-v0", ["back", "ahead"]), ("test/Meaningful-v0", ["noop", "fire"])],
)
def test_names_of_the_environment(name: str, names: list[str]) -> None:
    assert make_task(f"gym:{name}").legal_actions({}) == names


def test_a_game_of_this_package_needs_no_options() -> None:
    task = make_task("gym:gym_cards/NumberLine-v0")
    assert task.legal_actions({}) == ["-", "+"]
    env = task.make_env()
    picture, info = env.reset(seed=0)
    assert picture.shape == (300, 300, 3)
    assert "observation" not in info  # it is the picture itself


def where_to(observation: np.ndarray, info: Mapping[str, Any]) -> str:
    return f"walk right from {info['observation']} on {observation.shape[1]} pixels."


@pytest.mark.parametrize("goal", [where_to, f"{__name__}:where_to"])
def test_the_goal_may_depend_on_the_state(goal: Any) -> None:
    task = make_task("gym:test/Line-v0", actions=["left", "right"], goal=goal)
    picture, info = task.make_env().reset(seed=0)
    assert f"Goal: walk right from {info['observation']} on 32 pixels.\n" in task.prompt(picture, info)
    assert make_task(task.name, **task.options).prompt(picture, info) == task.prompt(picture, info)


def test_the_goal_without_a_mission() -> None:
    task = make_task("gym:test/Line-v0", actions=["left", "right"])
    for observation in (2, {"mission": 3}, {"image": 0}):
        assert "Goal: collect as much reward as you can.\n" in task.prompt(None, {"observation": observation})
    mission = {"observation": {"mission": "open the door"}}
    assert "Goal: open the door.\n" in task.prompt(None, mission)
    told = make_task("gym:test/Line-v0", actions=["left", "right"], goal="Do this: walk.")
    assert "Goal: Do this: walk.\n" in told.prompt(None, mission)


def test_some_actions_can_be_left_out() -> None:
    task = frozen_lake(actions={"south": 1, "east": 2})
    assert task.legal_actions({}) == ["south", "east"]
    assert task.to_env_action(task.format.respond(dict.fromkeys(("observation", "thoughts"), ""), "east"), {}) == 2


def test_actions_that_dont_start_at_zero() -> None:
    task = make_task("gym:test/FromFive-v0", actions=["left", "right"], thoughts=False)
    assert task.to_env_action(task.format.respond({}, "right"), {}) == 6


def test_text_actions() -> None:
    task = make_task("gym:test/Spoken-v0", actions=spoken, thoughts=False)
    assert task.legal_actions({"observation": 0}) == ["right"]
    assert task.to_env_action(task.format.respond({}, "LEFT"), {"observation": 1}) == "left"
    assert task.to_env_action(task.format.respond({}, "left"), {"observation": 0}) is None
    fixed = make_task("gym:test/Spoken-v0", actions=["left", "right"])
    assert fixed.legal_actions({}) == ["left", "right"]


def test_wrapped_actions() -> None:
    task = make_task("gym:test/Continuous-v0", wrap=make_discrete, actions=["a", "b", "c", "d"])
    assert task.make_env().action_space == gym.spaces.Discrete(4)


def test_a_task_can_be_pickled() -> None:
    task = pickle.loads(pickle.dumps(make_task("gym:test/Line-v0", actions=["left", "right"], expert=path_expert)))
    assert task.expert({"observation": 8}).action == "right"


def test_it_plays_in_processes() -> None:
    task = frozen_lake(processes=True)
    assert task.vectorization == "processes"
    envs = WorkerVectorEnv(PlayingRules(task).make_env, 1)
    try:
        pictures, infos = envs.reset(seed=[3])
        assert pictures.shape == (1, 256, 256, 3)
        envs.step([1])
        (state,) = envs.get_states()
        _, infos = envs.set_states([state])
        assert infos["observation"][0] == 4
    finally:
        envs.close()


def test_options_are_described() -> None:
    name = "gym:FrozenLake-v1"
    assert set(task_options(name)) == set(task_options_help(name)) - {"env_id"}


@pytest.mark.parametrize(
    ("space", "picture"),
    [
        (gym.spaces.Box(0, 255, (64, 64, 3), np.uint8), True),
        (gym.spaces.Box(0, 255, (7, 7, 3), np.uint8), False),
        (gym.spaces.Box(0, 255, (64, 64, 4), np.uint8), False),
        (gym.spaces.Box(0, 1, (64, 64, 3)), False),
        (gym.spaces.Discrete(4), False),
    ],
)
def test_what_counts_as_a_picture(space: gym.Space, picture: bool) -> None:
    assert is_picture(space) == picture


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("test/NoPictures-v0", {"actions": ["a", "b"]}, r"renders 'human', not 'rgb_array'.* `wrap=`"),
        ("test/GreyPictures-v0", {"actions": ["a", "b"]}, r"shape \(height, width, 3\), not uint8 \(32, 32\)"),
        ("test/Continuous-v0", {"actions": ["a", "b"]}, r"must be discrete or texts.*DiscretizeAction"),
        ("test/Lamps-v0", {"actions": ["a", "b"]}, r"MultiBinary\(2\).*returns a `gymnasium.ActionWrapper`"),
        ("test/Parts-v0", {"actions": ["a", "b"]}, r"Dict\('leg'.*returns a `gymnasium.ActionWrapper`"),
        ("test/Growing-v0", {"actions": ["a", "b"]}, r"same size, not .*resizes what `render\(\)` draws"),
        ("test/NoMode-v0", {"actions": ["a", "b"]}, r"`__init__` the parameter `render_mode`"),
        ("test/Line-v0", {"actions": ["a", "b"], "history_images": 1}, r"Set history_turns to at least 1"),
        ("test/Line-v0", {"actions": ["a", "b", "c"]}, r"has 2 actions, but `actions` names 3: a, b, c"),
        ("test/Line-v0", {"actions": ["a"]}, r"map names to indices"),
        ("test/Line-v0", {"actions": ["a", "a"]}, r"same name"),
        ("test/Line-v0", {"actions": ["a", "A"]}, r"differ by more than case"),
        ("test/Line-v0", {"actions": {"a": 2}}, r"indices from 0 to 1"),
        ("test/Line-v0", {"actions": {}}, r"indices from 0 to 1"),
        ("test/Line-v0", {"actions": spoken}, r"with a list, not with a function"),
        ("test/Line-v0", {}, r"no names for its 2 actions: pass `actions=` with 2 names"),
        ("test/Spoken-v0", {}, r"pass `actions=` with the allowed texts"),
        (
            "test/Line-v0",
            {"actions": ["a", "b"], "judge": "nowhere:judge"},
            r"`judge`.*'nowhere:judge' can't be found",
        ),
        ("test/Line-v0", {"actions": ["a", "b"], "expert": 3}, r"`expert` must be a function"),
        ("test/Line-v0", {"actions": ["a", "b"], "prompt": "{goals} {instructions}"}, r"may use \{game\}"),
        ("test/Line-v0", {"actions": ["a", "b"], "prompt": "Play!"}, r"must contain \{instructions\}"),
        ("test/Lime-v0", {"actions": ["a", "b"]}, r"gym:MODULE:test/Lime-v0"),
        ("no_such_module:Line-v0", {"actions": ["a", "b"]}, r"gymnasium can't make .*install the package"),
        ("test/Line-v0", {"names": ["a", "b"]}, r"has no option names"),
    ],
)
def test_refusals_name_the_remedy(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_task(f"gym:{name}", **options)


@pytest.mark.parametrize("answer", ["down", ({}, 3), ({"observation": "", "thoughts": ""}, "jump")])
def test_an_expert_must_think_and_act(answer: Any) -> None:
    task = make_task("gym:test/Line-v0", actions=["left", "right"], expert=lambda info: answer)
    with pytest.raises(ValueError, match=r"pair \(thought, action\)"):
        task.expert({})


def test_a_seed_without_effect_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="doesn't determine how an episode starts"):
        make_task("gym:test/Unseeded-v0", actions=["left", "right"])


@pytest.mark.parametrize("make", [GymTask, lambda name, **options: make_task(f"gym:{name}", **options)])
def test_the_warning_points_at_the_callers_line(make: Any) -> None:
    with pytest.warns(UserWarning, match="doesn't determine") as warned:
        make("test/Unseeded-v0", actions=["left", "right"])
    assert warned[0].filename == __file__


def test_pictures_that_are_resized_are_accepted() -> None:
    task = make_task("gym:test/Growing-v0", actions=["left", "right"], wrap=OneSize)
    assert {task.make_env().reset(seed=seed)[0].shape for seed in range(5)} == {(32, 32, 3)}


@pytest.mark.parametrize("make", [GymTask, lambda name, **options: make_task(f"gym:{name}", **options)])
def test_memory(make: Any) -> None:
    task = make("test/Line-v0", actions=["left", "right"], history_turns=3, history_images=1)
    assert (task.history_turns, task.history_images) == (3, 1)
    again = make_task(task.name, **task.options)
    assert (again.history_turns, again.history_images) == (3, 1)


def test_group_methods_refuse_a_seed_without_effect() -> None:
    with pytest.warns(UserWarning, match="doesn't determine"):
        task = make_task("gym:test/Unseeded-v0", actions=["left", "right"])
    with pytest.raises(ValueError, match=r"start differently although they are reset with the same seed"):
        GroupCollector(task, num_envs=4, group_size=2, seed=0)


def test_rendering_needs_the_right_mode() -> None:
    with pytest.raises(ValueError, match='render_mode="rgb_array"'):
        RenderedObservation(GreyPictures())
