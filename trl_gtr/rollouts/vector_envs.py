"""Vector environments for a task, in this process, in workers or in Ray actors, and their infos as plain dicts."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from accelerate import PartialState

from ..config import GTRConfig
from ..tasks.base import Task
from .playing import PlayingRules
from .process_workers import ProcessWorker
from .ray_workers import RayWorkers, connect
from .replay import LocalVectorEnv
from .worker_base import StartWorker
from .workers import WorkerVectorEnv


@dataclass(frozen=True)
class Vectorization:
    """Where environments run.

    Args:
        kind: `"local"`: in this process. `"workers"`: each in a process of its own. `"ray"`: each in a process of a
            Ray cluster. `"auto"`: as the task says.
        ray_address: See `GTRConfig.ray_address`.
        ray_envs_per_actor: See `GTRConfig.ray_envs_per_actor`.
    """

    kind: Literal["auto", "local", "workers", "ray"] = "auto"
    ray_address: str | None = None
    ray_envs_per_actor: int = 1

    @classmethod
    def from_settings(cls, args: GTRConfig) -> Vectorization:
        """Raises if Ray is missing or can't be reached."""
        chosen = cls(args.vectorization, args.ray_address, args.ray_envs_per_actor)
        if chosen.kind == "ray":
            if args.ray_address is None and PartialState().num_processes > 1:
                raise ValueError(
                    "Several processes need a Ray cluster that they share: run `ray start --head` and set "
                    "ray_address='auto'."
                )
            connect(args.ray_address)
        return chosen

    def kind_for(self, task: Task) -> Literal["local", "workers", "ray"]:
        """Where this task's environments run."""
        if self.kind == "auto":
            return "workers" if task.vectorization == "processes" else "local"
        return self.kind

    def workers(self, task: Task) -> StartWorker | None:
        """How to start a worker for each environment; `None` if they run in this process."""
        kind = self.kind_for(task)
        if kind == "ray":
            return RayWorkers(self.ray_address, self.ray_envs_per_actor)
        return ProcessWorker if kind == "workers" else None


AUTO = Vectorization()


def make_vector_env(
    rules: PlayingRules, num_envs: int, pickle_environments: bool = False, vectorization: Vectorization = AUTO
) -> LocalVectorEnv | WorkerVectorEnv:
    """Vectorized training environments with same-step autoreset."""
    start_worker = vectorization.workers(rules.task)
    if start_worker is None:
        return LocalVectorEnv(rules.make_env, num_envs, pickle_environments=pickle_environments)
    options = {"pickle_environments": pickle_environments, **rules.task.worker_options}
    return WorkerVectorEnv(rules.make_env, num_envs, start_worker=start_worker, **options)


def unpack_infos(infos: Mapping[str, Any], num_envs: int) -> list[dict[str, Any]]:
    """A vector environment's infos (arrays with `_key` masks) as one plain dict per environment.

    Values are copied, because some environments mutate lists that they returned.
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
