"""RolloutCollector: N environments ‖ engine ‖ corrector → Rollout.

Every vector step makes one batched `generate` call for all environments. Corrections are requested before the
environments step and collected when the rollout ends, so a slow corrector overlaps with the generation of later steps.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import cloudpickle
import gymnasium as gym
import numpy as np

from ..correctors.background import DaemonPool
from ..correctors.base import Corrector
from ..distributed.progress import Progress
from ..engines.base import Engine
from ..tasks.base import Task
from ..tasks.memory import Memory
from ..types import Cancellation, CorrectionRequest, Generation, Response, Rollout, Transition
from .clock import Clock
from .pending_corrections import PendingCorrections
from .playing import Choice, PlayingRules
from .replay import RESTARTED, LocalVectorEnv
from .vector_envs import AUTO, Vectorization, make_vector_env, unpack_infos
from .workers import WorkerVectorEnv

logger = logging.getLogger(__name__)

MIN_CORRECTION_WORKERS = 32
"""Enough that a call from an earlier rollout that never returns doesn't block others."""
MAX_CORRECTION_WORKERS = 256
"""Upper limit on threads in a run."""
T = TypeVar("T")
R = TypeVar("R")
_NO_IMAGE = np.zeros((0, 0, 3), np.uint8)


class Answers(NamedTuple):
    """What some environments' agents were asked and generated, in the environments' order."""

    prompts: list[str]
    generations: list[Generation]
    responses: list[Response]


class Part(NamedTuple):
    """Environments that are stepped together."""

    envs: LocalVectorEnv | WorkerVectorEnv
    places: range
    """Where they are among all of the process's environments."""


@dataclass
class Collection:
    """A rollout while it is being collected."""

    engine: Engine
    pending: PendingCorrections
    deadline: float
    """On the monotonic clock."""
    stopped: Callable[[], bool]
    progress: Progress
    clock: Clock = field(default_factory=Clock)
    transitions: list[Transition] = field(default_factory=list)
    episodes: list[Sequence[Transition]] = field(default_factory=list)
    """Those that have ended."""

    def is_over(self, begun: bool) -> bool:
        """Whether to end before the next vector step. Once stopped, always; out of time, only if one was `begun`."""
        return self.stopped() or (begun and time.monotonic() >= self.deadline)


class RolloutCollector:
    """Steps `num_envs` environments of a task and keeps their state between rollouts.

    Args:
        task: Provides environments, prompts and actions.
        corrector: Judges every parsable thought; `None` for no corrections.
        num_envs: Number of environments in this process.
        first_index: Global index of the first of them. Seeds depend on the global index, so a run plays the same deals
            however many processes it is split over.
        invalid_action: `"random"` or `"penalty"`, see `GTRConfig.invalid_action`.
        correction_workers: Vector steps whose corrections may be pending at once, one thread each; by default all of a
            rollout, up to `MAX_CORRECTION_WORKERS`.
        pickle_environments: See `GTRConfig.pickle_environments`.
        exact_resume: Raise if an episode replayed by `load_state_dict` differs from the original. `False` only warns.
        vectorization: Where the environments run.
    """

    whole_episodes = False
    """Whether episodes always end within a rollout."""

    def __init__(
        self,
        task: Task,
        corrector: Corrector | None = None,
        *,
        num_envs: int,
        first_index: int = 0,
        seed: int,
        invalid_action: str = "random",
        correction_workers: int | None = None,
        pickle_environments: bool = False,
        exact_resume: bool = True,
        vectorization: Vectorization = AUTO,
    ) -> None:
        self.task, self.corrector, self.first_index, self.seed = task, corrector, first_index, seed
        self.rules = PlayingRules(task, invalid_action, self.whole_episodes)
        self.pickle_environments, self.exact_resume = pickle_environments, exact_resume
        self._rewound: dict[str, Any] | None = None
        self.num_envs = num_envs
        self.in_workers = vectorization.kind_for(task) != "local"  # where an episode may be lost
        self.parts = self._each(
            lambda places: Part(make_vector_env(self.rules, len(places), pickle_environments, vectorization), places),
            self._split(num_envs),
        )
        self.correction_workers = correction_workers
        self.pool = DaemonPool(correction_workers or MIN_CORRECTION_WORKERS, "corrector")
        self._concurrency_advised = -1
        indices = range(first_index, first_index + num_envs)
        self.rngs = [np.random.default_rng([seed, index, 1]) for index in indices]
        self.images: list[np.ndarray] = [_NO_IMAGE] * num_envs
        self.infos: list[dict[str, Any]] = [{}] * num_envs
        self.memories = [Memory(task) for _ in range(num_envs)]
        self.episodes: list[list[Transition]] = [[] for _ in range(num_envs)]
        self.ended = [0] * num_envs
        self._start()

    def _each(self, do: Callable[[T], R], parts: Sequence[T]) -> list[R]:
        """Do this for each part, for all at the same time if their environments are in other processes."""
        if len(parts) == 1 or not self.in_workers:
            return list(map(do, parts))
        with ThreadPoolExecutor(len(parts)) as threads:
            return list(threads.map(do, parts))

    @staticmethod
    def _split(num_envs: int) -> list[range]:
        """The parts that the environments are divided into."""
        return [range(num_envs)]

    def _start(self) -> None:
        """Begin the first episodes."""

        def begin(part: Part) -> None:
            env_seeds: list[int | None] = [
                int(np.random.SeedSequence([self.seed, self.first_index + i]).generate_state(1)[0])
                for i in part.places
            ]
            self._observe(part, *part.envs.reset(seed=env_seeds))

        self._each(begin, self.parts)

    def _observe(self, part: Part, observations: Any, infos: Mapping[str, Any]) -> None:
        for i, image, info in zip(part.places, observations, unpack_infos(infos, len(part.places)), strict=True):
            self.images[i], self.infos[i] = np.array(image), info

    def collect(
        self,
        engine: Engine,
        steps: int,
        *,
        timeout: float = math.inf,
        correction_timeout: float = math.inf,
        stopped: Callable[[], bool] = lambda: False,
        progress: Progress | None = None,
    ) -> Rollout:
        """Play `steps` steps in every environment, or as many as `timeout` seconds allow, at least one.

        Args:
            engine: Generates the responses.
            timeout: Checked between vector steps. The rollout is then shorter, but otherwise valid.
            correction_timeout: Seconds to wait for corrections at the end; those still missing are dropped.
            stopped: Checked between vector steps and while waiting; `True` ends the rollout immediately.
            progress: Told of every vector step, and of the corrections that come back at the end.
        """
        if self._rewound is not None:
            self.load_state_dict(self._rewound)
        if self.corrector is not None:
            self.corrector.reopen()  # an earlier run may have been interrupted
        if self.correction_workers is None:
            self.pool.workers = min(max(steps * len(self.parts), MIN_CORRECTION_WORKERS), MAX_CORRECTION_WORKERS)
        pending = PendingCorrections(self.corrector, self.pool, max(len(part.places) for part in self.parts))
        run = Collection(engine, pending, time.monotonic() + timeout, stopped, progress or Progress())
        try:
            self._collect(run, steps)
            return self._rollout(run, correction_timeout)
        finally:
            pending.give_up()  # after an error, drop pending requests

    def _collect(self, run: Collection, steps: int) -> None:
        """Play: what a collector of another schedule overrides."""
        [part] = self.parts
        run.progress.begin("collect", steps * self.num_envs, "step")
        for step in range(steps):
            if run.is_over(begun=step > 0):
                break
            with run.clock("generate"):
                answers = self._respond(run.engine, part.places)
            with run.clock("environment"):
                self._ask(run.pending, part.places, answers)
                played = self._play(step, part, answers)
                run.transitions += played
                run.episodes += self._close_episodes(played)
            run.progress.advance(len(played), **self._spending())

    def _rollout(self, run: Collection, correction_timeout: float) -> Rollout:
        """The steps joined with their corrections and with the observations to bootstrap from."""
        with run.clock("wait_for_corrections"):
            run.pending.wait(correction_timeout, run.stopped, run.progress)
            corrections, stop_reason = run.pending.join()
        shortfall = run.pending.shortfall(corrections)
        if shortfall is not None and shortfall.concurrency > self._concurrency_advised:  # don't repeat it every update
            self._concurrency_advised = shortfall.concurrency
            logger.warning("%s", shortfall)
        if stop_reason is None and self.corrector is not None and self.corrector.exhausted:
            stop_reason = "the corrector's budget is spent"
        return Rollout(
            run.transitions,
            corrections,
            last_images=[] if self.whole_episodes else list(self.images),
            last_prompts=[] if self.whole_episodes else self._prompts(range(self.num_envs)),
            episodes=run.episodes,
            in_workers=self.in_workers,
            stop_reason=stop_reason,
            times=run.clock.seconds,
        )

    def _spending(self) -> dict[str, str]:
        """What the corrector has spent since the run began, if it costs anything."""
        metrics = {} if self.corrector is None else self.corrector.metrics()
        if "corrector/usd_spent" in metrics:
            return {"corrector": f"${metrics['corrector/usd_spent']:.2f}"}
        if "corrector/tokens" in metrics:  # a server whose prices aren't known
            return {"corrector": f"{metrics['corrector/tokens']:.0f} tokens"}
        return {}

    @property
    def first_observation(self) -> tuple[str, np.ndarray]:
        """Prompt and image of the step that the first environment is about to play."""
        return self._prompts([0])[0], self.images[0]

    def _prompts(self, envs: Sequence[int]) -> list[str]:
        return [self.memories[i].prompt(self.images[i], self.infos[i]) for i in envs]

    def _respond(self, engine: Engine, envs: Sequence[int]) -> Answers:
        """Generate the responses of some environments."""
        prompts = self._prompts(envs)
        generations = engine.generate(prompts, [self.images[i] for i in envs])
        return Answers(prompts, generations, [self.task.format.parse(generation.text) for generation in generations])

    def _ask(self, pending: PendingCorrections, envs: Sequence[int], answers: Answers) -> None:
        """Request corrections of these environments' responses."""
        requests = self._requests(envs, answers.prompts, answers.responses, pending.cancellation)
        pending.ask(requests, len(envs))

    def _requests(
        self, envs: Sequence[int], prompts: list[str], responses: list[Response], cancellation: Cancellation
    ) -> dict[int, CorrectionRequest]:
        """A request for every parsable thought of this vector step, by position among the played environments."""
        if self.corrector is None:
            return {}
        return {
            place: CorrectionRequest(
                image=self.images[i],
                prompt=prompts[place],
                response=response,
                public_state=self.task.public_state(self.infos[i]),
                info=self.infos[i],
                task=self.task,
                cancellation=cancellation,
            )
            for place, (i, response) in enumerate(zip(envs, responses, strict=True))
            if response.valid
        }

    def _play(self, step: int, part: Part, answers: Answers) -> list[Transition]:
        """Step a part's environments with their responses' actions."""
        space = part.envs.single_action_space
        chosen = [
            self.rules.choose(response, self.infos[i], space, self.rngs[i])
            for i, response in zip(part.places, answers.responses, strict=True)
        ]
        actions: Any = [choice.action for choice in chosen]
        if isinstance(space, gym.spaces.Discrete):
            actions = np.array(actions)
        before = [(self.images[i], self.infos[i]) for i in part.places]
        for i, seen, response in zip(part.places, before, answers.responses, strict=True):
            self.memories[i].add(*seen, response.text)  # now, because some environments change what they returned
        observations, rewards, terminated, truncated, vector_infos = part.envs.step(actions)
        self._observe(part, observations, vector_infos)
        played = []
        for place, (i, prompt, generation, response) in enumerate(zip(part.places, *answers, strict=True)):
            final_info = self.infos[i].pop("final_info", None)
            final_image = self.infos[i].pop("final_obs", None)
            ended = bool(terminated[place] or truncated[place])
            bootstrap = bool(truncated[place]) and not terminated[place] and (final_info or {}).get("bootstrap", True)
            played.append(
                self._record(
                    i,
                    generation,
                    response,
                    chosen[place],
                    (rewards[place], bool(terminated[place]), bool(truncated[place])),
                    step=step,
                    image=before[place][0],
                    prompt=prompt,
                    info=before[place][1],
                    bootstrap=bootstrap,
                    final_info=final_info if ended else None,
                    final_image=np.array(final_image) if bootstrap else None,
                    final_prompt=self.memories[i].prompt(final_image, final_info) if bootstrap else None,
                )
            )
            if ended:
                self.memories[i].clear()
        return played

    def _record(
        self,
        i: int,
        generation: Generation,
        response: Response,
        choice: Choice,
        outcome: tuple[float, bool, bool],
        **fields: Any,
    ) -> Transition:
        """Environment i's step; `outcome` is the environment's reward, `terminated` and `truncated`."""
        reward, terminated, truncated = outcome
        return Transition(
            env_index=self.first_index + i,
            response=response,
            response_ids=generation.ids,
            sampler_logprobs=generation.logprobs,
            reward=self.rules.reward(reward, choice.legal),
            terminated=terminated,
            truncated=truncated,
            legal=choice.legal,
            hit_length_limit=generation.hit_length_limit,
            episode=self.ended[i],
            episode_step=len(self.episodes[i]),
            substitute=choice.substitute,
            **fields,
        )

    @staticmethod
    def _without_images(transition: Transition) -> Transition:
        """Episodes are kept across rollouts, their images are not, nor the turns before a prompt."""
        final = transition.final_prompt
        return replace(
            transition,
            image=_NO_IMAGE,
            final_image=None,
            prompt=str(transition.prompt),
            final_prompt=None if final is None else str(final),
        )

    def _close_episodes(self, played: list[Transition]) -> list[Sequence[Transition]]:
        finished: list[Sequence[Transition]] = []
        for transition in played:
            i = transition.env_index - self.first_index
            self.episodes[i].append(self._without_images(transition))
            if transition.terminated or transition.truncated:
                finished.append(self.episodes[i])
                self.episodes[i] = []
                self.ended[i] += 1
        return finished

    def state_dict(self) -> dict[str, Any]:
        """Everything the next rollout depends on, including environments mid-episode, as plain data.

        Cheap: later steps replace the objects it refers to and never mutate them.
        """
        if self._rewound is not None:
            return self._rewound
        try:
            state = {
                "environments": list(chain(*self._each(lambda part: part.envs.get_states(), self.parts))),
                "random": [dict(rng.bit_generator.state) for rng in self.rngs],
                "episodes": [list(episode) for episode in self.episodes],
                "ended": list(self.ended),
            }
            if self.task.history_turns:
                state["memories"] = [memory.turns for memory in self.memories]
            return {"pickled": cloudpickle.dumps(state)} if self.pickle_environments else state
        except Exception as error:
            remedy = "" if self.pickle_environments else "`pickle_environments=True`, or "
            raise ValueError(
                f"The environments of task {self.task.name!r} can't be saved, so a checkpoint can't hold them: "
                f"{str(error).rstrip('.')}. Fix that, or train with {remedy}`save_strategy='no'`."
            ) from error

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Unfinished episodes are replayed."""
        if "pickled" in state:
            if not self.pickle_environments:
                raise ValueError(
                    "The checkpoint holds pickled environments, which can execute arbitrary code: resume with "
                    "`pickle_environments=True` only if you trust its author."
                )
            state = cloudpickle.loads(state["pickled"])
        stored = len(state["environments"])
        if stored != self.num_envs:
            raise ValueError(f"The checkpoint holds {stored} environments for this process, not {self.num_envs}.")
        try:
            self._each(partial(self._restore, state["environments"]), self.parts)
        except ValueError as error:
            raise ValueError(
                f"The checkpoint's episodes can't be continued: {error} If package versions have changed since it was "
                "written, restore them, or continue anyway with `allow_changed_config=True`."
            ) from error
        for rng, random in zip(self.rngs, state["random"], strict=True):
            rng.bit_generator.state = random
        self.episodes, self.ended = [list(episode) for episode in state["episodes"]], list(state["ended"])
        for i, memory in enumerate(self.memories):
            memory.restore(state["memories"][i] if "memories" in state else ())
            if self.infos[i].pop(RESTARTED, False):
                self.episodes[i] = []
                memory.clear()
        self._rewound = None

    def _restore(self, environments: Sequence[Any], part: Part) -> None:
        states = environments[part.places.start : part.places.stop]
        self._observe(part, *part.envs.set_states(states, self.exact_resume))

    def rewind(self, state: dict[str, Any]) -> None:
        """Go back to an earlier state. Its episodes are replayed lazily."""
        self._rewound = state

    def close(self) -> None:
        """Close the environments, including any worker processes."""
        self._each(lambda part: part.envs.close(), self.parts)
