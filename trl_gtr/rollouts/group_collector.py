"""GroupCollector: whole episodes in groups that start in the same state.

G neighbouring environments are a *lane*: they are reset with the same seed and play one episode each, a group. Every
vector step generates only for episodes that haven't ended. A rollout plays one group per lane, and further ones in
place of groups that teach nothing, if asked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.utils.env_checker import data_equivalence

from ..correctors.base import Corrector
from ..distributed.progress import Progress
from ..engines.base import Engine
from ..tasks.base import Task
from ..types import Generation, Response, Rollout, Transition
from .clock import Clock
from .collector import RolloutCollector
from .pending_corrections import PendingCorrections

logger = logging.getLogger(__name__)

Group = Sequence[Sequence[Transition]]
"""Whole episodes that started in the same state, without images."""


class GroupCollector(RolloutCollector):
    """Plays groups of whole episodes. Between rollouts no episode is under way.

    Args:
        task, corrector, options: See `RolloutCollector`; `num_envs` must be a multiple of `group_size`.
        group_size: Episodes per group, G.
        refills: Further groups a lane may play in a rollout, each in place of one that teaches nothing.
        teaches: Whether a group has anything to learn from.
    """

    whole_episodes = True

    def __init__(
        self,
        task: Task,
        corrector: Corrector | None = None,
        *,
        group_size: int,
        refills: int = 0,
        teaches: Callable[[Group], bool] = lambda group: True,
        **options: Any,
    ) -> None:
        self.group_size, self.refills, self.teaches = group_size, refills, teaches
        self.played: list[int] = []
        """Steps of each environment in this rollout."""
        self.active: list[bool] = []
        """Whether each environment's episode goes on."""
        self.refills_left: list[int] = []
        super().__init__(task, corrector, **options)

    def _start(self) -> None:
        """Begin a group in every lane, so that an environment that doesn't restart the same fails early."""
        if self.envs.num_envs % self.group_size or self.first_index % self.group_size:
            raise ValueError(
                f"{self.envs.num_envs} environments can't be divided into groups of {self.group_size}: set `num_envs` "
                "to a multiple of `group_size` times the number of processes."
            )
        self.active = [False] * self.envs.num_envs
        self._begin_groups(range(self.envs.num_envs // self.group_size))

    def _lane(self, lane: int) -> range:
        """The environments of a lane."""
        return range(lane * self.group_size, (lane + 1) * self.group_size)

    def _begin_groups(self, lanes: Sequence[int]) -> None:
        """Reset the environments of these lanes, those of a lane with the same seed."""
        seeds = {i: self._seed(lane) for lane in lanes for i in self._lane(lane)}
        for i, (observation, info) in self.envs.reset_some(seeds).items():
            self.images[i], self.infos[i] = np.array(observation), info
            self.episodes[i], self.active[i] = [], True
        for lane in lanes:
            first, *others = ((self.images[i], self.infos[i]) for i in self._lane(lane))
            if not all(data_equivalence(first, other) for other in others):
                raise ValueError(
                    f"The environments of task {self.task.name!r} start differently although they are reset with the "
                    "same seed, so their episodes can't be compared. `reset(seed=…)` must decide everything: draw "
                    "random numbers from `self.np_random` only. Or use advantage_estimator='gae'."
                )

    def _seed(self, lane: int) -> int:
        """Depends on the global index of the lane, and on how many groups it has played."""
        first = self._lane(lane)[0]
        index = (self.first_index + first) // self.group_size
        return int(np.random.SeedSequence([self.seed, index, self.ended[first], 2]).generate_state(1)[0])

    def _prompt(self, i: int) -> str:
        return self.task.prompt(self.images[i], self.infos[i])

    def _collect(
        self,
        engine: Engine,
        steps: int,
        pending: PendingCorrections,
        deadline: float,
        correction_timeout: float,
        stopped: Callable[[], bool],
        progress: Progress,
    ) -> Rollout:
        clock = Clock()
        transitions: list[Transition] = []
        finished: list[Sequence[Transition]] = []
        lanes = range(self.envs.num_envs // self.group_size)
        self.played, self.refills_left = [0] * self.envs.num_envs, [self.refills] * len(lanes)
        progress.begin("collect", self.envs.num_envs * (1 + self.refills), "episode")  # refills may not be needed
        with clock("environment"):
            self._begin_groups(lanes)
        while any(self.active):
            if stopped() or (transitions and time.monotonic() >= deadline):
                break
            envs = [i for i, active in enumerate(self.active) if active]
            with clock("generate"):
                prompts = [self._prompt(i) for i in envs]
                generations = engine.generate(prompts, [self.images[i] for i in envs])
                responses = [self.task.format.parse(generation.text) for generation in generations]
            with clock("environment"):
                pending.ask(self._requests(envs, prompts, responses, pending.cancellation), len(envs))
                transitions += self._play_some(envs, prompts, generations, responses)
                finished += (ended := self._close_groups())
            progress.advance(len(ended), **self._spending())
        self._cut(lanes)
        return self._rollout(transitions, finished, pending, clock, correction_timeout, stopped, progress)

    def _play_some(
        self, envs: list[int], prompts: list[str], generations: list[Generation], responses: list[Response]
    ) -> list[Transition]:
        """Step some environments with their responses' actions."""
        space = self.envs.single_action_space
        chosen = [
            self.rules.choose(r, self.infos[i], space, self.rngs[i]) for i, r in zip(envs, responses, strict=True)
        ]
        results = self.envs.step_some({i: choice.action for i, choice in zip(envs, chosen, strict=True)})
        transitions = []
        for i, prompt, generation, response, choice in zip(envs, prompts, generations, responses, chosen, strict=True):
            observation, reward, terminated, truncated, info = results[i]
            transition = self._record(
                i,
                generation,
                response,
                choice,
                (reward, terminated, truncated),
                step=self.played[i],
                image=self.images[i],
                prompt=prompt,
                info=self.infos[i],
                bootstrap=False,  # episodes are whole
                final_info=info if terminated or truncated else None,
            )
            transitions.append(transition)
            self.episodes[i].append(self._without_images(transition))
            self.images[i], self.infos[i] = np.array(observation), info
            self.active[i] = not (terminated or truncated)
            self.played[i] += 1
        return transitions

    def _close_groups(self) -> list[Sequence[Transition]]:
        """The episodes of groups that have ended. Lanes whose group teaches nothing begin another if they may."""
        finished: list[Sequence[Transition]] = []
        refilled = []
        for lane, left in enumerate(self.refills_left):
            group = [self.episodes[i] for i in self._lane(lane)]
            if any(self.active[i] for i in self._lane(lane)) or not all(group):
                continue
            finished += group
            self._end_group(lane)
            if left and not self.teaches(group):
                self.refills_left[lane] -= 1
                refilled.append(lane)
        if refilled:
            self._begin_groups(refilled)
        return finished

    def _end_group(self, lane: int) -> None:
        for i in self._lane(lane):
            self.episodes[i], self.active[i] = [], False
            self.ended[i] += 1

    def _cut(self, lanes: Sequence[int]) -> None:
        """Give up groups that are still being played."""
        cut = [lane for lane in lanes if any(self.episodes[i] or self.active[i] for i in self._lane(lane))]
        for lane in cut:
            self._end_group(lane)
        if cut:
            logger.warning(
                "%d of %d groups were cut short and are not learned from. If time ran out, raise `rollout_timeout`.",
                len(cut),
                len(lanes),
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything the next rollout depends on, as plain data."""
        if self._rewound is not None:
            return self._rewound
        return {"random": [dict(rng.bit_generator.state) for rng in self.rngs], "ended": list(self.ended)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        if len(state["ended"]) != self.envs.num_envs:
            raise ValueError(
                f"The checkpoint holds {len(state['ended'])} environments for this process, not {self.envs.num_envs}."
            )
        for rng, random in zip(self.rngs, state["random"], strict=True):
            rng.bit_generator.state = random
        self.ended, self._rewound = list(state["ended"]), None
