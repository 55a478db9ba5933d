"""Vector environments of a task, in this process or in workers, and their infos as plain dicts."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..tasks.base import Task
from .playing import PlayingRules
from .replay import LocalVectorEnv
from .workers import WorkerVectorEnv


def in_processes(task: Task) -> bool:
    """Does the task want each of its environments in a process of its own?"""
    return task.vectorization == "processes"


def make_vector_env(
    rules: PlayingRules, num_envs: int, pickle_environments: bool = False
) -> LocalVectorEnv | WorkerVectorEnv:
    """Training environments, stepped together; autoreset in the same step."""
    if in_processes(rules.task):
        options = {"pickle_environments": pickle_environments, **rules.task.worker_options}
        return WorkerVectorEnv(rules.make_env, num_envs, **options)
    return LocalVectorEnv(rules.make_env, num_envs, pickle_environments=pickle_environments)


def unpack_infos(infos: Mapping[str, Any], num_envs: int) -> list[dict[str, Any]]:
    """A vector environment's infos (arrays with `_key` masks) as one plain dict per environment.

    Values are copied: some environments hand out lists that they go on changing.
    """
    unpacked: list[dict[str, Any]] = [{} for _ in range(num_envs)]
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        if mask is None:
            continue
        nested = unpack_infos(values, num_envs) if isinstance(values, dict) else None
        for i in np.flatnonzero(mask):
            value = values[i] if nested is None else nested[i]
            unpacked[i][key] = value.item() if isinstance(value, np.generic) else copy.deepcopy(value)
    return unpacked
