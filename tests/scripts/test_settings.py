"""Words of a command line before they are parsed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import ROOT

from trl_gtr import tiny_llava
from trl_gtr.guides.arguments import make_guide
from trl_gtr.scripts import settings
from trl_gtr.scripts.train import make_tasks, parse
from trl_gtr.tasks import TASKS

CPU = ["--use_cpu", "--bf16", "false", "--output_dir", "x"]


def options_in(words: list[str]) -> Any:
    value = settings.value_of(words, "task_options")
    return None if value is None else json.loads(value)


def test_options_and_their_values() -> None:
    given = list(settings.given_options(["stray", "--a-b", "1", "2", "--c=-3", "--flag"]))
    assert [(each.name, each.values) for each in given] == [
        ("", ["stray"]), ("a_b", ["1", "2"]), ("c", ["-3"]), ("flag", [])
    ]  # fmt: skip
    assert [word for each in given for word in each.words] == ["stray", "--a-b", "1", "2", "--c=-3", "--flag"]


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--hands", "pool"], {"hands": "pool"}),
        (["--cut=false"], {"cut": False}),
        (["--cut"], {"cut": True}),
        (["--hands", "null"], {"hands": None}),
        (["--env_kwargs", '{"solvable_only": true}'], {"env_kwargs": {"solvable_only": True}}),
        (["--task_options", '{"hands": "unseen", "cut": false}', "--hands", "pool"], {"hands": "pool", "cut": False}),
        (["--seed", "3"], None),
    ],
)
def test_a_tasks_options_go_by_their_names(words: list[str], options: Any) -> None:
    assert options_in(settings.with_task_options(words, "points24", {"seed"})) == options


def test_a_settings_name_is_not_the_tasks() -> None:
    """A task whose option is called as a setting gets it by `task_options` only."""
    assert settings.with_task_options(["--cut", "false"], "points24", {"cut"}) == ["--cut", "false"]


def test_the_command_lines_options_go_over_the_files(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("task: points24\ntask_options: {hands: pool, cut: false}\n")
    words = ["--config", str(file), "--hands", "unseen"]
    assert options_in(settings.with_task_options(words, "points24", ())) == {"hands": "unseen", "cut": False}
    script, *_ = parse(None, [*words, *CPU])
    task = script.make_task()
    assert (len(task.hands), task.cut) == (120, False)


@pytest.mark.parametrize(
    ("words", "env_kwargs"),
    [
        ([], {"max_steps": 24}),
        (["--level", "BabyAI-GoToObj-v0"], {"max_steps": 24}),
        (["--level", "MiniGrid-FourRooms-v0"], {}),
        (["--task_options", '{"level": "MiniGrid-FourRooms-v0"}'], {}),
        (["--level", "MiniGrid-FourRooms-v0", "--env_kwargs", '{"max_steps": 70}'], {"max_steps": 70}),
    ],
)
def test_a_shipped_step_limit_is_for_the_default_level(words: list[str], env_kwargs: dict[str, int]) -> None:
    script, *_ = parse(None, settings.with_defaults([*words, "--view", "full"], "minigrid"))
    assert script.make_task().env_kwargs == env_kwargs


def test_a_users_own_step_limit_is_for_every_level(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("task: minigrid\ntask_options: {env_kwargs: {max_steps: 70}}\n")
    script, *_ = parse(None, ["--config", str(file), "--level", "MiniGrid-FourRooms-v0", *CPU])
    assert script.make_task().env_kwargs == {"max_steps": 70}


def test_a_list_of_words_is_a_list() -> None:
    words = settings.with_task_options(["--hide", "look", "help"], "alfworld", ())
    assert options_in(words) == {"hide": ["look", "help"]}


WITHOUT_A_TINY_MODEL = {task for task in TASKS if tiny_llava.for_task(task) is None}


@pytest.mark.parametrize("task", sorted(WITHOUT_A_TINY_MODEL))
def test_a_task_without_an_embedded_model_has_no_settings(task: str) -> None:
    assert settings.default_config(task) is None


@pytest.mark.parametrize("task", [task for task in TASKS if task not in WITHOUT_A_TINY_MODEL])
def test_every_task_has_settings_of_its_own(task: str) -> None:
    words = settings.with_defaults(["--seed", "1"], task)
    script, args, model_args, *_ = parse(None, words)
    assert (script.task, model_args.model_name_or_path) == (task, tiny_llava.for_task(task))
    assert args.output_dir.replace("{task}", task) == f"runs/{task}"
    assert settings.with_defaults(["--task", task], "points24") == [
        "--config",
        str(settings.default_config(task)),
        "--task",
        task,
    ]


def test_evaluations_are_variants_of_the_task() -> None:
    task, evaluations = make_tasks(parse(None, settings.with_defaults([], "points24"))[0])
    assert {name: len(each.hands) for name, each in evaluations.items()} == {"pool": 64, "unseen": 120}
    argv = ["--hands", "all", "--eval_tasks", '{"all": {}, "hopeless": {"hands": [["A", "A", "A", "A"]]}}']
    task, evaluations = make_tasks(parse(None, settings.with_defaults(argv, "points24"))[0])
    assert task.hands is None
    assert {name: each.hands for name, each in evaluations.items()} == {"all": None, "hopeless": [["A"] * 4]}


OWN_TASK = """
from trl_gtr.tasks.blackjack import BlackjackTask

class Mine(BlackjackTask):
    name = "mine"

    def __init__(self, level, cut=True):
        super().__init__(cut=cut)
        self.level = level

def easy():
    return Mine(1)

NOT_A_TASK = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_own_tasks.py").write_text(OWN_TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_own_tasks", raising=False)
    return "my_own_tasks"


def test_a_task_of_ones_own_from_the_current_folder(own_module: str) -> None:
    argv = ["--task", f"{own_module}:Mine", "--level", "3", "--model_name_or_path", "tiny", *CPU]
    script, *_ = parse(None, argv)
    task, evaluations = make_tasks(script)
    assert (task.name, task.level, evaluations) == ("mine", 3, {"mine": task})
    script, *_ = parse(None, ["--task", f"{own_module}:easy", *CPU])
    assert script.make_task().level == 1


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Mine", {}, "needs the option level"),
        ("Mine", {"level": 1, "lvl": 2}, "has no option lvl. Its options: level, cut"),
        ("easy", {"level": 1}, "has no option level. Its options: history_turns, history_images"),
        ("Min", {}, "did you mean my_own_tasks:Mine"),
        ("NOT_A_TASK", {}, "must be a class or a function that returns a task"),
    ],
)
def test_what_is_wrong_with_a_task_of_ones_own(own_module: str, name: str, options: Any, message: str) -> None:
    from trl_gtr import make_task

    settings.find_own_modules()
    with pytest.raises(ValueError, match=message):
        make_task(f"{own_module}:{name}", **options)


@pytest.mark.parametrize("study", sorted((ROOT / "examples" / "configs" / "studies").glob("*.yaml")))
def test_every_arm_of_every_study_is_a_run(study: Path, tmp_path: Path) -> None:
    content = yaml.safe_load(study.read_text())
    for arm in content["arms"].values():
        words = [*CPU]
        for name, value in {**content["options"], **arm, "output_dir": str(tmp_path)}.items():
            words += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
        _, args, _, corrector_args, guide_args = parse(None, settings.with_defaults(words, "points24"))
        assert make_guide(guide_args, corrector_args, args)
