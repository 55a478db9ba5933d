"""How good is an agent? `evaluate_agent(agent, task)` → `EvaluationReport` with confidence intervals.

Episode k depends only on (seed, k), so every agent plays the same deals. If a task lists its starts (games, a set of
hands), each is played once before any is repeated. Episodes are not cut, and returns are raw: the environment's
rewards plus the task's penalty for illegal actions. If a worker is lost, its episode is played again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import gymnasium as gym

from ..distributed.progress import Progress
from ..distributed.sizes import episode_count
from ..rollouts.playing import PlayingRules
from ..rollouts.vector_envs import AUTO, Vectorization
from ..rollouts.workers import WorkerEnv
from ..tasks.base import Task
from .agents import Agent
from .episode import Episode, start_options
from .reports import EpisodeResult, EvaluationReport


def count_episodes(task: Task, episodes: int | str | None, name: str = "The number of episodes") -> int:
    """The number of episodes; `"all"` is one per start of the task. Both may be strings from the command line.

    Args:
        name: How errors refer to the number.
    """
    count = episode_count(episodes, name)
    if count != "all":
        return count
    starts = task.starts()
    if starts is None:
        raise ValueError(
            f"Task {task.name!r} deals at random without end: say how many episodes. ('all' is for ALFWorld's games, "
            "and for Points24 with a set of hands: pool, unseen or solvable.)"
        )
    return len(starts)


def evaluate_agent(
    agent: Agent,
    task: Task,
    episodes: int | Literal["all"] | Sequence[int] = 64,
    *,
    seed: int = 0,
    num_envs: int = 16,
    invalid_action: str = "random",
    stopped: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
    vectorization: Vectorization = AUTO,
) -> EvaluationReport:
    """Play episodes and report the results.

    Args:
        agent: The agent to evaluate.
        task: The task to play, without cuts.
        episodes: How many, `"all"` (every game or hand that the task lists, once), or a list of episode numbers.
        seed: Determines the deals, together with the episode's number.
        num_envs: Episodes played in parallel.
        invalid_action: As in `GTRConfig`: a response without a legal action plays a random one, or costs a step.
        stopped: Checked between steps; `True` cuts the evaluation short. Unfinished episodes don't count, and the
            report is not `complete`.
        progress: Told of every episode that ends.
        vectorization: Where the environments run.
    """
    task = Task.ensure(task)
    if isinstance(episodes, (int, str)):
        episodes = range(count_episodes(task, episodes))
    if num_envs < 1:
        raise ValueError("An evaluation needs at least one environment.")
    numbers, starts, progress = list(episodes), task.starts(), progress or Progress()
    progress.begin("evaluate", len(numbers), "episode")
    waiting = list(reversed(numbers))
    playing: list[Episode] = []
    results: list[EpisodeResult] = []
    rules = PlayingRules(task, invalid_action)
    with _Envs(rules, min(num_envs, len(numbers)), vectorization) as envs:
        while (waiting or playing) and not stopped():
            begun: list[Episode] = []
            while waiting and len(playing) + len(begun) < num_envs:
                number = waiting.pop()
                options = start_options(starts, seed, number)
                begun.append(Episode(rules, envs.take(), number, seed, options))
            envs.for_each(Episode.begin, begun)
            playing += begun
            prompts = [episode.prompt for episode in playing]
            texts = agent.respond(prompts, [e.observation for e in playing], [e.info for e in playing])
            envs.for_each(Episode.step, playing, prompts, texts)
            for episode in (episode for episode in playing if episode.ended):
                results.append(episode.result())
                progress.advance()
                envs.give_back(episode.env)
            playing = [episode for episode in playing if not episode.ended]
    progress.end()
    return EvaluationReport(task.name, tuple(sorted(results, key=lambda result: result.index)), len(numbers))


class _Envs:
    """Environments for episodes: a fresh one for each, or workers that are reused."""

    def __init__(self, rules: PlayingRules, count: int, vectorization: Vectorization) -> None:
        self.make = partial(rules.make_env, evaluation=True)
        start = vectorization.workers(rules.task)
        self.workers = [] if start is None else [WorkerEnv(self.make, start_worker=start) for _ in range(count)]
        self.free = list(self.workers)
        self.threads = ThreadPoolExecutor(max(count, 1))  # one per worker; started only if there are workers

    def __enter__(self) -> _Envs:
        for worker in self.workers:
            worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown()
        for worker in self.workers:
            worker.close()

    def take(self) -> gym.Env:
        return self.free.pop() if self.workers else self.make()

    def give_back(self, env: gym.Env) -> None:
        if isinstance(env, WorkerEnv):
            self.free.append(env)
        else:
            env.close()

    def for_each(self, method: Callable[..., None], *columns: Sequence[Any]) -> None:
        """Call `method` with every row of the columns, concurrently with workers."""
        rows = list(zip(*columns, strict=True))
        for _ in (self.threads.map if self.workers else map)(lambda row: method(*row), rows):
            pass  # wait for every call and raise its error
