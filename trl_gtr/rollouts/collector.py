"""RolloutCollector: N environments ‖ policy ‖ corrector → Rollout.

Every vector step makes one batched `generate` for all environments. Corrections are asked for before the environments
step and joined when the rollout ends, so that a slow corrector hides behind the generation of the steps that follow.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import cloudpickle
import gymnasium as gym
import numpy as np

from ..correctors.background import DaemonPool
from ..correctors.base import Corrector
from ..tasks.base import Task
from ..types import Cancellation, CorrectionRequest, Generation, Response, Rollout, Transition
from .pending_corrections import PendingCorrections
from .replay import LocalVectorEnv
from .workers import WorkerVectorEnv

logger = logging.getLogger(__name__)

INVALID_ACTION_PENALTY = -1.0
DEFAULT_STEP_LIMIT = 300
MIN_CORRECTION_WORKERS = 32
"""So that a call of an earlier rollout that never ends is in nobody's way."""
MAX_CORRECTION_WORKERS = 256
"""Threads, over a whole run."""
_NO_IMAGE = np.zeros((0, 0, 3), np.uint8)


class Generate(Protocol):
    """A policy as the collector sees it: one answer per prompt and image."""

    def __call__(self, prompts: list[str], images: list[np.ndarray]) -> list[Generation]: ...


class RolloutCollector:
    """Steps `num_envs` environments of a task and remembers where each of them is between rollouts.

    Args:
        task: Makes the environments, their prompts and actions.
        generate: The policy.
        corrector: Judges every parsable thought; `None` asks nobody.
        num_envs: Environments of this process.
        first_index: Global index of the first of them. Seeds follow the global index, so that a run split over
            processes plays the same deals.
        invalid_action: `"random"` or `"penalty"`, see `GTRConfig.invalid_action`.
        correction_workers: Vector steps whose corrections may be under way at once, each in a thread of its own; by
            default all of a rollout, up to `MAX_CORRECTION_WORKERS`.
        pickle_environments: See `GTRConfig.pickle_environments`.
        exact_resume: Episodes that `load_state_dict` plays again must come out as they were. `False` only warns.
    """

    def __init__(
        self,
        task: Task,
        generate: Generate,
        corrector: Corrector | None = None,
        *,
        num_envs: int,
        first_index: int = 0,
        seed: int = 0,
        invalid_action: str = "random",
        correction_workers: int | None = None,
        pickle_environments: bool = False,
        exact_resume: bool = True,
    ) -> None:
        self.task, self.generate, self.corrector = task, generate, corrector
        self.first_index, self.penalize = first_index, invalid_action == "penalty"
        self.pickle_environments, self.exact_resume = pickle_environments, exact_resume
        self._rewound: dict[str, Any] | None = None
        self.envs = make_vector_env(task, self.penalize, num_envs, pickle_environments)
        self.correction_workers = correction_workers
        self.pool = DaemonPool(correction_workers or MIN_CORRECTION_WORKERS, "corrector")
        self._concurrency_named = -1
        indices = range(first_index, first_index + num_envs)
        self.rngs = [np.random.default_rng([seed, index, 1]) for index in indices]
        env_seeds: list[int | None] = [
            int(np.random.SeedSequence([seed, index]).generate_state(1)[0]) for index in indices
        ]
        observations, infos = self.envs.reset(seed=env_seeds)
        self.images = [np.array(image) for image in observations]
        self.infos = unpack_infos(infos, num_envs)
        self.episodes: list[list[Transition]] = [[] for _ in range(num_envs)]
        self.ended = [0] * num_envs

    def collect(
        self,
        steps: int,
        *,
        timeout: float = math.inf,
        correction_timeout: float = math.inf,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Rollout:
        """Play `steps` steps in every environment, or as many as `timeout` seconds allow, at least one.

        Args:
            timeout: Looked at between vector steps. A rollout that it ends is shorter, and otherwise like any other.
            correction_timeout: Seconds to wait at the end for corrections; what isn't back by then is given up.
            stopped: Asked between vector steps and while waiting; `True` ends the rollout where it stands.
        """
        if self._rewound is not None:
            self.load_state_dict(self._rewound)
        if self.corrector is not None:
            self.corrector.reopen()  # an earlier run may have been interrupted
        if self.correction_workers is None:
            self.pool.workers = min(max(steps, MIN_CORRECTION_WORKERS), MAX_CORRECTION_WORKERS)
        pending = PendingCorrections(self.corrector, self.pool, len(self.images))
        try:
            return self._collect(steps, pending, time.monotonic() + timeout, correction_timeout, stopped)
        finally:
            pending.give_up()  # after an error nobody waits for what is under way

    def _collect(
        self,
        steps: int,
        pending: PendingCorrections,
        deadline: float,
        correction_timeout: float,
        stopped: Callable[[], bool],
    ) -> Rollout:
        clock = Clock()
        transitions: list[Transition] = []
        finished: list[Sequence[Transition]] = []
        for step in range(steps):
            if stopped() or (step > 0 and time.monotonic() >= deadline):
                break
            with clock("generate"):
                prompts = self._prompts()
                generations = self.generate(prompts, self.images)
                responses = [self.task.format.parse(generation.text) for generation in generations]
            with clock("environment"):
                pending.ask(self._requests(prompts, responses, pending.cancellation))
                played = self._play(step, prompts, generations, responses)
                transitions += played
                finished += self._close_episodes(played)
        with clock("wait_for_corrections"):
            pending.wait(correction_timeout, stopped)
            corrections, stop_reason = pending.join()
        shortfall = pending.shortfall(corrections)
        if shortfall is not None and shortfall.concurrency > self._concurrency_named:  # not once an update
            self._concurrency_named = shortfall.concurrency
            logger.warning("%s", shortfall)
        if stop_reason is None and self.corrector is not None and self.corrector.exhausted:
            stop_reason = "the corrector's budget is spent"
        return Rollout(
            transitions,
            corrections,
            last_images=list(self.images),
            last_prompts=self._prompts(),
            episodes=finished,
            stop_reason=stop_reason,
            times=clock.seconds,
        )

    def _prompts(self) -> list[str]:
        return [self.task.prompt(image, info) for image, info in zip(self.images, self.infos, strict=True)]

    def _requests(
        self, prompts: list[str], responses: list[Response], cancellation: Cancellation
    ) -> dict[int, CorrectionRequest]:
        """Every parsable thought of this vector step, by its environment."""
        if self.corrector is None:
            return {}
        return {
            i: CorrectionRequest(
                image=self.images[i],
                prompt=prompts[i],
                response=response,
                public_state=self.task.public_state(self.infos[i]),
                info=self.infos[i],
                task=self.task,
                cancellation=cancellation,
            )
            for i, response in enumerate(responses)
            if response.valid
        }

    def _play(
        self, step: int, prompts: list[str], generations: list[Generation], responses: list[Response]
    ) -> list[Transition]:
        """Step every environment with what its response says."""
        chosen = [self._choose(i, response) for i, response in enumerate(responses)]
        actions: Any = [action for action, _ in chosen]
        if isinstance(self.envs.single_action_space, gym.spaces.Discrete):
            actions = np.array(actions)
        images, infos = self.images, self.infos
        observations, rewards, terminated, truncated, vector_infos = self.envs.step(actions)
        self.images = [np.array(observation) for observation in observations]
        self.infos = unpack_infos(vector_infos, len(images))
        played = []
        fine = illegal_reward(self.task, self.penalize)
        for i, (generation, response, (_, legal)) in enumerate(zip(generations, responses, chosen, strict=True)):
            final_info = self.infos[i].pop("final_info", None)
            final_image = self.infos[i].pop("final_obs", None)
            ended = bool(terminated[i] or truncated[i])
            bootstrap = bool(truncated[i]) and not terminated[i] and (final_info or {}).get("bootstrap", True)
            played.append(
                Transition(
                    env_index=self.first_index + i,
                    step=step,
                    image=images[i],
                    prompt=prompts[i],
                    response=response,
                    response_ids=generation.ids,
                    reward=float(rewards[i]) + (0.0 if legal else fine),
                    terminated=bool(terminated[i]),
                    truncated=bool(truncated[i]),
                    bootstrap=bootstrap,
                    legal=legal,
                    info=infos[i],
                    final_info=final_info if ended else None,
                    final_image=np.array(final_image) if bootstrap else None,
                    final_prompt=self.task.prompt(final_image, final_info) if bootstrap else None,
                    hit_length_limit=generation.hit_length_limit,
                    episode=self.ended[i],
                    episode_step=len(self.episodes[i]),
                )
            )
        return played

    def _choose(self, i: int, response: Response) -> tuple[Any, bool]:
        """The environment's action, and whether it is the one that the response names."""
        info = self.infos[i]
        if response.valid:
            action = self.task.to_env_action(response, info)
            if action is not None:
                return action, True
        if self.penalize:
            return SkippableStep.skip(self.envs.single_action_space), False
        text = str(self.rngs[i].choice(np.array(self.task.legal_actions(info), dtype=object)))
        return self.task.to_env_action(replace(response, action=text, error=None), info), False

    def _close_episodes(self, played: list[Transition]) -> list[Sequence[Transition]]:
        finished: list[Sequence[Transition]] = []
        for i, transition in enumerate(played):
            # An episode is kept over rollouts, its pictures are not.
            self.episodes[i].append(replace(transition, image=_NO_IMAGE, final_image=None))
            if transition.terminated or transition.truncated:
                finished.append(self.episodes[i])
                self.episodes[i] = []
                self.ended[i] += 1
        return finished

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next rollout depends on, the environments in mid-episode included, as plain data.

        Cheap: what it refers to is replaced by the steps that follow, never changed.
        """
        if self._rewound is not None:
            return self._rewound
        try:
            state = {
                "environments": self.envs.get_states(),
                "random": [dict(rng.bit_generator.state) for rng in self.rngs],
                "episodes": [list(episode) for episode in self.episodes],
                "ended": list(self.ended),
            }
            return {"pickled": cloudpickle.dumps(state)} if self.pickle_environments else state
        except Exception as error:
            remedy = "" if self.pickle_environments else "`pickle_environments=True`, or "
            raise ValueError(
                f"The environments of task {self.task.name!r} can't be saved, so a checkpoint can't hold them: "
                f"{str(error).rstrip('.')}. Change that, or train with {remedy}`save_strategy='no'`."
            ) from error

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Episodes under way are played again."""
        if "pickled" in state:
            if not self.pickle_environments:
                raise ValueError(
                    "The checkpoint holds environments as a pickle, which can execute anything: resume with "
                    "`pickle_environments=True` only if you trust whoever wrote it."
                )
            state = cloudpickle.loads(state["pickled"])
        stored = len(state["environments"])
        if stored != self.envs.num_envs:
            raise ValueError(f"The checkpoint holds {stored} environments for this process, not {self.envs.num_envs}.")
        try:
            observations, infos = self.envs.set_states(state["environments"], self.exact_resume)
        except ValueError as error:
            raise ValueError(
                f"The episodes of the checkpoint can't go on: {error} If package versions have changed since it was "
                "written, restore them, or continue anyway with `allow_changed_config=True`."
            ) from error
        self.images = [np.array(image) for image in observations]
        self.infos = unpack_infos(infos, stored)
        for rng, random in zip(self.rngs, state["random"], strict=True):
            rng.bit_generator.state = random
        self.episodes, self.ended = [list(episode) for episode in state["episodes"]], list(state["ended"])
        self._rewound = None

    def rewind(self, state: dict[str, Any]) -> None:
        """Be in an earlier state from now on. Its episodes are played again when that is needed."""
        self._rewound = state

    def close(self) -> None:
        """End the environments, and the processes that they may have."""
        self.envs.close()


def in_processes(task: Task) -> bool:
    """Does the task want each of its environments in a process of its own?"""
    return task.vectorization == "processes"


def illegal_reward(task: Task, penalize: bool) -> float:
    """What is added to the reward of a step whose response named no legal action.

    Nothing where such a step is skipped: the skip has its own price.
    """
    return 0.0 if penalize else task.illegal_reward


def make_env(task: Task, penalize: bool, evaluation: bool = False) -> gym.Env:
    env = task.make_env(evaluation=evaluation)
    return SkippableStep(env) if penalize else env


def make_vector_env(
    task: Task, penalize: bool, num_envs: int, pickle_environments: bool = False
) -> LocalVectorEnv | WorkerVectorEnv:
    make = partial(make_env, task, penalize)
    if in_processes(task):
        return WorkerVectorEnv(make, num_envs, pickle_environments=pickle_environments, **task.worker_options)
    return LocalVectorEnv(make, num_envs, pickle_environments=pickle_environments)


class SkippableStep(gym.Wrapper):
    """Adds an action that steps nothing and pays −1: what an unreadable response costs under `"penalty"`.

    A skip counts as a step towards the game's own limit (`step_limit`), so that an episode is never longer than one
    without skips can be.
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        if isinstance(env.action_space, gym.spaces.Discrete):
            self.action_space = gym.spaces.Discrete(int(env.action_space.n) + 1)
        self.limit = step_limit(env)

    @staticmethod
    def skip(action_space: gym.Space) -> Any:
        """The action that skips: one past the last of a discrete space, the empty text elsewhere."""
        return int(action_space.n) - 1 if isinstance(action_space, gym.spaces.Discrete) else ""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.last = self.env.reset(**kwargs)
        self.steps = 0
        return self.last

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.steps += 1
        if action == self.skip(self.action_space):
            observation, info = self.last
            return observation, INVALID_ACTION_PENALTY, False, self.steps >= self.limit, info
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.last = observation, info
        return observation, reward, terminated, truncated or (self.steps >= self.limit and not terminated), info


def step_limit(env: gym.Env) -> int:
    """The most steps that an episode can have, skips included.

    What the game's rules allow, which an environment or a wrapper tells as `step_limit`, or the `max_episode_steps` it
    was made with, whichever is less; 300 for an environment with neither.
    """
    limits = [env.get_wrapper_attr("step_limit")] if env.has_wrapper_attr("step_limit") else []
    if env.spec is not None and env.spec.max_episode_steps is not None:
        limits.append(env.spec.max_episode_steps)
    return min(limits, default=DEFAULT_STEP_LIMIT)


class Clock:
    """Seconds by phase: `with clock("generate"): …`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, phase: str) -> Clock:
        self.phase = phase
        return self

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + time.perf_counter() - self.start


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
