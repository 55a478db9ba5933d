"""How good is an agent? `evaluate_agent(agent, task)` → [`EvaluationReport`] with confidence intervals.

Episode k is dealt by (seed, k) alone, so that every agent plays the same deals. Where a task lists its starts (games,
a set of hands), each is played once before any comes again. Nothing is cut, and returns are raw: the environment's
rewards and the task's price of illegal actions. Where a task wants processes, an episode whose worker is lost is
played again.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from ..config import episode_count
from ..rollouts.collector import SkippableStep, illegal_reward, in_processes, make_env, step_limit
from ..rollouts.workers import WorkerEnv, WorkerLost, WorkerRefused
from ..tasks.base import Task, is_true_thought
from ..types import Response, Transition
from .agents import Agent


@dataclass(frozen=True)
class Rate:
    """A share with its 95 % Wilson interval."""

    hits: int
    count: int

    @property
    def value(self) -> float:
        return self.hits / self.count if self.count else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        if not self.count:
            return math.nan, math.nan
        z, n, p = 1.959963984540054, self.count, self.value
        center = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, center - half), min(1.0, center + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.3f} [{low:.3f}, {high:.3f}]"


@dataclass(frozen=True)
class EpisodeResult:
    """One played episode."""

    index: int
    success: bool
    solvable: bool
    total_reward: float
    length: int
    valid_steps: int
    legal_steps: int
    judged_steps: int
    """Steps of which the task's `judge` knows whether the thought is true; 0 for a task without one."""
    true_steps: int
    extra: Mapping[str, float] = field(default_factory=dict)
    """What the task's own `metrics` says."""
    difficulty: str | None = None
    start: Mapping[str, str] = field(default_factory=dict)
    """What the task's `describe_start` says: the game file and its task type, or the hand."""


@dataclass(frozen=True)
class EvaluationReport:
    """What an agent did in its episodes."""

    task: str
    episodes: tuple[EpisodeResult, ...]

    @property
    def success(self) -> Rate:
        return Rate(sum(e.success for e in self.episodes), len(self.episodes))

    @property
    def success_solvable(self) -> Rate:
        """Over the deals that can be won at all."""
        solvable = [e for e in self.episodes if e.solvable]
        return Rate(sum(e.success for e in solvable), len(solvable))

    def by_difficulty(self) -> dict[str, Rate]:
        """Success for each difficulty that the task tells apart; empty for a task without the method."""
        names = sorted({e.difficulty for e in self.episodes if e.difficulty is not None})
        groups = {name: [e for e in self.episodes if e.difficulty == name] for name in names}
        return {name: Rate(sum(e.success for e in group), len(group)) for name, group in groups.items()}

    @property
    def mean_return(self) -> float:
        return float(np.mean([e.total_reward for e in self.episodes]))

    def metrics(self) -> dict[str, float]:
        steps = sum(e.length for e in self.episodes)
        solvable = self.success_solvable
        judged = sum(e.judged_steps for e in self.episodes)
        return {
            **_with_interval("success", self.success),
            # Left out where no deal could be won: there is no share of nothing.
            **(_with_interval("success_solvable", solvable) if solvable.count else {}),
            "return": self.mean_return,
            "length": steps / len(self.episodes),
            "valid": sum(e.valid_steps for e in self.episodes) / steps,
            "legal": sum(e.legal_steps for e in self.episodes) / steps,
            **({"true_thoughts": sum(e.true_steps for e in self.episodes) / judged} if judged else {}),
            "episodes": float(len(self.episodes)),
            **self.extra(),
        }

    def extra(self) -> dict[str, float]:
        """The means of the task's own metrics, each over the episodes that have it (success by task type)."""
        names = sorted({name for e in self.episodes for name in e.extra})
        return {name: float(np.mean([e.extra[name] for e in self.episodes if name in e.extra])) for name in names}

    def different_starts(self) -> dict[str, int]:
        """How many different starts were played, by their source ("bundled games"); empty if the task doesn't say."""
        starts = {tuple(sorted(e.start.items())): e.start["source"] for e in self.episodes if e.start}
        return dict(Counter(sorted(starts.values())))

    def to_json(self) -> dict[str, Any]:
        rates = {name: asdict(rate) | {"interval": rate.interval} for name, rate in self.by_difficulty().items()}
        return {
            "task": self.task,
            "metrics": self.metrics(),
            "by_difficulty": rates,
            "episodes": [asdict(e) for e in self.episodes],
        }


def _with_interval(name: str, rate: Rate) -> dict[str, float]:
    low, high = rate.interval
    return {name: rate.value, f"{name}_low": low, f"{name}_high": high}


def count_episodes(task: Task, episodes: int | str | None) -> int:
    """How many episodes that is: `"all"` are as many as the task has starts."""
    count = episode_count(episodes, "The number of episodes")
    if count != "all":
        return count
    starts = task.starts()
    if starts is None:
        raise ValueError(
            f"Task {task.name!r} deals at random, so there is no end to its deals: say how many episodes. ('all' is "
            "for ALFWorld's games, and for Points24 with a set of hands: pool, unseen or solvable.)"
        )
    return len(starts)


def _options(starts: Sequence[Mapping[str, Any]] | None, seed: int, index: int) -> dict[str, Any] | None:
    """The start of episode `index`. Each round goes through all of them, in an order of its own."""
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
) -> EvaluationReport:
    """Play episodes and count.

    Args:
        agent: Who plays.
        task: What is played, without cuts.
        episodes: How many, `"all"` (each game or hand that the task lists, once), or which ones by number.
        seed: Decides the deals, together with the episode's number.
        num_envs: Episodes played side by side.
        invalid_action: As in `GTRConfig`: a response that names no legal action plays a random one, or costs a step.
        stopped: Asked between steps; `True` ends the evaluation, and episodes that aren't over don't count.
    """
    task = Task.ensure(task)
    if isinstance(episodes, (int, str)):
        episodes = range(count_episodes(task, episodes))
    if num_envs < 1:
        raise ValueError("An evaluation needs at least one environment.")
    numbers, starts = list(episodes), task.starts()
    waiting = list(reversed(numbers))
    playing: list[_Episode] = []
    results: list[EpisodeResult] = []
    penalize = invalid_action == "penalty"
    with _Envs(task, min(num_envs, len(numbers)), penalize) as envs:
        while (waiting or playing) and not stopped():
            begun: list[_Episode] = []
            while waiting and len(playing) + len(begun) < num_envs:
                number = waiting.pop()
                options = _options(starts, seed, number)
                begun.append(_Episode(task, envs.take(), number, seed, penalize, options))
            envs.for_each(_Episode.begin, begun)
            playing += begun
            prompts = [task.prompt(episode.observation, episode.info) for episode in playing]
            texts = agent.respond(prompts, [e.observation for e in playing], [e.info for e in playing])
            envs.for_each(_Episode.step, playing, prompts, texts)
            for episode in (episode for episode in playing if episode.ended):
                results.append(episode.result())
                envs.give_back(episode.env)
            playing = [episode for episode in playing if not episode.ended]
    return EvaluationReport(task.name, tuple(sorted(results, key=lambda result: result.index)))


class _Envs:
    """Environments for episodes: a fresh one for each, or worker processes that play one after the other."""

    def __init__(self, task: Task, count: int, penalize: bool) -> None:
        self.make = partial(make_env, task, penalize, evaluation=True)
        self.workers = [WorkerEnv(self.make) for _ in range(count)] if in_processes(task) else []
        self.free = list(self.workers)
        self.threads = ThreadPoolExecutor(max(count, 1))  # each waits for one worker; without workers none is started

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
        """Call `method` with every row of the columns; at once for all workers."""
        rows = list(zip(*columns, strict=True))
        for _ in (self.threads.map if self.workers else map)(lambda row: method(*row), rows):
            pass  # every call is waited for, and its error raised


class _Episode:
    """One environment from its reset to its end."""

    def __init__(
        self,
        task: Task,
        env: gym.Env,
        index: int,
        seed: int,
        penalize: bool,
        options: dict[str, Any] | None,
    ) -> None:
        self.task, self.env, self.index, self.seed, self.options = task, env, index, seed, options
        self.penalize, self.fine = penalize, illegal_reward(task, penalize)
        self.losses = 0

    def begin(self) -> None:
        while True:
            try:
                deal = int(np.random.SeedSequence([self.seed, self.index, 2]).generate_state(1)[0])
                self.observation, self.info = self.env.reset(seed=deal, options=self.options)
                break
            except WorkerLost as loss:
                self._count_loss(loss)
        self.rng = np.random.default_rng([self.seed, self.index, 3])
        self.limit = step_limit(self.env)
        self.solvable = self.task.solvable(self.info)
        self.transitions: list[Transition] = []
        self.judged_steps = self.true_steps = 0
        self.ended = False

    def step(self, prompt: str, text: str) -> None:
        try:
            self._step(prompt, text)
        except WorkerLost as loss:
            self._count_loss(loss)
            self.begin()

    def _count_loss(self, loss: WorkerLost) -> None:
        """An episode whose worker is lost is played again, three times at most."""
        self.losses += 1
        if self.losses >= 3 or isinstance(loss, WorkerRefused):
            raise loss
        warnings.warn(f"Episode {self.index} begins anew, for its worker was lost: {loss}", stacklevel=2)

    def _step(self, prompt: str, text: str) -> None:
        response, info = self.task.format.parse(text), self.info
        action = self.task.to_env_action(response, info) if response.valid else None
        legal = action is not None
        true = is_true_thought(self.task.judge(response, info))
        self.judged_steps += true is not None
        self.true_steps += response.valid and true is True
        if action is None:
            action = SkippableStep.skip(self.env.action_space) if self.penalize else self._random_action(response)
        self.observation, reward, terminated, truncated, self.info = self.env.step(action)
        truncated = truncated or (len(self.transitions) + 1 >= self.limit and not terminated)
        self.ended = bool(terminated or truncated)
        self.transitions.append(
            Transition(
                env_index=self.index,
                step=len(self.transitions),
                image=np.zeros((0, 0, 3), np.uint8),
                prompt=prompt,
                response=response,
                response_ids=np.zeros(0, np.int64),
                reward=float(reward) + (0.0 if legal else self.fine),
                terminated=bool(terminated),
                truncated=bool(truncated),
                bootstrap=False,
                legal=legal,
                info=info,
                final_info=self.info if self.ended else None,
                episode_step=len(self.transitions),
            )
        )

    def _random_action(self, response: Response) -> Any:
        text = str(self.rng.choice(np.array(self.task.legal_actions(self.info), dtype=object)))
        return self.task.to_env_action(replace(response, action=text, error=None), self.info)

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
