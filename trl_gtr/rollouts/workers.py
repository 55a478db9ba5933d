"""Environments in workers: `WorkerVectorEnv`, with the interface of gymnasium's `SyncVectorEnv`, and `WorkerEnv` for a
single one.

For environments that are slow, leak memory or may crash. Each runs in a fresh process of its own, on this machine or
in a Ray cluster, which imports neither the training script nor torch, is replaced when it crashes or hangs, and exits
when its parent does, for whatever reason. It closes its environment first; processes that the environment leaves
behind are killed. POSIX only.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from .process_workers import ProcessWorker
from .replay import of_worker, restorable
from .worker_base import PATIENCE, StartWorker, Worker, WorkerFailed, WorkerLost, WorkerRefused

_MAX_FAILURES = 3


class WorkerEnv(gym.Env):
    """One environment in its own process. Threads may step several of them concurrently.

    If the worker crashes, raises or doesn't answer in time, `WorkerLost` is raised; `reset` then starts a new one.

    Args:
        make_env: Creates the environment; sent to the worker with cloudpickle.
        step_timeout: Seconds a step may take.
        start_timeout: Seconds a start or a reset may take.
        start_worker: Starts a worker: a process of this machine by default.
    """

    def __init__(
        self,
        make_env: Callable[[], gym.Env],
        *,
        step_timeout: float = 120.0,
        start_timeout: float = 300.0,
        start_worker: StartWorker = ProcessWorker,
    ) -> None:
        self.step_timeout, self.start_timeout, self._start_worker = step_timeout, start_timeout, start_worker
        self._make_env = cloudpickle.dumps(make_env)
        self._worker: Worker | None = None
        self._started = False

    def start(self) -> None:
        """Start a worker in the background unless there is one; `reset` waits for it."""
        if self._worker is None:
            self._worker, self._started = self._start_worker(self._make_env), False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.start()
        if not self._started:
            facts = self._answer(self.start_timeout)
            self.action_space, self.observation_space = facts["action_space"], facts["observation_space"]
            self.spec, self.metadata, self.render_mode = facts["spec"], facts["metadata"], facts["render_mode"]
            self._started = True
        return self._ask(self.start_timeout, "reset", seed, options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return self._ask(self.step_timeout, "step", action)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.stop(PATIENCE)
            self._worker = None

    def _ask(self, timeout: float, request: str, *arguments: Any) -> Any:
        if self._worker is None:
            raise WorkerLost("there is no worker: call reset() first")
        self._worker.send(request, *arguments)
        return self._answer(timeout)

    def _answer(self, timeout: float) -> Any:
        assert self._worker is not None
        try:
            return self._worker.answer(timeout)
        except WorkerLost:
            self._worker.stop()
            self._worker = None
            raise


class WorkerVectorEnv(VectorEnv):
    """`num_envs` environments, each in its own process, with same-step autoreset.

    `reset`, `step` and the infos are those of `SyncVectorEnv(..., autoreset_mode=AutoresetMode.SAME_STEP)`. A worker
    that crashes, raises or doesn't answer within `step_timeout` is replaced. Its episode is lost: the step is
    truncated with reward 0, the last known observation, and `info["worker_lost"] = True` in its final info;
    `lost_episodes` counts them. If a worker is lost three times without a step in between, the environment itself is
    broken and an error is raised.

    Args:
        make_env: Creates one environment; sent to the workers with cloudpickle.
        num_envs: Number of environments and processes.
        step_timeout: Seconds a step, including its autoreset, may take.
        start_timeout: Seconds a start, a reset or restoring a state may take.
        recycle_after: Episodes after which a worker is replaced and its environment restored in the new one; bounds
            the memory of leaky environments. `None`: never. Needs environments that can be restored.
        pickle_environments: Save and restore environments as pickles instead of replaying them.
        start_worker: Starts a worker: a process of this machine by default.
    """

    def __init__(
        self,
        make_env: Callable[[], gym.Env],
        num_envs: int,
        *,
        step_timeout: float = 120.0,
        start_timeout: float = 300.0,
        recycle_after: int | None = 200,
        pickle_environments: bool = False,
        start_worker: StartWorker = ProcessWorker,
    ) -> None:
        if num_envs < 1 or (recycle_after is not None and recycle_after < 1):
            raise ValueError("num_envs and recycle_after must be at least 1 (recycle_after may be None).")
        self.num_envs = num_envs
        self.step_timeout, self.start_timeout, self.recycle_after = step_timeout, start_timeout, recycle_after
        self.lost_episodes = 0
        self._start_worker = start_worker
        self._make_env = cloudpickle.dumps(partial(restorable, make_env, pickle_environments))
        self._seeds = [np.random.default_rng() for _ in range(num_envs)]
        self._failures = [0] * num_envs
        self.workers = [self._start_worker(self._make_env) for _ in range(num_envs)]
        try:
            facts, *_ = [worker.answer(start_timeout) for worker in self.workers]
        except WorkerLost:
            self.close()
            raise
        self.spec, self.render_mode = facts["spec"], facts["render_mode"]
        self.metadata = {**facts["metadata"], "autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_action_space, self.single_observation_space = facts["action_space"], facts["observation_space"]
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self._last: list[tuple[Any, dict[str, Any]]] = [(None, {}) for _ in range(num_envs)]

    # -- VectorEnv -------------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        seeds = [seed + i if isinstance(seed, int) else None for i in range(self.num_envs)]
        if isinstance(seed, Sequence):
            seeds = list(seed)
        if len(seeds) != self.num_envs:
            raise ValueError(f"reset needs {self.num_envs} seeds, one per environment, got {len(seeds)}.")
        # Replacement workers draw their seeds from here, so that a run with a crash is reproducible.
        self._seeds = [np.random.default_rng(None if each is None else [each, 1]) for each in seeds]
        for worker, each in zip(self.workers, seeds, strict=True):
            worker.send("reset", each, options)
        infos: dict[str, Any] = {}
        for i, worker in enumerate(self.workers):
            self._last[i] = worker.answer(self.start_timeout)
            infos = self._add_info(infos, self._last[i][1], i)
        return self._observations(), infos

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        chosen = list(actions)
        if len(chosen) != self.num_envs:
            raise ValueError(f"step needs {self.num_envs} actions, one per environment, got {len(chosen)}.")
        for worker, action in zip(self.workers, chosen, strict=True):
            worker.send("step_on", action)
        deadline = time.monotonic() + self.step_timeout
        rewards = np.zeros(self.num_envs)
        terminated, truncated = np.zeros(self.num_envs, np.bool_), np.zeros(self.num_envs, np.bool_)
        infos: dict[str, Any] = {}
        results, losses = self._answers(range(self.num_envs), deadline)
        results |= self._replace(losses)
        for i in range(self.num_envs):
            observation, rewards[i], terminated[i], truncated[i], info, ending = results[i]
            if ending is not None:
                infos = self._add_info(infos, {"final_obs": ending[0], "final_info": ending[1]}, i)
                self._count_episode(i)
            self._last[i] = observation, info
            infos = self._add_info(infos, info, i)
        return self._observations(), rewards, terminated, truncated, infos

    def _answers(self, envs: Iterable[int], deadline: float) -> tuple[dict[int, Any], dict[int, WorkerLost]]:
        """The answers of some environments, and why others have none."""
        answers, losses = {}, {}
        for i in envs:
            try:
                answers[i] = self.workers[i].answer(max(0.0, deadline - time.monotonic()))
                self._failures[i] = 0
            except WorkerLost as loss:
                losses[i] = loss
        return answers, losses

    def reset_some(self, seeds: Mapping[int, int]) -> dict[int, tuple[Any, dict[str, Any]]]:
        """Start an episode in some environments: seeds, and the results, by environment. Lost workers are replaced."""
        for i, seed in seeds.items():
            if self.recycle_after is not None and self.workers[i].episodes >= self.recycle_after:
                self.workers[i].stop(PATIENCE)
                self.workers[i] = self._start_worker(self._make_env)
                try:
                    self.workers[i].answer(self.start_timeout)
                except WorkerRefused:
                    raise  # another would be refused too
                except WorkerLost:
                    self.workers[i].kill()  # which is found out below
            self.workers[i].send("reset", seed, None)
        losses = {}
        for i in seeds:
            try:
                self._last[i] = self.workers[i].answer(self.start_timeout)
            except WorkerLost as loss:
                losses[i] = loss
        for i, begun in self._start_anew(seeds, losses).items():
            self._last[i] = begun
        for i in seeds:
            self.workers[i].episodes += 1
        return {i: self._last[i] for i in seeds}

    def step_some(self, actions: Mapping[int, Any]) -> dict[int, tuple[Any, float, bool, bool, dict[str, Any]]]:
        """Step some environments, without autoreset: actions, and the results, by environment.

        A lost worker is replaced, and its step truncated as in `step`.
        """
        for i, action in actions.items():
            self.workers[i].send("step", action)
        answers, losses = self._answers(actions, time.monotonic() + self.step_timeout)
        for i, (*_, (observation, info)) in self._replace(losses).items():
            answers[i] = observation, 0.0, False, True, info
        results = {}
        for i in actions:
            observation, reward, terminated, truncated, info = answers[i]
            self._last[i] = observation, info
            results[i] = observation, float(reward), bool(terminated), bool(truncated), info
        return results

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call method `name` of every environment, or get the attribute."""
        for worker in self.workers:
            worker.send("call", name, args, kwargs)
        return tuple(worker.answer(self.start_timeout) for worker in self.workers)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        return self.call(name)

    def close_extras(self, **_: Any) -> None:
        for worker in self.workers:
            worker.release()
        for worker in self.workers:
            worker.stop(PATIENCE)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def get_states(self) -> list[dict[str, Any]]:
        """The state of every environment mid-episode as plain data (see `Replayable`), with its RNG state.

        A lost worker has no state. The next step reports its episode as lost, here and wherever the states are
        restored.
        """
        for worker in self.workers:
            worker.send("get_state")
        states = []
        for worker, (observation, info), seeds in zip(self.workers, self._last, self._seeds, strict=True):
            random = dict(seeds.bit_generator.state)
            try:
                states.append({"environment": worker.answer(self.start_timeout), "random": random})
            except (WorkerFailed, WorkerRefused):
                raise  # the environment can't be saved
            except WorkerLost:
                worker.kill()
                states.append({"environment": None, "random": random, "observation": observation, "info": info})
        return states

    def set_states(self, states: Sequence[dict[str, Any]], exact: bool = True) -> tuple[Any, dict[str, Any]]:
        """Restore states; returns observations and infos like `reset`. For `exact` see `Replayable.set_state`.

        Takes those of a `LocalVectorEnv` too: the seeds of replacement workers then go on as after `reset`.
        """
        if len(states) != self.num_envs:
            raise ValueError(f"Got {len(states)} states for {self.num_envs} environments.")
        states = [
            state if of_worker(state) else {"environment": state, "random": dict(seeds.bit_generator.state)}
            for state, seeds in zip(states, self._seeds, strict=True)
        ]
        for worker, state in zip(self.workers, states, strict=True):
            if state["environment"] is None:
                worker.kill()
            else:
                worker.send("set_state", state["environment"], exact)
        infos: dict[str, Any] = {}
        for i, state in enumerate(states):
            self._seeds[i].bit_generator.state = state["random"]
            self._last[i] = self._restored(i, state, exact)
            infos = self._add_info(infos, self._last[i][1], i)
        return self._observations(), infos

    def _restored(self, i: int, state: dict[str, Any], exact: bool) -> tuple[Any, dict[str, Any]]:
        if state["environment"] is None:
            return state["observation"], state["info"]
        try:
            return self.workers[i].answer(self.start_timeout)
        except (WorkerFailed, WorkerRefused):
            raise
        except WorkerLost:
            self.workers[i].stop()
            self.workers[i], latest = self._worker_at(state["environment"], exact)
            return latest

    def _worker_at(self, state: Any, exact: bool = True) -> tuple[Worker, tuple[Any, dict[str, Any]]]:
        """A new worker with its environment in the given state, and the latest observation and info."""
        worker = self._start_worker(self._make_env)
        worker.send("set_state", state, exact)
        try:
            worker.answer(self.start_timeout)  # to "make"
            return worker, worker.answer(self.start_timeout)
        except WorkerLost:
            worker.stop()
            raise

    # -- replacing workers -----------------------------------------------------------------------------------------

    def _replace(self, losses: Mapping[int, WorkerLost]) -> dict[int, Any]:
        """Start new workers with new episodes; the returned steps mark the old episodes as lost."""
        seeds = {i: int(self._seeds[i].integers(2**31)) for i in losses}
        steps: dict[int, Any] = {}
        for i, (observation, info) in self._start_anew(seeds, losses, " and its episode is lost").items():
            self.lost_episodes += 1
            last_observation, last_info = self._last[i]
            final_info = {**copy.deepcopy(last_info), "worker_lost": True}
            steps[i] = observation, 0.0, False, True, info, (last_observation, final_info)
        return steps

    def _start_anew(
        self, seeds: Mapping[int, int], losses: Mapping[int, WorkerLost], cost: str = ""
    ) -> dict[int, tuple[Any, dict[str, Any]]]:
        """The starts of episodes in new workers. The seeds are the same however many starts fail.

        All workers are started before any is waited for: a lost node may take many with it.
        """
        begun: dict[int, tuple[Any, dict[str, Any]]] = {}
        while losses:
            for i, loss in losses.items():
                self._failures[i] += 1
                if self._failures[i] >= _MAX_FAILURES:
                    raise RuntimeError(
                        f"The worker of environment {i} was lost {_MAX_FAILURES} times without a step in between. "
                        f"Last error: {loss}"
                    ) from loss
                warnings.warn(f"The worker of environment {i} is replaced{cost}: {loss}", stacklevel=4)
                self.workers[i].stop()
                self.workers[i] = self._start_worker(self._make_env)
                self.workers[i].send("reset", seeds[i], None)
            again: dict[int, WorkerLost] = {}
            for i in losses:
                try:
                    self.workers[i].answer(self.start_timeout)
                    begun[i] = self.workers[i].answer(self.start_timeout)
                except WorkerRefused:
                    raise  # another would be refused too
                except WorkerLost as loss:
                    again[i] = loss
            losses = again
        return begun

    def _count_episode(self, i: int) -> None:
        """Replace a worker after `recycle_after` episodes. Its environment is at the start of an episode."""
        self.workers[i].episodes += 1
        if self.recycle_after is None or self.workers[i].episodes < self.recycle_after:
            return
        old = self.workers[i]
        old.send("get_state")
        try:
            self.workers[i], _ = self._worker_at(old.answer(self.start_timeout))
        except (WorkerFailed, WorkerRefused) as failure:
            warnings.warn(
                f"Workers are no longer recycled, because the environment can't be restored in a new one: {failure}",
                stacklevel=3,
            )
            self.recycle_after = None
        except WorkerLost:
            old.kill()  # the next step replaces it
        else:
            old.stop(PATIENCE)

    def _observations(self) -> Any:
        empty: Any = create_empty_array(self.single_observation_space, n=self.num_envs, fn=np.zeros)
        return concatenate(self.single_observation_space, [observation for observation, _ in self._last], empty)
