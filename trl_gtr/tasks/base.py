"""The `Task` seam: the words around an environment.

A task turns an observation into a prompt, the agent's text into an environment action, and knows what is true. Nothing
needs to be subclassed: any object with these members is a task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import gymnasium as gym
import numpy as np

from ..responses.format import ThoughtFormat
from ..types import Response, Transition


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


@runtime_checkable
class Task(Protocol):
    """What the collector, the correctors and the evaluation need to know of a game.

    Used where a task has them, beyond the members below:

    - `tools: Sequence[Tool]`, offered to correctors that are language models;
    - `believed_info(fields, public_state) -> Mapping`: the `info` as it would be if a thought's reading of the picture
      were true; raises `ValueError` if it can't be. `judge` with it checks a corrector's answer against itself,
      without any hidden truth;
    - `target(response, info) -> str | None`: what a thought aims at (Points24: the whole formula);
    - `reading_parts: Sequence[str]`: the parts of `judge` that are read off the picture, for the reading accuracy;
    - `reward_scale: float`: what brings rewards to the size of 1 for the value head (`GTRConfig.reward_scale`);
    - `difficulty(info) -> str`: what kind of deal this is, from its first `info`. Evaluation shows success by it, the
      kinds sorted by name;
    - `metrics(transitions) -> Mapping[str, float]`: more to log about a whole episode, in training and evaluation;
    - `vectorization = "processes"`: each environment gets a process of its own (slow, leaking or crashing ones);
    - `worker_options: Mapping`: options of `WorkerVectorEnv` for them, e.g. `{"step_timeout": 30}`;
    - `starts` and `describe_start`: see `ListsStarts`;
    - `illegal_reward`: see `FinesIllegalActions`.
    """

    name: str
    format: ThoughtFormat
    rubric: Rubric

    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        """One fresh environment. Training's is cut where nothing can be won any more; evaluation's never."""

    def prompt(self, observation: Any, info: Mapping[str, Any]) -> str:
        """The user's words for this state, from public knowledge only. The image goes beside it."""

    def public_state(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """The part of `info` that a player may know (Blackjack: without the hole card)."""

    def legal_actions(self, info: Mapping[str, Any]) -> Sequence[str]:
        """The texts that name an action in this state."""

    def to_env_action(self, response: Response, info: Mapping[str, Any]) -> Any | None:
        """The environment's action that the response names exactly, or `None`."""

    def judge(self, response: Response, info: Mapping[str, Any]) -> dict[str, bool]:
        """Is each part of the thought true? The same keys always; a *true thought* is one where all are."""

    def success(self, transitions: Sequence[Transition]) -> bool:
        """Did this whole episode reach the goal?"""

    def solvable(self, info: Mapping[str, Any]) -> bool:
        """Can a success still be reached from this state?"""

    def expert(self, info: Mapping[str, Any], hint: Response | None = None) -> Response | None:
        """The right response in this state, or `None` if there is none.

        With `hint`, the agent's own response, what is true in it stays and only what is wrong is replaced.
        """


@runtime_checkable
class ListsStarts(Protocol):
    """A task that can list the starts of its evaluation episodes: ALFWorld's games, a fixed set of hands.

    An evaluation plays every one of them once before any comes again.
    """

    def starts(self) -> Sequence[Mapping[str, Any]] | None:
        """The `options` of `reset` for each start, always in the same order; `None` if deals are random."""

    def describe_start(self, info: Mapping[str, Any]) -> Mapping[str, str]:
        """What a result says about its episode's start, from its first `info`: the game file, or the hand.

        The key `source` names what the starts are ("bundled games"), for the tables.
        """


@runtime_checkable
class FinesIllegalActions(Protocol):
    """A task that takes a price for a response without a legal action when a random one is played in its place."""

    illegal_reward: float
    """Added to the step's reward. The environment can't do it: it never sees the illegal action."""


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
