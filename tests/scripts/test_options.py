"""The table of options that is read from the sources, against the classes themselves."""

from __future__ import annotations

import ast
from dataclasses import fields
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser

from trl_gtr.config import refused_fields
from trl_gtr.scripts import launch, options
from trl_gtr.scripts.arguments import Parser
from trl_gtr.scripts.train import ARGUMENTS
from trl_gtr.tasks import TASKS, task_options, task_options_help


def declared() -> dict[str, Any]:
    return {each.name: each for arguments in ARGUMENTS for each in fields(arguments) if each.init}


def test_every_option_is_read() -> None:
    assert set(options.train_options()) == set(declared())
    assert set(options.train_options()) | {"help"} == Parser(ARGUMENTS).names


def test_defaults_and_help_are_those_of_the_classes() -> None:
    read = {name: each for name, each in options.train_options().items() if isinstance(each.default, int | float)}
    assert len(read) > 100
    for name, each in read.items():
        assert declared()[name].default == each.default, name
    for name, each in options.train_options().items():
        assert each.help == declared()[name].metadata.get("help", ""), name


def test_our_options_have_a_group_and_a_help() -> None:
    from trl_gtr.scripts.launch import help_options

    listed = help_options("points24", full=False)
    assert len({each.name for each in listed}) == len(listed)
    assert all(each.help for each in listed if not each.group.startswith("options of"))
    own = {name for arguments in ARGUMENTS if arguments.__module__.startswith("trl_gtr") for name in vars(arguments)}
    own &= set(declared()) - set(refused_fields())
    assert own <= {each.name for each in listed}


def test_all_options_but_the_refused_ones_are_on_the_second_level() -> None:
    from trl_gtr.scripts.launch import help_options

    listed = {each.name for each in help_options("points24", full=True) if not each.group.startswith("options of")}
    assert listed == set(declared()) - set(refused_fields())
    assert {name for name, each in options.train_options().items() if each.refused} == set(refused_fields())


def test_options_of_the_launcher() -> None:
    theirs = {}
    for action in launch_command_parser()._actions:
        for name in action.option_strings:
            if name.startswith("--") and "-" not in name[2:]:
                theirs[name[2:]] = action.nargs != 0
    for name in ("help", "module", "no_python"):
        theirs.pop(name, None)
    assert options.launcher_options() == theirs | {"accelerate_config": True}


def test_a_moved_class_is_imported_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_MODEL", ("trl", "nowhere.py", "ModelConfig"))
    options.train_options.cache_clear()
    try:
        assert set(launch._options()) == set(declared())
        assert launch._options()["num_envs"].default == declared()["num_envs"].default
    finally:
        options.train_options.cache_clear()


@pytest.mark.parametrize(
    ("source", "default", "help_text"),
    [
        ('field(default=3, metadata={"help": "three"})', 3, "three"),
        ('_field(0.5, "half", at_least=0)', 0.5, "half"),
        ('field(default_factory=lambda: [1, 2], metadata={"help": "two"})', [1, 2], "two"),
        ("field(default_factory=list)", None, ""),
        ('_option(None, help="none")', None, "none"),
        ("7", 7, ""),
        ('field(default=SOME.name, metadata={"help": "a name"})', "SOME.name", "a name"),
    ],
)
def test_how_fields_are_written(source: str, default: Any, help_text: str) -> None:
    assert options._default_and_help(ast.parse(source, mode="eval").body) == (default, help_text)


@pytest.mark.parametrize("task", TASKS)
def test_every_option_of_a_task_has_help(task: str) -> None:
    assert set(task_options(task)) == set(task_options_help(task))
