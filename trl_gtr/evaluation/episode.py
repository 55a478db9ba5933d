"""One episode of evaluation, from reset to end. It is fully determined by seed, number and the agent's texts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from ..rollouts.playing import PlayingRules
from ..rollouts.worker_base import WorkerLost, WorkerRefused
from ..tasks.base import is_true_thought
from ..tasks.memory import Memory
from ..types import Transition
from .reports import EpisodeResult


def start_options(starts: Sequence[Mapping[str, Any]] | None, seed: int, index: int) -> dict[str, Any] | None:
    """The start of episode `index`. Each round goes through all starts in a new order."""
    if starts is None:
        return None
    finished, place = divmod(index, len(starts))
    order = np.random.default_rng([seed, finished, 4]).permutation(len(starts))
    return dict(starts[int(order[place])])


class Episode:
    """One episode, from reset to end."""

    def __init__(
        self, rules: PlayingRules, env: gym.Env, index: int, seed: int, options: dict[str, Any] | None
    ) -> None:
        self.rules, self.task, self.env = rules, rules.task, env
        self.index, self.seed, self.options = index, seed, options
        self.rng = np.random.default_rng([seed, index, 3])
        self.observation: Any = None
        self.info: dict[str, Any] = {}
        self.memory = Memory(self.task)
        self.transitions: list[Transition] = []
        self.judged_steps = self.true_steps = self.losses = 0
        self.solvable, self.ended = True, False

    @property
    def prompt(self) -> str:
        """What the agent is told now, with the turns before."""
        return self.memory.prompt(self.observation, self.info)

    def begin(self) -> None:
        self.memory.clear()
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
        self.memory.add(np.array(self.observation), info, text)
        self.observation, reward, terminated, truncated, self.info = self.env.step(choice.action)
        self.ended = bool(terminated or truncated)
        self.transitions.append(
            Transition(
                env_index=self.index,
                step=len(self.transitions),
                image=np.zeros((0, 0, 3), np.uint8),
                prompt=str(prompt),
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
