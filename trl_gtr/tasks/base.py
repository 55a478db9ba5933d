"""The `Task` interface: everything textual around an environment.

A task turns an observation into a prompt and the agent's text into an environment action, and may know the ground
truth.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import gymnasium as gym
import numpy as np

from ..responses.format import ThoughtFormat
from ..types import Response, Transition
from .contract import Contract


@dataclass(frozen=True)
class Rubric:
    """What a corrector is asked about one step of a task."""

    role: str
    """Who the corrector is and what it is shown."""
    questions: Mapping[str, str]
    """Answer key → the question it answers, in order."""
    target_key: str | None = None
    """The answer key that holds the correct thought's target (Points24: `target_formula`)."""
    advice: str = ""
    """Facts about the game that the judge needs."""
    solution_key: str | None = None
    """The key of the YES/NO answer to "can the goal still be reached?" (Points24: `possible_solution`); `None` if it
    always can."""


@dataclass(frozen=True)
class Tool:
    """An exact tool that a corrector may call while judging a step."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments (an object)."""
    run: Callable[[Mapping[str, Any]], str]
    """Returns the tool's answer as text. Arguments come from a language model: for invalid ones, raise a `ValueError`;
    its message is shown to the corrector."""


class Task(Contract):
    """Everything textual around an environment, for rollouts, correctors and evaluation.

    A subclass defines `name`, `format`, `make_env`, `prompt`, `legal_actions`, `to_env_action` and `success`; the rest
    has neutral defaults. Tasks are stateless and picklable.
    """

    @classmethod
    def ensure(cls, thing: object) -> Self:
        """Return `thing` unchanged, or raise a `TypeError` that says how to get a task from it."""
        if isinstance(thing, str):
            raise TypeError(f"{thing!r} is a string: pass a task, make_task({thing!r}).")
        if isinstance(thing, gym.Env) or (isinstance(thing, type) and issubclass(thing, gym.Env)):
            name = thing.__name__ if isinstance(thing, type) else type(thing.unwrapped).__name__
            raise TypeError(
                f"{name} is an environment: subclass trl_gtr.Task and return the environment from `make_env`."
            )
        return super().ensure(thing)

    # -- required --------------------------------------------------------------------------------------------------

    name: str
    format: ThoughtFormat

    @abstractmethod
    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        """Create an environment. Training may cut hopeless episodes short; evaluation never does."""

    @abstractmethod
    def prompt(self, observation: Any, info: Mapping[str, Any]) -> str:
        """The user prompt for this state, from public information only. The image is passed separately."""

    @abstractmethod
    def legal_actions(self, info: Mapping[str, Any]) -> Sequence[str]:
        """The action texts that are legal in this state."""

    @abstractmethod
    def to_env_action(self, response: Response, info: Mapping[str, Any]) -> Any | None:
        """The environment action that the response names, or `None` if it names no legal action."""

    @abstractmethod
    def success(self, transitions: Sequence[Transition]) -> bool:
        """Whether this complete episode reached the goal."""

    options: Mapping[str, Any] = {}
    """The options with which `make_task` makes this task again, for the model card."""

    # -- memory ----------------------------------------------------------------------------------------------------

    history_turns: int = 0
    """How many earlier steps of the episode the agent sees again, as turns of the chat before its prompt: what it was
    told (`earlier_prompt`), and its own response."""
    history_images: int = 0
    """How many of these, the latest, are shown with their picture; the others are text only."""

    def earlier_prompt(self, observation: Any, info: Mapping[str, Any]) -> str:
        """The user's words in a turn that shows this state again later: the whole prompt, unless you shorten it."""
        return self.prompt(observation, info)

    # -- ground truth, if known ------------------------------------------------------------------------------------

    reading_parts: Sequence[str] = ()
    """The keys of `judge` that are read from the image, for the reading accuracy."""

    def judge(self, response: Response, info: Mapping[str, Any]) -> Mapping[str, bool]:
        """Whether each part of the thought is true. A *true thought* has only true parts (`is_true_thought`).

        Returns the same keys for every response. Empty (the default) means unknown: such thoughts are left out of
        every truth metric.
        """
        return {}

    def expert(self, info: Mapping[str, Any], hint: Response | None = None) -> Response | None:
        """The correct response in this state, or `None` if there is none.

        With `hint`, the agent's own response, only the wrong parts are replaced.
        """
        return None

    def solvable(self, info: Mapping[str, Any]) -> bool:
        """Whether success is still possible from this state."""
        return True

    def target(self, response: Response, info: Mapping[str, Any]) -> str | None:
        """The target stated in the thought (Points24: the whole formula)."""
        return None

    # -- for LLM correctors ----------------------------------------------------------------------------------------

    tools: Sequence[Tool] = ()
    """Tools the corrector may call while judging a step."""
    _rubric: Rubric | None = None

    @property
    def rubric(self) -> Rubric:
        """What the corrector is asked about a step. Assign your own; the default works for any game."""
        return self._rubric or general_rubric(self.name, self.format)

    @rubric.setter
    def rubric(self, rubric: Rubric) -> None:
        self._rubric = rubric

    def public_state(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of `info` that the player may see (Blackjack: not the hole card)."""
        return {}

    def believed_info(self, fields: Mapping[str, Any], public_state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The `info` implied by the thought's reading of the image, or `None` if it can't be derived.

        Passed to `judge`, it checks a corrector's answer for self-consistency without using hidden state. Raises
        `ValueError` if no state matches the reading.
        """
        return None

    # -- training and evaluation -----------------------------------------------------------------------------------

    reward_scale: float = 1.0
    """Scales rewards to about 1 for the value head (`GTRConfig.reward_scale`)."""
    illegal_reward: float = 0.0
    """Added to the reward when the response names no legal action and a random one is played instead. The environment
    can't do this itself: it never sees the illegal action."""
    vectorization: Literal["sync", "processes"] = "sync"
    """`"processes"` runs each environment in its own process, for slow, leaky or crash-prone ones, unless
    `GTRConfig.vectorization` says otherwise."""
    worker_options: Mapping[str, Any] = {}
    """`WorkerVectorEnv` options for these processes, e.g. `{"step_timeout": 30}`."""

    def metrics(self, transitions: Sequence[Transition]) -> Mapping[str, float]:
        """Extra metrics to log for a complete episode, in training and evaluation."""
        return {}

    def difficulty(self, info: Mapping[str, Any]) -> str | None:
        """The difficulty class, from the first `info`. Evaluation reports success per class, sorted by name."""
        return None

    def starts(self) -> Sequence[Mapping[str, Any]] | None:
        """The `reset` options of each evaluation start, in a fixed order; `None` if starts are random.

        Evaluation plays each start once before repeating any. Examples: ALFWorld's games, a fixed set of hands.
        """
        return None

    def describe_start(self, info: Mapping[str, Any]) -> Mapping[str, str]:
        """How results describe an episode's start, from its first `info`: e.g. the game file or the hand.

        The key `source` names the kind of starts ("bundled games") for the tables.
        """
        return {}


def general_rubric(name: str, format: ThoughtFormat) -> Rubric:
    """Questions that fit any game; the corrector gets the rules from the agent's prompt."""
    parts = ", ".join(f'"{field.key}"' for field in format.fields)
    return Rubric(
        role=f"You judge one step of an agent that plays {name}. What it was told has the goal and the rules.",
        questions={
            "picture": "What does the picture show that matters for the next action?",
            "thought": f"Is each part of the agent's thought ({parts}) true of it?"
            if parts
            else "Does the agent's response fit what the picture shows?",
            "choice": "Which action is best in this state, and does the agent's thought lead to it?",
        },
    )


def is_true_thought(judgement: Mapping[str, bool]) -> bool | None:
    """Whether all parts judged by `Task.judge` are true; `None` (unknown) if it judged none."""
    return all(judgement.values()) if judgement else None


def contradicts(task: Task, thought: Mapping[str, Any], action: str | None, info: Mapping[str, Any]) -> bool:
    """Whether the thought concludes a different action than this one. False if either names none.

    Such a thought must not be taught, however accurate its reading: "My total is 20, so I hit" followed by "stand"
    teaches the agent not to mean what it says.
    """
    concluded = task.format.conclusion(thought)
    if concluded is None or action is None:
        return False
    meant, done = (task.to_env_action(Response("", thought, text), info) for text in (concluded, action))
    if meant is None or done is None:  # one of them is not legal
        return meant is not done
    return not np.array_equal(meant, done)
