"""AsynchronousCollector: every environment asks for its next response as soon as it is ready for it.

In lock-step, all environments wait for the longest response of a vector step. An engine that takes requests one by one
(`Engine.continuous`) can begin with the next of an environment while it still writes those of others.
"""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import nullcontext
from itertools import count
from typing import Any

import numpy as np
import torch

from ..correctors.background import DaemonPool
from ..correctors.base import Corrector
from ..tasks.base import Task
from ..types import Rollout, Transition
from .collector import Answers, Collection, Part, RolloutCollector

MAX_LEAD = 4
"""Steps by which an environment may be ahead of the slowest, which has to catch up when time is up."""


class AsynchronousCollector(RolloutCollector):
    """Collects the same rollouts as `RolloutCollector`, without waiting for all environments at every step.

    Each request has a seed that depends on environment and step, so what is sampled doesn't depend on the timing, as
    far as the engine's arithmetic doesn't depend on what it computes at the same time.

    Args:
        task, corrector, options: See `RolloutCollector`.
    """

    def __init__(self, task: Task, corrector: Corrector | None = None, **options: Any) -> None:
        super().__init__(task, corrector, **options)
        self.background = DaemonPool(self.num_envs, "environments")
        self._lock = threading.Lock()

    @staticmethod
    def _split(num_envs: int) -> list[range]:
        return [range(i, i + 1) for i in range(num_envs)]

    def _collect(self, run: Collection, steps: int) -> None:
        if not run.engine.continuous:
            raise ValueError(
                f"{type(run.engine).__name__} generates in batches, so environments must wait for each other: leave "
                "`asynchronous` out, or use engine='vllm'."
            )
        run.progress.begin("collect", steps * self.num_envs, "step")
        schedule = _Schedule(run, steps, self.num_envs)
        with run.clock("generate"):  # environments step in the meantime
            games = [self.background.submit(self._play_alone, run, schedule, part) for part in self.parts]
            wait(games, return_when=FIRST_EXCEPTION)
            schedule.end()  # after an error, nothing may go on in the background
            wait(games)
        for game in games:
            game.result()
        run.transitions += schedule.played

    def _play_alone(self, run: Collection, schedule: _Schedule, part: Part) -> None:
        """In the background: one environment's part of the rollout."""
        [i] = part.places
        for step in count():
            if not schedule.begins(i, step):
                return
            [prompt] = self._prompts(part.places)
            generation = run.engine.respond(prompt, self.images[i], schedule.seed(self.first_index + i, step))
            answers = Answers([prompt], [generation], [self.task.format.parse(generation.text)])
            with self._lock:
                self._ask(run.pending, part.places, answers)
                place = schedule.reserve()
            # Environments in this process may share state, so only one steps at a time.
            with nullcontext() if self.in_workers else self._lock:
                [transition] = self._play(step, part, answers)
            with self._lock:
                schedule.played[place] = transition
                run.episodes += self._close_episodes([transition])
                run.progress.advance(1, **self._spending())

    def _rollout(self, run: Collection, correction_timeout: float) -> Rollout:
        """In the order of a rollout, not of the answers."""
        rollout = super()._rollout(run, correction_timeout)
        order = sorted(range(len(rollout)), key=lambda place: _position(rollout.transitions[place]))
        rollout.transitions = [rollout.transitions[place] for place in order]
        rollout.corrections = [rollout.corrections[place] for place in order]
        rollout.episodes.sort(key=lambda episode: _position(episode[-1]))
        return rollout


class _Schedule:
    """How far each environment may play, and what has been played. Thread-safe but for `reserve` and `played`."""

    def __init__(self, run: Collection, steps: int, num_envs: int) -> None:
        self.run, self._limit, self._begun = run, steps, 0
        self._steps = [0] * num_envs
        """That each environment has played."""
        self._moved = threading.Condition()
        self._seed = int(torch.randint(2**62, ()))
        self.played: list[Any] = []
        """Transitions in the order in which their corrections were requested; `None` while one is under way."""

    def begins(self, env: int, step: int) -> bool:
        """Whether an environment begins this step. Out of time, all still play as many steps as the fastest has."""
        with self._moved:
            self._steps[env] = step
            self._moved.notify_all()
            self._moved.wait_for(lambda: step >= self._limit or step - min(self._steps) < MAX_LEAD)
            if self.run.stopped():
                self._limit = 0
            elif self.run.is_over(begun=step > 0):
                self._limit = min(self._limit, self._begun)
            if step >= self._limit:
                return False
            self._begun = max(self._begun, step + 1)
            return True

    def end(self) -> None:
        """Begin no more steps."""
        with self._moved:
            self._limit = 0
            self._moved.notify_all()

    def seed(self, env_index: int, step: int) -> int:
        """For sampling the response of this environment and step."""
        state = np.random.SeedSequence([self._seed, env_index, step]).generate_state(1, np.uint64)
        return int(state[0]) >> 2  # as engines take it

    def reserve(self) -> int:
        """The place of a step whose correction was requested just now."""
        self.played.append(None)
        return len(self.played) - 1


def _position(step: Transition) -> tuple[int, int]:
    return step.step, step.env_index
