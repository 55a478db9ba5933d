"""The `Task` seam: the words around an environment.

A task turns an observation into a prompt, the agent's text into an environment action, and may know what is true.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from ..responses.format import ThoughtFormat
from ..types import Response, Transition
from .contract import Contract


@dataclass(frozen=True)
class Rubric:
    """What a corrector is asked about one step of a task, in our own words."""

    role: str
    """Who the corrector is and what it is shown."""
    questions: Mapping[str, str]
    """Answer key → the question it answers, in order."""
    target_key: str | None = None
    """The answer key that holds what the right thought aims at (Points24: `target_formula`)."""
    advice: str = ""
    """Facts of the game that a judge must know."""
    solution_key: str | None = None
    """The answer key that says YES or NO to "can the goal still be reached?" (Points24: `possible_solution`); `None`
    where it always can."""


@dataclass(frozen=True)
class Tool:
    """Something exact that a corrector may call while it judges a step."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments: an object."""
    run: Callable[[Mapping[str, Any]], str]
    """The tool's answer as text. Arguments come from a language model: what doesn't fit raises a `ValueError`, whose
    text the corrector is shown."""


class Task(Contract):
    """The words around an environment, for the collector, the correctors and the evaluation.

    A subclass defines `name`, `format`, `make_env`, `prompt`, `legal_actions`, `to_env_action` and `success`. All else
    has a default that claims nothing. Tasks hold no state and can be pickled.
    """

    # -- needed ----------------------------------------------------------------------------------------------------

    name: str
    format: ThoughtFormat

    @abstractmethod
    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        """One fresh environment. Training's may be cut where nothing can be won any more; evaluation's never."""

    @abstractmethod
    def prompt(self, observation: Any, info: Mapping[str, Any]) -> str:
        """The user's words for this state, from public knowledge only. The image goes beside it."""

    @abstractmethod
    def legal_actions(self, info: Mapping[str, Any]) -> Sequence[str]:
        """The texts that name an action in this state."""

    @abstractmethod
    def to_env_action(self, response: Response, info: Mapping[str, Any]) -> Any | None:
        """The environment's action that the response names exactly, or `None`."""

    @abstractmethod
    def success(self, transitions: Sequence[Transition]) -> bool:
        """Did this whole episode reach the goal?"""

    # -- what is true, where the task knows it ---------------------------------------------------------------------

    reading_parts: Sequence[str] = ()
    """The parts of `judge` that are read off the picture, for the reading accuracy."""

    def judge(self, response: Response, info: Mapping[str, Any]) -> Mapping[str, bool]:
        """Is each part of the thought true? A *true thought* is one where all are (`is_true_thought`).

        The same keys for every response. Empty, as here, where nobody knows: such thoughts are neither true nor
        untrue, and every measure of truth leaves them out.
        """
        return {}

    def expert(self, info: Mapping[str, Any], hint: Response | None = None) -> Response | None:
        """The right response in this state, or `None` if there is none.

        With `hint`, the agent's own response, what is true in it stays and only what is wrong is replaced.
        """
        return None

    def solvable(self, info: Mapping[str, Any]) -> bool:
        """Can a success still be reached from this state?"""
        return True

    def target(self, response: Response, info: Mapping[str, Any]) -> str | None:
        """What a thought aims at (Points24: the whole formula)."""
        return None

    # -- for correctors that are language models -------------------------------------------------------------------

    tools: Sequence[Tool] = ()
    """What they may call while they judge a step."""
    _rubric: Rubric | None = None

    @property
    def rubric(self) -> Rubric:
        """What they are asked about a step. Assign your own; the default asks what can be asked about any game."""
        return self._rubric or general_rubric(self.name, self.format)

    @rubric.setter
    def rubric(self, rubric: Rubric) -> None:
        self._rubric = rubric

    def public_state(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of `info` that a player may know (Blackjack: without the hole card)."""
        return {}

    def believed_info(self, fields: Mapping[str, Any], public_state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The `info` as it would be if a thought's reading of the picture were true; `None` if that can't be told.

        `judge` with it checks a corrector's answer against itself, without any hidden truth. Raises a `ValueError`
        where no state fits the reading.
        """
        return None

    # -- training and evaluation -----------------------------------------------------------------------------------

    reward_scale: float = 1.0
    """What brings rewards to the size of 1 for the value head (`GTRConfig.reward_scale`)."""
    illegal_reward: float = 0.0
    """Added to the reward of a step whose response names no legal action, where a random one is played in its place.
    The environment can't do it: it never sees the illegal action."""
    vectorization: Literal["sync", "processes"] = "sync"
    """`"processes"`: each environment gets a process of its own (slow, leaking or crashing ones)."""
    worker_options: Mapping[str, Any] = {}
    """Options of `WorkerVectorEnv` for these processes, e.g. `{"step_timeout": 30}`."""

    def metrics(self, transitions: Sequence[Transition]) -> Mapping[str, float]:
        """More to log about a whole episode, in training and evaluation."""
        return {}

    def difficulty(self, info: Mapping[str, Any]) -> str | None:
        """What kind of deal this is, from its first `info`. Evaluation shows success by kind, sorted by name."""
        return None

    def starts(self) -> Sequence[Mapping[str, Any]] | None:
        """The `options` of `reset` for each start of evaluation, always in the same order; `None` if deals are random.

        An evaluation plays every one of them once before any comes again: ALFWorld's games, a fixed set of hands.
        """
        return None

    def describe_start(self, info: Mapping[str, Any]) -> Mapping[str, str]:
        """What a result says about its episode's start, from its first `info`: the game file, or the hand.

        The key `source` names what the starts are ("bundled games"), for the tables.
        """
        return {}


def general_rubric(name: str, format: ThoughtFormat) -> Rubric:
    """Questions that can be asked about any game; the agent's prompt, which the corrector sees, has the rules."""
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
    """Are all parts that `Task.judge` looked at true? `None`, unknown, if it looked at none."""
    return all(judgement.values()) if judgement else None


def contradicts(task: Task, thought: Mapping[str, Any], action: str | None, info: Mapping[str, Any]) -> bool:
    """Do a thought's own words conclude another action than this one? Not if either names none.

    Such a thought is no lesson, however true its reading is: "My total is 20, so I hit" beside "stand" teaches the
    agent not to mean what it says.
    """
    concluded = task.format.conclusion(thought)
    if concluded is None or action is None:
        return False
    meant, done = (task.to_env_action(Response("", thought, text), info) for text in (concluded, action))
    if meant is None or done is None:  # one of them is not legal
        return meant is not done
    return not np.array_equal(meant, done)
