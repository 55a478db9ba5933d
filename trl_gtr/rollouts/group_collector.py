"""GroupCollector: whole episodes in groups that start in the same state.

G neighbouring environments are a *lane*: they are reset with the same seed and play one episode each, a group. Every
vector step generates only for episodes that haven't ended. A rollout plays one group per lane, and further ones in
place of groups that teach nothing, if asked.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.utils.env_checker import data_equivalence

from ..correctors.base import Corrector
from ..tasks.base import Task
from ..types import Response, Transition
from .collector import Answers, Collection, RolloutCollector
from .playing import PlayingRules

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
        if self.num_envs % self.group_size or self.first_index % self.group_size:
            raise ValueError(
                f"{self.num_envs} environments can't be divided into groups of {self.group_size}: set `num_envs` "
                "to a multiple of `group_size` times the number of processes."
            )
        self.active = [False] * self.num_envs
        self._begin_groups(self._lanes)

    @property
    def _lanes(self) -> range:
        return range(self.num_envs // self.group_size)

    def check_timeout(self, timeout: float) -> None:
        """Raise if no group could end in time: played at random, it takes longer in the environments alone."""
        if timeout == math.inf:
            return
        # Twice, because the first may be slower, e.g. where it loads files.
        if not any(self._a_random_group_ends(timeout) for _ in range(2)):
            raise ValueError(
                f"A group of episodes takes longer than `rollout_timeout` ({timeout:g} s) in the environments alone, "
                "so none could end in time. Raise it, or use a task with a lower step limit."
            )
        self._begin_groups(self._lanes)

    def _a_random_group_ends(self, timeout: float) -> bool:
        """Whether any lane's group, played at random, ends within so many seconds."""
        deadline = time.monotonic() + timeout
        self._begin_groups(self._lanes)
        rules, vector_env = PlayingRules(self.task, whole_episodes=True), self.parts[0].envs
        rng, nothing = np.random.default_rng([self.seed, self.first_index, 3]), Response("", error="no response")
        infos = dict(enumerate(self.infos))
        while time.monotonic() < deadline:
            space = vector_env.single_action_space
            chosen = {i: rules.choose(nothing, info, space, rng).action for i, info in infos.items()}
            results = vector_env.step_some(chosen)
            infos = {i: info for i, (_, _, ended, cut, info) in results.items() if not (ended or cut)}
            if any(infos.keys().isdisjoint(self._lane(lane)) for lane in self._lanes):
                return True
        return False

    def _lane(self, lane: int) -> range:
        """The environments of a lane."""
        return range(lane * self.group_size, (lane + 1) * self.group_size)

    def _begin_groups(self, lanes: Sequence[int]) -> None:
        """Reset the environments of these lanes, those of a lane with the same seed."""
        seeds = {i: self._seed(lane) for lane in lanes for i in self._lane(lane)}
        for i, (observation, info) in self.parts[0].envs.reset_some(seeds).items():
            self.images[i], self.infos[i] = np.array(observation), info
            self.episodes[i], self.active[i] = [], True
            self.memories[i].clear()
        for lane in lanes:
            _check_same_start(self.task, [(self.images[i], self.infos[i]) for i in self._lane(lane)])

    def _seed(self, lane: int) -> int:
        """Depends on the global index of the lane, and on how many groups it has played."""
        first = self._lane(lane)[0]
        index = (self.first_index + first) // self.group_size
        return int(np.random.SeedSequence([self.seed, index, self.ended[first], 2]).generate_state(1)[0])

    def _collect(self, run: Collection, steps: int) -> None:
        """Play one group per lane, whatever `steps`: a group's episodes are as long as they are."""
        lanes = self._lanes
        self.played, self.refills_left = [0] * self.num_envs, [self.refills] * len(lanes)
        run.progress.begin("collect", self.num_envs * (1 + self.refills), "episode")  # refills may not be needed
        with run.clock("environment"):
            self._begin_groups(lanes)
        while any(self.active):
            if run.is_over(begun=bool(run.transitions)):
                break
            envs = [i for i, active in enumerate(self.active) if active]
            with run.clock("generate"):
                answers = self._respond(run.engine, envs)
            with run.clock("environment"):
                self._ask(run.pending, envs, answers)
                run.transitions += self._play_some(envs, answers)
                run.episodes += (ended := self._close_groups())
            run.progress.advance(len(ended), **self._spending())
        self._cut(lanes)

    def _play_some(self, envs: list[int], answers: Answers) -> list[Transition]:
        """Step some environments with their responses' actions."""
        vector_env = self.parts[0].envs
        chosen = [
            self.rules.choose(response, self.infos[i], vector_env.single_action_space, self.rngs[i])
            for i, response in zip(envs, answers.responses, strict=True)
        ]
        for i, response in zip(envs, answers.responses, strict=True):
            self.memories[i].add(self.images[i], self.infos[i], response.text)  # before the step may change them
        results = vector_env.step_some({i: choice.action for i, choice in zip(envs, chosen, strict=True)})
        transitions = []
        for i, prompt, generation, response, choice in zip(envs, *answers, chosen, strict=True):
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
        if len(state["ended"]) != self.num_envs:
            raise ValueError(
                f"The checkpoint holds {len(state['ended'])} environments for this process, not {self.num_envs}."
            )
        for rng, random in zip(self.rngs, state["random"], strict=True):
            rng.bit_generator.state = random
        self.ended, self._rewound = list(state["ended"]), None


def check_restarts(task: Task, seed: int) -> None:
    """Raise if two of the task's environments start differently although they are reset with the same seed."""
    rules, starts = PlayingRules(task, whole_episodes=True), []
    for _ in range(2):
        env = rules.make_env()
        try:
            observation, info = env.reset(seed=seed)
            starts.append((np.array(observation), info))
        finally:
            env.close()
    _check_same_start(task, starts)


def _check_same_start(task: Task, starts: Sequence[tuple[np.ndarray, Mapping[str, Any]]]) -> None:
    """Raise unless all these first images and infos are the same, hidden state included."""
    first, *others = starts
    for other in others:
        if not data_equivalence(first, other):
            raise ValueError(
                f"The environments of task {task.name!r} start differently although they are reset with the same seed "
                f"({_first_difference(first, other)} differs), so their episodes can't be compared. `reset(seed=…)` "
                "must decide everything: draw random numbers from `self.np_random` only, and put no NaN into `info`, "
                "which equals nothing. Or use advantage_estimator='gae'."
            )


def _first_difference(one: tuple[np.ndarray, Mapping[str, Any]], other: tuple[np.ndarray, Mapping[str, Any]]) -> str:
    if not np.array_equal(one[0], other[0]):
        return "the picture"
    keys = sorted(one[1].keys() | other[1].keys())
    differs = (f"info[{key!r}]" for key in keys if not data_equivalence(one[1].get(key), other[1].get(key)))
    return next(differs, "which keys `info` has, or the picture's type,")
