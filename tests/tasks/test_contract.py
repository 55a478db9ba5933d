"""What a task must define, what it may leave out, and that a misspelling is found where the object is made."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import cloudpickle
import pytest
from toy import BareColourTask, ColourTask

from trl_gtr.correctors.base import Corrector
from trl_gtr.engines.base import Engine
from trl_gtr.evaluation.agents import RandomAgent
from trl_gtr.evaluation.evaluate import evaluate_agent
from trl_gtr.guides.base import Guide
from trl_gtr.learning.advantages import AdvantageEstimator
from trl_gtr.responses.format import Field, ThoughtFormat
from trl_gtr.tasks import TASKS, Rubric, Task, make_task
from trl_gtr.tasks.base import general_rubric, is_true_thought

NEEDED = ("name", "format", "make_env", "prompt", "legal_actions", "to_env_action", "success")


def without(name: str) -> type[Task]:
    """A task that lacks one of the needed members."""
    members = {needed: getattr(BareColourTask, needed) for needed in NEEDED if needed != name}
    return type("Lacking", (Task,), members)


def test_defaults_claim_nothing() -> None:
    task, info = BareColourTask(), {"colour": "red"}
    response = task.format.respond({"thoughts": "it is red"}, "red")
    assert task.judge(response, info) == {}
    assert is_true_thought(task.judge(response, info)) is None
    assert task.expert(info) is task.target(response, info) is task.difficulty(info) is task.starts() is None
    assert task.believed_info({}, {}) is None
    assert task.solvable(info) is True
    assert task.public_state(info) == task.metrics([]) == task.describe_start(info) == task.worker_options == {}
    assert tuple(task.tools) == tuple(task.reading_parts) == ()
    assert (task.reward_scale, task.illegal_reward, task.vectorization) == (1.0, 0.0, "sync")


def test_truth_of_a_thought() -> None:
    assert is_true_thought({"cards": True, "aim": True}) is True
    assert is_true_thought({"cards": True, "aim": False}) is False
    assert is_true_thought({}) is None


@pytest.mark.parametrize("name", NEEDED)
def test_what_is_needed(name: str) -> None:
    with pytest.raises(TypeError, match=rf"Lacking must define `{name}`: trl_gtr\.Task has no default for it"):
        without(name)()


def test_name_and_format_may_be_assigned() -> None:
    class Named(without("name")):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            self.name = name

    assert Named("mine").name == "mine"


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("judges", lambda self, response, info: {}, "judge"),
        ("jugde", lambda self, response, info: {}, "judge"),
        ("legal_action", lambda self, info: ["a"], "legal_actions"),
        ("legalActions", lambda self, info: ["a"], "legal_actions"),
        ("solveable", lambda self, info: True, "solvable"),
        ("to_env_acton", staticmethod(lambda response, info: 0), "to_env_action"),
        ("reward_scal", 0.1, "reward_scale"),
        ("vectorisation", "processes", "vectorization"),
        ("rubrik", Rubric(role="", questions={}), "rubric"),
        ("rubrics", lambda self: Rubric(role="", questions={}), "rubric"),
        ("reading_part", ("colour",), "reading_parts"),
    ],
)
def test_misspelt_members(name: str, value: Any, meant: str) -> None:
    misspelt = type("Misspelt", (BareColourTask,), {name: value})
    with pytest.raises(TypeError, match=rf"Misspelt\.{name} is not a member of Task; did you mean `{meant}`\?"):
        misspelt()


@pytest.mark.parametrize(
    ("contract", "name", "meant"),
    [
        (Corrector, "exausted", "exhausted"),
        (Guide, "label", "labels"),
        (Engine, "synch", "sync"),
        (AdvantageEstimator, "normalise", "normalize"),
    ],
)
def test_misspelt_members_of_other_contracts(contract: type, name: str, meant: str) -> None:
    misspelt = type("Misspelt", (contract,), {name: lambda self: None})
    with pytest.raises(TypeError, match=rf"Misspelt\.{name} is not a member of .*; did you mean `{meant}`\?"):
        misspelt()


def test_misspelt_and_therefore_missing() -> None:
    """The likely cause is said, not only the consequence."""
    misspelt = type("Misspelt", (without("legal_actions"),), {"legal_action": lambda self, info: []})
    with pytest.raises(TypeError, match="did you mean `legal_actions`"):
        misspelt()


def test_misspelt_in_the_constructor() -> None:
    class Misspelt(BareColourTask):
        def __init__(self) -> None:
            self.illegal_rewards = -1.0

    with pytest.raises(TypeError, match=r"Misspelt\.illegal_rewards .* did you mean `illegal_reward`"):
        Misspelt()


def test_a_tasks_own_names_are_its_own() -> None:
    class Helped(ColourTask):
        """Names that come close: beside the member they help, of another kind, private, or longer."""

        start = 3  # data, and `starts` is a method
        judged = ()
        _toolz = ()

        def __init__(self) -> None:
            super().__init__()
            self.names = ["red"]  # beside `name`
            self.rules = self.env_id = self.cut = None

        def prompt(self, observation: Any, info: Any) -> str:
            return self.prompts()[0]

        def prompts(self) -> list[str]:
            return ["Which colour?"]

        def success_rate(self) -> float:
            return 1.0

    assert Helped().prompt(None, {}) == "Which colour?"


@pytest.mark.parametrize("name", TASKS)
def test_shipped_tasks_define_what_they_offer(name: str) -> None:
    task = make_task(name)
    assert isinstance(task, Task)
    for member in ("judge", "expert", "public_state", "difficulty"):
        assert task.defines(member), member
    assert task.rubric != general_rubric(task.name, task.format)


def test_defines() -> None:
    assert ColourTask().defines("judge")
    assert not BareColourTask().defines("judge")
    task = BareColourTask()
    task.illegal_reward = -1.0
    assert task.defines("illegal_reward")


def test_general_rubric_names_task_and_parts() -> None:
    task = BareColourTask()
    assert "agent that plays colours" in task.rubric.role
    assert '"thoughts"' in task.rubric.questions["thought"]
    task.format = ThoughtFormat([Field("seen"), Field("plan")])
    assert '("seen", "plan")' in task.rubric.questions["thought"]
    task.format = ThoughtFormat(())
    assert "response" in task.rubric.questions["thought"]
    task.rubric = Rubric(role="mine", questions={})
    assert task.rubric.role == "mine"


def test_constructors_show_their_arguments() -> None:
    assert list(inspect.signature(make_task("alfworld").__class__).parameters)[:3] == [
        "env_kwargs",
        "split",
        "evaluation_split",
    ]
    assert not inspect.signature(type("Plain", (Task,), {})).parameters


def test_tasks_can_be_pickled() -> None:
    """By reference, and by value as a script's own classes go to worker processes."""

    class Local(BareColourTask):
        pass

    for copy in (pickle.loads(pickle.dumps(ColourTask(length=3))), cloudpickle.loads(cloudpickle.dumps(Local()))):
        assert copy.legal_actions({}) == ColourTask().legal_actions({})


def test_only_a_task_is_a_task() -> None:
    class Alike:
        name = "alike"

    with pytest.raises(TypeError, match=r"Alike is not a Task: subclass trl_gtr\.Task"):
        evaluate_agent(RandomAgent(), Alike(), 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ColourTask is a class: pass an instance, ColourTask\(\.\.\.\)"):
        evaluate_agent(RandomAgent(), ColourTask, 1)  # type: ignore[arg-type]
    assert Task.ensure(task := ColourTask()) is task


def test_evaluation_says_nothing_of_thoughts_that_nobody_judges() -> None:
    unknown = evaluate_agent(RandomAgent(), BareColourTask(), 2)
    assert "true_thoughts" not in unknown.metrics()
    assert {episode.judged_steps for episode in unknown.episodes} == {0}
    assert evaluate_agent(RandomAgent(), ColourTask(), 2).metrics()["true_thoughts"] == 0.0
