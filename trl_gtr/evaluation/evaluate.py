"""How good is an agent? `evaluate_agent(agent, task)` → `EvaluationReport` with confidence intervals.

Episode k depends only on (seed, k), so every agent plays the same deals. If a task lists its starts (games, a set of
hands), each is played once before any is repeated. Episodes are not cut, and returns are raw: the environment's
rewards plus the task's penalty for illegal actions. If a worker process is lost, its episode is played again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from ..distributed.progress import Progress
from ..rollouts.playing import PlayingRules
from ..rollouts.vector_envs import in_processes
from ..rollouts.workers import WorkerEnv, WorkerLost, WorkerRefused
from ..tasks.base import Task, is_true_thought
from ..types import Transition
from .agents import Agent
from .reports import EpisodeResult, EvaluationReport


def count_episodes(task: Task, episodes: int | str | None, name: str = "The number of episodes") -> int:
    """The number of episodes; `"all"` is one per start of the task. Both may be strings from the command line.

    Args:
        name: How errors refer to the number.
    """
    if episodes != "all":
        return _at_least_one(episodes, name)
    starts = task.starts()
    if starts is None:
        raise ValueError(
            f"Task {task.name!r} deals at random without end: say how many episodes. ('all' is for ALFWorld's games, "
            "and for Points24 with a set of hands: pool, unseen or solvable.)"
        )
    return len(starts)


def _at_least_one(given: int | str | None, name: str) -> int:
    try:
        count = int(given or 0)
    except ValueError:
        raise ValueError(f"{name} must be a number or 'all', got {given!r}.") from None
    if count < 1:
        raise ValueError(f"{name} must be at least 1, or 'all', got {given}.")
    return count


def _options(starts: Sequence[Mapping[str, Any]] | None, seed: int, index: int) -> dict[str, Any] | None:
    """The start of episode `index`. Each round goes through all starts in a new order."""
    if starts is None:
        return None
    finished, place = divmod(index, len(starts))
    order = np.random.default_rng([seed, finished, 4]).permutation(len(starts))
    return dict(starts[int(order[place])])


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
    """
    task = Task.ensure(task)
    if isinstance(episodes, (int, str)):
        episodes = range(count_episodes(task, episodes))
    if num_envs < 1:
        raise ValueError("An evaluation needs at least one environment.")
    numbers, starts, progress = list(episodes), task.starts(), progress or Progress()
    progress.begin("evaluate", len(numbers), "episode")
    waiting = list(reversed(numbers))
    playing: list[_Episode] = []
    results: list[EpisodeResult] = []
    rules = PlayingRules(task, invalid_action)
    with _Envs(rules, min(num_envs, len(numbers))) as envs:
        while (waiting or playing) and not stopped():
            begun: list[_Episode] = []
            while waiting and len(playing) + len(begun) < num_envs:
                number = waiting.pop()
                options = _options(starts, seed, number)
                begun.append(_Episode(rules, envs.take(), number, seed, options))
            envs.for_each(_Episode.begin, begun)
            playing += begun
            prompts = [task.prompt(episode.observation, episode.info) for episode in playing]
            texts = agent.respond(prompts, [e.observation for e in playing], [e.info for e in playing])
            envs.for_each(_Episode.step, playing, prompts, texts)
            for episode in (episode for episode in playing if episode.ended):
                results.append(episode.result())
                progress.advance()
                envs.give_back(episode.env)
            playing = [episode for episode in playing if not episode.ended]
    progress.end()
    return EvaluationReport(task.name, tuple(sorted(results, key=lambda result: result.index)), len(numbers))


class _Envs:
    """Environments for episodes: a fresh one for each, or worker processes that are reused."""

    def __init__(self, rules: PlayingRules, count: int) -> None:
        self.make = partial(rules.make_env, evaluation=True)
        self.workers = [WorkerEnv(self.make) for _ in range(count)] if in_processes(rules.task) else []
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


class _Episode:
    """One episode, from reset to end."""

    def __init__(
        self, rules: PlayingRules, env: gym.Env, index: int, seed: int, options: dict[str, Any] | None
    ) -> None:
        self.rules, self.task, self.env = rules, rules.task, env
        self.index, self.seed, self.options = index, seed, options
        self.rng = np.random.default_rng([seed, index, 3])
        self.observation: Any = None
        self.info: dict[str, Any] = {}
        self.transitions: list[Transition] = []
        self.judged_steps = self.true_steps = self.losses = 0
        self.solvable, self.ended = True, False

    def begin(self) -> None:
        while True:
            try:
                deal = int(np.random.SeedSequence([self.seed, self.index, 2]).generate_state(1)[0])
                self.observation, self.info = self.env.reset(seed=deal, options=self.options)
                break
            except WorkerLost as loss:
                self._count_loss(loss)
        self.solvable = self.task.solvable(self.info)

    def step(self, prompt: str, text: str) -> None:
        try:
            self._step(prompt, text)
        except WorkerLost as loss:
            self._count_loss(loss)
            self.rng = np.random.default_rng([self.seed, self.index, 3])
            self.transitions, self.judged_steps, self.true_steps = [], 0, 0
            self.begin()

    def _count_loss(self, loss: WorkerLost) -> None:
        """Replay an episode whose worker is lost, but give up at the third loss."""
        self.losses += 1
        if self.losses >= 3 or isinstance(loss, WorkerRefused):
            raise loss
        warnings.warn(f"Restarting episode {self.index} because its worker was lost: {loss}", stacklevel=2)

    def _step(self, prompt: str, text: str) -> None:
        response, info = self.task.format.parse(text), self.info
        choice = self.rules.choose(response, info, self.env.action_space, self.rng)
        true = is_true_thought(self.task.judge(response, info))
        self.judged_steps += true is not None
        self.true_steps += response.valid and true is True
        self.observation, reward, terminated, truncated, self.info = self.env.step(choice.action)
        self.ended = bool(terminated or truncated)
        self.transitions.append(
            Transition(
                env_index=self.index,
                step=len(self.transitions),
                image=np.zeros((0, 0, 3), np.uint8),
                prompt=prompt,
                response=response,
                response_ids=np.zeros(0, np.int64),
                reward=self.rules.reward(float(reward), choice.legal),
                terminated=bool(terminated),
                truncated=bool(truncated),
                bootstrap=False,
                legal=choice.legal,
                info=info,
                final_info=self.info if self.ended else None,
                episode_step=len(self.transitions),
                substitute=choice.substitute,
            )
        )

    def result(self) -> EpisodeResult:
        return EpisodeResult(
            index=self.index,
            success=self.task.success(self.transitions),
            solvable=self.solvable,
            total_reward=sum(t.reward for t in self.transitions),
            length=len(self.transitions),
            valid_steps=sum(t.response.valid for t in self.transitions),
            legal_steps=sum(t.legal for t in self.transitions),
            judged_steps=self.judged_steps,
            true_steps=self.true_steps,
            extra=dict(self.task.metrics(self.transitions)),
            difficulty=self.task.difficulty(self.transitions[0].info),
            start=dict(self.task.describe_start(self.transitions[0].info)),
        )
