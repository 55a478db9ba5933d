"""Tasks: the words around an environment. `make_task` makes one by its name, or by `module:Class`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from .base import Rubric, Task, Tool

# name → module and function in it; imported on first use, so that one task's needs burden no other
TASKS = {
    "points24": ("points.task", "points24"),
    "ezpoints": ("points.task", "ezpoints"),
    "number_line": ("number_line", "NumberLineTask"),
    "blackjack": ("blackjack", "BlackjackTask"),
    "alfworld": ("alfworld.task", "ALFWorldTask"),
}


def make_task(name: str, **options: Any) -> Task:
    """A task by its name, or by `package.module:Class`, the class or function in your own code that makes it.

    The options are the parameters of what makes the task; `task_options` lists them. Those of our own tasks:

    - `env_kwargs`: passed to the environment, e.g. `{"solvable_only": True}`;
    - `thoughts=False`: the action-only variant, with no thought keys in prompt and format;
    - `cut=False`: hopeless episodes go on to their end;
    - `hands` (points games): a fixed set of hands to deal from, e.g. `[["4", "9", "A", "K"]]`; for Points24 also a
      set's name: `"pool"` (the hands that the embedded model knows), `"unseen"` (those that it has never seen) or
      `"solvable"` (all 566 that make 24);
    - `split`, `evaluation_split`, `history`, `hide`, `observation_text`, `max_actions`, `illegal_reward`,
      `task_type_weights`, `max_command_characters` (ALFWorld): see `ALFWorldTask`.
    """
    factory = _factory(name)
    known = task_options(name)
    unknown = sorted(set(options) - set(known))
    if unknown and not _takes_any(factory):
        its_options = f"Its options: {', '.join(known)}." if known else "It takes no options."
        raise ValueError(f"Task {name!r} has no option {', '.join(unknown)}. {its_options}")
    missing = [key for key, each in known.items() if each.default is each.empty and key not in options]
    if missing:
        raise ValueError(f"Task {name!r} needs the option {', '.join(missing)}.")
    return factory(**options)


def task_options(name: str) -> dict[str, inspect.Parameter]:
    """The options that a task declares: the parameters of the class or function that makes it."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {key: each for key, each in _parameters(_factory(name)).items() if each.kind in named}


def task_options_help(name: str) -> dict[str, str]:
    """What the docstring of the class or function that makes a task says about its options, below `Args:`."""
    text = inspect.getdoc(_factory(name)) or ""
    args = text.partition("Args:\n")[2].split("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", args, re.MULTILINE)
    return {key: " ".join(described.split()) for key, described in found}


def _factory(name: str) -> Callable[..., Task]:
    module, colon, attribute = name.partition(":")
    if colon:
        return _own_factory(module, attribute)
    if name not in TASKS:
        near = difflib.get_close_matches(name.lower(), TASKS, n=1, cutoff=0.5)
        raise ValueError(
            f"There is no task {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else ".")
            + f" Tasks: {', '.join(TASKS)}, or `module:Class` for your own."
        )
    module, attribute = TASKS[name]
    return getattr(importlib.import_module(f".{module}", __name__), attribute)


def _own_factory(module: str, attribute: str) -> Callable[..., Task]:
    """What `module:attribute` names; a `ValueError` says which of the two is missing."""
    if module.endswith(".py") or "/" in module:
        dotted = module.removesuffix(".py").strip("./").replace("/", ".")
        raise ValueError(f"Name the module of a task, not its file: {dotted}:{attribute or 'Class'}.")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, but something that it imports isn't
        raise ValueError(
            f"There is no module {module!r}: run from the folder that holds it, or put that folder on PYTHONPATH."
        ) from error
    members: Mapping[str, Any] = vars(imported)
    if attribute not in members:
        near = difflib.get_close_matches(attribute, members, n=1)
        hint = f"; did you mean {module}:{near[0]}?" if near else f". Write {module}:NAME_OF_THE_CLASS."
        raise ValueError(f"The module {module!r} has no {attribute!r}{hint}")
    if not callable(members[attribute]):
        raise ValueError(f"{module}:{attribute} must be a class or a function that makes a task.")
    return members[attribute]


def _parameters(factory: Callable[..., Task]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(factory).parameters


def _takes_any(factory: Callable[..., Task]) -> bool:
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in _parameters(factory).values())


__all__ = ["TASKS", "Rubric", "Task", "Tool", "make_task", "task_options", "task_options_help"]
