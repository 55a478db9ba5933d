"""Tasks: the words around an environment. `make_task` knows them by name."""

from __future__ import annotations

import difflib
import importlib
import inspect
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
    """A task by name. Options:

    - `env_kwargs`: passed to the environment, e.g. `{"solvable_only": True}`;
    - `thoughts=False`: the action-only variant, with no thought keys in prompt and format;
    - `cut=False`: hopeless episodes go on to their end;
    - `split`, `evaluation_split`, `history`, `hide`, `observation_text`, `max_actions`, `illegal_reward`,
      `task_type_weights`, `max_command_characters` (ALFWorld): see `ALFWorldTask`;
    - `hands` (points games): a fixed pool of hands to deal from, e.g. `[["4", "9", "A", "K"]]`.
    """
    if name not in TASKS:
        near = difflib.get_close_matches(str(name).lower(), TASKS, n=1, cutoff=0.5)
        raise ValueError(
            f"There is no task {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else ".")
            + f" Tasks: {', '.join(TASKS)}."
        )
    module, factory_name = TASKS[name]
    factory = getattr(importlib.import_module(f".{module}", __name__), factory_name)
    known = inspect.signature(factory).parameters
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"Task {name!r} has no option {', '.join(unknown)}. Its options: {', '.join(known)}.")
    return factory(**options)


__all__ = ["TASKS", "Rubric", "Task", "Tool", "make_task"]
