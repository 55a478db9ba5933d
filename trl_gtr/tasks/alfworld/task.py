"""The ALFWorld task: look at the room, name the next sub-goal, and choose a command towards it.

{"thoughts": "I am at desk 1 and see mug 1. My hand is empty. My sub-goal is to take the mug, so I take mug 1 from desk
1.", "action": "take mug 1 from desk 1"}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, SupportsFloat

import gymnasium as gym

from ... import environments  # noqa: F401  registers the games
from ...environments.alfworld.commands import project
from ...environments.alfworld.games import find_games
from ...responses.action_text import from_thoughts
from ...responses.format import ThoughtFormat
from ...types import Response, Transition
from ..base import Task, contradicts
from .prompt import DRAWN_HAND, EARLIER, FIELDS, PROMPT, RUBRIC, list_commands, told, write_thought
from .words import objects_right, read_command, read_subgoal, subgoal_right

ENV_ID = "trl_gtr/ALFWorld-v0"
SAME_ACTIONS = 5
CUT = -3.0
_GAME_OPTIONS = ("games", "split", "task_types", "backend")
_Result = tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]


class RepetitionEnds(gym.Wrapper):
    """Ends an episode after five identical actions in a row.

    The step's reward is −3 if it would be 0. Sets `truncated`, `info["cut"]` and `info["bootstrap"] = False`, so that
    the advantages treat it as a terminal step.
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self._last: Any = None
        self._count = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self._last, self._count = None, 0
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> _Result:
        result = self.env.step(action)
        self._count = self._count + 1 if action == self._last else 1
        self._last = action
        return _cut(result, "repetition") if self._count >= SAME_ACTIONS else result


class ActionLimit(gym.Wrapper):
    """Ends an episode at the first action beyond the limit, in the same way as `RepetitionEnds`."""

    def __init__(self, env: gym.Env, max_actions: int) -> None:
        super().__init__(env)
        self.max_actions = max_actions

    @property
    def step_limit(self) -> int:
        """The maximum number of steps per episode, including skipped ones."""
        return self.max_actions + 1

    def step(self, action: Any) -> _Result:
        result = self.env.step(action)
        return _cut(result, "too many actions") if len(result[4]["previous_actions"]) > self.max_actions else result


def _cut(result: _Result, why: str) -> _Result:
    """Turn a step's result into the end of its episode, unless the game itself is over."""
    observation, reward, terminated, _, info = result
    if terminated:
        return result
    return observation, CUT if reward == 0 else reward, False, True, {**info, "cut": why, "bootstrap": False}


class ALFWorldTask(Task):
    """The task around `trl_gtr/ALFWorld-v0`. Stateless.

    Args:
        env_kwargs: Passed to the environment, e.g. `{"task_types": ["pick_and_place_simple"]}`; `max_episode_steps`
            (50) too.
        split: Which games to play: train, valid_seen or valid_unseen. Default: `train` for training, `valid_seen` for
            evaluation.
        evaluation_split: The split for `make_env(evaluation=True)`, if it differs from `split`.
        cut: End training episodes after five identical actions.
        thoughts: `False` for the action-only variant.
        history: How many of the last actions the prompt shows; `None` for all of them.
        observation_text: Also put the game's text into the prompt, as in RL4VLM's setting with text and image.
        max_actions: End training episodes with −3 after more than this many actions. Paper: 40.
        illegal_reward: Added to the reward when a response names no possible command and a random one is played
            instead. Paper: −1.
        task_type_weights: How often training plays each task type, e.g. `{"pick_two_obj_and_place": 3}` for three
            times as often as any type not listed. Default: every game is equally likely.
        hide: Kinds of commands that the agent is neither shown nor allowed, e.g. `("help", "inventory", "look",
            "examine")`; no task needs any of these.
        max_command_characters: Longer command lists are folded without leaving anything out; see
            `trl_gtr.tasks.alfworld.prompt.list_commands`.
    """

    name = "alfworld"
    rubric = RUBRIC
    reading_parts = ("objects",)
    reward_scale = 1 / 50
    """A win pays 50; the value head and the format reward are on a scale of 1."""
    vectorization = "processes"
    """Environments run in worker processes: `trl_gtr.rollouts.workers.WorkerVectorEnv`."""

    def __init__(
        self,
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        split: str | None = None,
        evaluation_split: str | None = None,
        cut: bool = True,
        thoughts: bool = True,
        history: int | None = 8,
        observation_text: bool = False,
        max_actions: int | None = None,
        illegal_reward: float = -1.0,
        task_type_weights: Mapping[str, float] | None = None,
        hide: Sequence[str] = (),
        max_command_characters: int = 1200,
    ) -> None:
        self.env_kwargs = dict(env_kwargs or {})
        self.split, self.evaluation_split = split or "train", evaluation_split or split or "valid_seen"
        self.cut = cut
        if max_actions is not None and max_actions < 1:
            raise ValueError(f"max_actions must be at least 1, or None for no limit, not {max_actions}.")
        self.history, self.hide, self.max_command_characters = history, tuple(hide), max_command_characters
        self.observation_text, self.max_actions = observation_text, max_actions
        self.illegal_reward, self.task_type_weights = float(illegal_reward), task_type_weights
        self.format = ThoughtFormat(
            FIELDS if thoughts else (),
            action_help="one of the possible actions, exactly",
            conclusion=partial(from_thoughts, read_command),
        )
        self._hand = "" if self.env_kwargs.get("backend") == "thor" else DRAWN_HAND

    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        weights = {"task_type_weights": self.task_type_weights} if self.task_type_weights else {}
        options = self._evaluation_kwargs() if evaluation else {"split": self.split, **weights, **self.env_kwargs}
        env = gym.make(ENV_ID, disable_env_checker=True, **options)
        if env.unwrapped.spec is not None:  # Unity's pixels depend on the GPU
            env.unwrapped.spec.nondeterministic = self.env_kwargs.get("backend") == "thor"
        if evaluation:
            return env
        env = RepetitionEnds(env) if self.cut else env
        return env if self.max_actions is None else ActionLimit(env, self.max_actions)

    def _evaluation_kwargs(self) -> dict[str, Any]:
        return {"split": self.evaluation_split, **self.env_kwargs}

    def starts(self) -> Sequence[Mapping[str, Any]]:
        """Every evaluation game."""
        chosen = {name: value for name, value in self._evaluation_kwargs().items() if name in _GAME_OPTIONS}
        return [{"game": game.name} for game in find_games(**chosen)]

    def describe_start(self, info: Mapping[str, Any]) -> dict[str, str]:
        """The game file, its task type, and whether it is bundled or ALFWorld's own, and played in THOR."""
        source = "bundled games" if info["extra.gamefile"].startswith("bundled:") else "real games"
        if self.env_kwargs.get("backend") == "thor":
            source += " in THOR"
        return {"gamefile": info["extra.gamefile"], "task_type": info["task_type"], "source": source}

    def prompt(self, observation: Any, info: Mapping[str, Any]) -> str:
        return PROMPT.format(
            **self._seen(info),
            previous=", ".join(self._recent(info)) or "none",
            commands=list_commands(self.legal_actions(info), self.max_command_characters),
            instructions=self.format.instructions(),
        )

    def earlier_prompt(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Without the commands, which were for that step, and the instructions."""
        return EARLIER.format(**self._seen(info)).strip()

    def _seen(self, info: Mapping[str, Any]) -> dict[str, str]:
        text = f"You read: {told(info)}\n" if self.observation_text else ""
        return {"hand": self._hand, "task": info["task"], "text": text}

    def public_state(self, info: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "task": info["task"],
            **({"observation": told(info)} if self.observation_text else {}),
            "previous_actions": self._recent(info),
            "actions": list(self.legal_actions(info)),
        }

    def _recent(self, info: Mapping[str, Any]) -> list[str]:
        actions = list(info["previous_actions"])
        return actions if self.history is None else actions[max(0, len(actions) - self.history) :]

    def legal_actions(self, info: Mapping[str, Any]) -> Sequence[str]:
        return [command for command in info["admissible_commands"] if not command.startswith(self.hide)]

    def to_env_action(self, response: Response, info: Mapping[str, Any]) -> str | None:
        if not response.valid or response.action is None:
            return None
        return project(response.action, self.legal_actions(info))

    def judge(self, response: Response, info: Mapping[str, Any]) -> dict[str, bool]:
        """Whether the objects named in the thought are there, and whether its sub-goal is the one needed next."""
        thoughts = response.fields.get("thoughts")
        if not isinstance(thoughts, str):
            return {"objects": False, "subgoal": False}
        return {
            "objects": objects_right(thoughts, info["view"]),
            "subgoal": subgoal_right(thoughts, info["subgoal"]),
        }

    def target(self, response: Response, info: Mapping[str, Any]) -> str | None:
        """The sub-goal named in the thought: "find mug"."""
        read = read_subgoal(str(response.fields.get("thoughts", "")))
        return f"{read[0][0]} {read[1]}" if read else None

    def difficulty(self, info: Mapping[str, Any]) -> str:
        return info["task_type"]

    def solvable(self, info: Mapping[str, Any]) -> bool:
        return bool(info["won"] or info["extra.expert_plan"])

    def expert(self, info: Mapping[str, Any], hint: Response | None = None) -> Response | None:
        """The planner's next command, replanned from this state, with a thought that leads to it."""
        plan = info["extra.expert_plan"]
        if not plan or plan[0] not in info["admissible_commands"]:
            return None
        thoughts = write_thought(info, plan[0])
        true = hint is not None and all(self.judge(hint, info).values())
        if hint is not None and true and not contradicts(self, hint.fields, plan[0], info):
            thoughts = hint.fields["thoughts"]
        return self.format.parse(self.format.render({"thoughts": thoughts} if self.format.fields else {}, plan[0]))

    def success(self, transitions: Sequence[Transition]) -> bool:
        final = transitions[-1].final_info if transitions else None
        return bool(final and final["won"])

    def metrics(self, transitions: Sequence[Transition]) -> dict[str, float]:
        """Success under the task type's own name, and the fraction of the goal that was reached."""
        final = transitions[-1].final_info or {}
        return {
            f"success_{transitions[0].info['task_type']}": float(self.success(transitions)),
            "goal_condition_success_rate": float(final.get("goal_condition_success_rate", 0.0)),
        }
