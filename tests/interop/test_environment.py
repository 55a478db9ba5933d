from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from toy import ColourTask
from transformers.utils import get_json_schema

from trl_gtr import make_task
from trl_gtr.interop import TaskEnvironment, environment_factory, episodes, success
from trl_gtr.interop.chat import EPISODE_OVER
from trl_gtr.rollouts.playing import INVALID_ACTION_PENALTY


def blocks(content: list[dict[str, Any]]) -> tuple[np.ndarray, str]:
    picture, text = content
    assert (picture["type"], text["type"]) == ("image", "text")
    return np.asarray(picture["image"]), text["text"]


def play(environment: TaskEnvironment, episode: int, steps: int = 20) -> list[dict[str, Any]]:
    """The expert plays; returns the last result."""
    task, content = environment._rules.task, environment.reset(episode=episode, prompt=[])
    for _ in range(steps):
        content = environment.act(task.expert(environment._begun().info).text)
        if environment._begun().ended:
            break
    return content


def test_an_episode_from_start_to_end() -> None:
    task = make_task("number_line")
    environment = environment_factory(task)()
    picture, prompt = blocks(environment.reset(episode=3))
    assert picture.shape == (300, 300, 3)
    assert prompt == task.prompt(picture, {})
    assert environment.get_reward() == 0
    assert success([environment]) == [0]
    assert play(environment, 3) == [{"type": "text", "text": EPISODE_OVER}]
    won = environment.get_reward()
    assert won == 1
    assert success([environment]) == [1]
    assert environment.act("anything") == [{"type": "text", "text": EPISODE_OVER}]  # what follows changes nothing
    assert environment.get_reward() == won


def test_the_rollouts_of_a_group_start_in_the_same_state() -> None:
    factory = environment_factory(make_task("points24"))
    pictures = [blocks(factory().reset(episode=episode))[0] for episode in (0, 0, 1)]
    assert np.array_equal(pictures[0], pictures[1])
    assert not np.array_equal(pictures[0], pictures[2])
    other = environment_factory(make_task("points24"), seed=1)()
    assert not np.array_equal(pictures[0], blocks(other.reset(episode=0))[0])


def test_starts_that_a_task_names_are_all_played() -> None:
    environment = environment_factory(make_task("points24", hands="pool"))()
    hands = []
    for row in episodes(64):
        environment.reset(**row)
        hands.append(tuple(environment._begun().info["Cards"]))
    assert len(set(hands)) == 64


def test_data_without_episodes_is_refused() -> None:
    environment = environment_factory(make_task("number_line"))()
    with pytest.raises(ValueError, match=r"train_dataset=trl_gtr.interop.episodes"):
        environment.reset(prompt=[{"role": "user", "content": ""}])


def test_the_rules_are_those_of_training() -> None:
    penalised = environment_factory(make_task("number_line"), invalid_action="penalty")()
    before, _ = blocks(penalised.reset(episode=0))
    after, _ = blocks(penalised.act("no JSON"))
    assert np.array_equal(before, after)
    assert penalised.get_reward() == INVALID_ACTION_PENALTY
    random = environment_factory(make_task("number_line"))()
    random.reset(episode=0)
    random.act("no JSON")
    assert random._begun().transitions[0].substitute in ("+", "-")
    endless = environment_factory(ColourTask(length=10**6))()  # has no limit of its own
    endless.reset(episode=0)
    while not endless._begun().ended:
        endless.act("no JSON")
    assert len(endless._begun().transitions) == 300


def test_an_environment_that_fails_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = environment_factory(make_task("number_line"))()
    environment.reset(episode=0)

    def broken(action: Any) -> Any:
        raise OSError("the simulator is gone")

    monkeypatch.setattr(environment._env, "step", broken)
    with pytest.raises(OSError, match="gone"):
        environment.act("+")  # TRL turns this into a message to the model
    with pytest.raises(RuntimeError, match="step of episode 0 failed: the simulator is gone"):
        environment.get_reward()
    monkeypatch.undo()
    environment.reset(episode=1)
    assert environment.get_reward() == 0


def test_the_model_is_offered_one_tool() -> None:
    environment = environment_factory(make_task("number_line"))()
    methods = dict(inspect.getmembers(environment, predicate=inspect.ismethod))
    assert {name for name in methods if not name.startswith("_")} == {"reset", "get_reward", "act"}
    schema = get_json_schema(environment.act)["function"]
    assert schema["name"] == "act"
    assert schema["parameters"]["properties"]["response"]["type"] == "string"


def test_rows_are_numbered() -> None:
    rows = episodes(3, first=64)
    assert rows["episode"] == [64, 65, 66]
    with pytest.raises(TypeError, match="make_task"):
        environment_factory("number_line")  # type: ignore[arg-type]
