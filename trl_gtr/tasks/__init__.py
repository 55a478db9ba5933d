"""Tasks: everything textual around an environment. `make_task` creates one by name, `gym:ID` or `module:Class`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .base import Rubric, Task, Tool
from .memory import check_history

# name → module and factory; imported on first use, so that no task pays for another's dependencies
TASKS = {
    "points24": ("points.task", "points24"),
    "ezpoints": ("points.task", "ezpoints"),
    "number_line": ("number_line", "NumberLineTask"),
    "blackjack": ("blackjack", "BlackjackTask"),
    "alfworld": ("alfworld.task", "ALFWorldTask"),
    "sokoban": ("grids.sokoban", "SokobanTask"),
    "frozen_lake": ("grids.frozen_lake", "FrozenLakeTask"),
    "taxi": ("grids.taxi", "TaxiTask"),
    "cliff_walking": ("grids.cliff_walking", "CliffWalkingTask"),
    "minigrid": ("grids.minigrid", "MiniGridTask"),
}
# options of every task
HISTORY = {
    "history_turns": "Earlier steps of the episode that the agent sees again, as turns of the chat.",
    "history_images": "How many of these, the latest, are shown with their picture.",
}


def make_task(name: str, **options: Any) -> Task:
    """Create a task by name, by `package.module:Class` (a class or factory function in your own code), or by `gym:ID`
    for any gymnasium environment (`GymTask`).

    The options are the parameters of that class or function; `task_options` lists them. Options of the built-in tasks:

    - `env_kwargs`: passed to the environment, e.g. `{"solvable_only": True}`;
    - `thoughts=False`: the action-only variant, without thought keys in prompt and format;
    - `cut=False`: play hopeless episodes to the end;
    - `hands` (points games): a fixed set of hands to deal from, e.g. `[["4", "9", "A", "K"]]`; for Points24 also the
      name of a set: `"pool"` (hands the embedded model knows), `"unseen"` (hands it has never seen) or `"solvable"`
      (all 566 that make 24);
    - `history_turns`, `history_images` (every task): how many earlier steps the agent sees again as turns of the chat,
      and how many of these with their picture;
    - `split`, `evaluation_split`, `history`, `hide`, `observation_text`, `max_actions`, `illegal_reward`,
      `task_type_weights`, `max_command_characters` (ALFWorld): see `ALFWorldTask`.
    """
    factory = _factory(name)
    known = task_options(name)
    unknown = sorted(set(options) - set(known))
    if unknown and not _takes_any(factory):
        raise ValueError(f"Task {name!r} has no option {', '.join(unknown)}. Its options: {', '.join(known)}.")
    missing = [key for key, each in known.items() if each.default is each.empty and key not in options]
    if missing:
        raise ValueError(f"Task {name!r} needs the option {', '.join(missing)}.")
    history = {key: options.pop(key) for key in HISTORY if key in options and key not in _parameters(factory)}
    task = factory(**options)
    changed = {key: value for key, value in history.items() if value != getattr(task, key)}
    if changed:
        for key, value in changed.items():
            setattr(task, key, value)
        task.options = {**task.options, **changed}
        check_history(task)
    return task


def module_of(task: Task) -> str:
    """The module to import a task's class from; for a script that is running, its own name instead of `__main__`."""
    module = type(task).__module__
    if module != "__main__":
        return module
    running = vars(sys.modules[module])
    spec = running.get("__spec__")  # with `python -m`
    return spec.name if spec is not None else Path(running.get("__file__") or module).stem


def name_of(task: Task) -> str:
    """The name from which `make_task` creates this task."""
    known = task.name in TASKS or task.name.startswith("gym:")
    return task.name if known else f"{module_of(task)}:{type(task).__qualname__}"


def task_options(name: str) -> dict[str, inspect.Parameter]:
    """The options a task declares: the parameters of its class or factory function, and those of every task."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    declared = {key: each for key, each in _parameters(_factory(name)).items() if each.kind in named}
    common = {key: inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=0) for key in HISTORY}
    return declared | {key: each for key, each in common.items() if key not in declared}


def task_options_help(name: str) -> dict[str, str]:
    """The descriptions of a task's options, from the `Args:` section of its class's or factory's docstring."""
    factory = _factory(name)
    text = inspect.getdoc(factory.func if isinstance(factory, partial) else factory) or ""
    args = text.partition("Args:\n")[2].split("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", args, re.MULTILINE)
    return HISTORY | {key: " ".join(described.split()) for key, described in found}


def _factory(name: str) -> Callable[..., Task]:
    module, colon, attribute = name.partition(":")
    if module == "gym" and colon:
        return partial(importlib.import_module(".gym", __name__).GymTask, attribute)
    if colon:
        return _own_factory(module, attribute)
    if name not in TASKS:
        near = difflib.get_close_matches(name.lower(), TASKS, n=1, cutoff=0.5)
        raise ValueError(
            f"There is no task {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else ".")
            + f" Tasks: {', '.join(TASKS)}, `gym:ID` for any gymnasium environment, or `module:Class` for your own."
        )
    module, attribute = TASKS[name]
    return getattr(importlib.import_module(f".{module}", __name__), attribute)


def _own_factory(module: str, attribute: str) -> Callable[..., Task]:
    """Resolve `module:attribute`; raises `ValueError` if either is missing."""
    if module.endswith(".py") or "/" in module:
        dotted = module.removesuffix(".py").strip("./").replace("/", ".")
        raise ValueError(f"Name the module of a task, not its file: {dotted}:{attribute or 'Class'}.")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its imports doesn't
        raise ValueError(
            f"There is no module {module!r}: run from the folder that holds it, or put that folder on PYTHONPATH."
        ) from error
    members: Mapping[str, Any] = vars(imported)
    if attribute not in members:
        near = difflib.get_close_matches(attribute, members, n=1)
        hint = f"; did you mean {module}:{near[0]}?" if near else f". Write {module}:NAME_OF_THE_CLASS."
        raise ValueError(f"The module {module!r} has no {attribute!r}{hint}")
    if not callable(members[attribute]):
        raise ValueError(f"{module}:{attribute} must be a class or a function that returns a task.")
    return members[attribute]


def _parameters(factory: Callable[..., Task]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(factory).parameters


def _takes_any(factory: Callable[..., Task]) -> bool:
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in _parameters(factory).values())


__all__ = ["TASKS", "Rubric", "Task", "Tool", "make_task", "module_of", "name_of", "task_options", "task_options_help"]
