"""Any gymnasium environment as a task.

    GymTask("FrozenLake-v1", goal="Reach the flag.", actions=["left", "down", "right", "up"])

{"observation": "I stand in the top left corner, a hole is to my lower right.", "thoughts": "Going down is
safe and leads towards the goal.", "action": "down"}
"""

from __future__ import annotations

import enum
import importlib
import inspect
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import gymnasium as gym
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence

from .. import environments  # noqa: F401  registers the games
from ..environments.rendered import RenderedObservation, is_picture
from ..responses.action_text import match_action
from ..responses.format import Field, ThoughtFormat
from ..types import Response, Transition
from .base import Task
from .memory import check_history
from .table_expert import TableExpert, transitions_of

PROMPT = """\
You are playing {game}. The picture shows the current state.
Goal: {goal}
Allowed actions: {actions}
{instructions}"""
ANY_GOAL = "collect as much reward as you can."

FIELDS = (
    Field("observation", "text", "what the picture shows that matters now"),
    Field("thoughts", "text", "what follows from it, and which action is best"),
)

Actions = Sequence[str] | Mapping[str, int] | Callable[[Mapping[str, Any]], Sequence[str]]
Expert = Callable[[Mapping[str, Any]], tuple[Mapping[str, Any], str] | None]
Goal = Callable[[Any, Mapping[str, Any]], str]
_OPTIONAL = ("judge", "expert")
_MINIGRID = ("MiniGrid-", "BabyAI-")
_PATH = re.compile(r"[\w.]+:[\w.]+")
"""How a function is written in a file; no sentence looks like this."""


class GymTask(Task):
    """The task around any gymnasium environment with discrete or text actions.

    The picture is the observation if that is an RGB image, otherwise what `render()` draws; the original observation
    is then in `info["observation"]`. Functions must be picklable, so define them at module level; in a file or on the
    command line, write them as `package.module:function`.

    Args:
        env_id: The environment's id, e.g. `FrozenLake-v1`, or `module:id` to import a module that registers it.
        goal: What the agent should achieve, for the prompt: a text, or a function from observation and `info` to one.
            Default: the `mission` in the environment's own observation, if it has one, as in MiniGrid.
        actions: The name of each action by index; or a mapping from names to indices, to leave some out. For text
            actions, the allowed texts, or a function from `info` to them. Default: the environment's own names.
        env_kwargs: Options of the environment.
        wrap: A function that wraps the environment, e.g. to make its actions discrete.
        success: A function from an episode's transitions to whether it reached the goal. Default: `info["success"]`
            at the end, or a final reward above 0.
        expert: A function from `info` to the right thought and action, or to `None` where there is none. Default: the
            best action, if the environment lists its transitions in `P`, the same ones in every episode.
        judge: A function from response and `info` to whether each part of the thought is true.
        prompt: The prompt, with the fields `{game}`, `{goal}`, `{actions}` and `{instructions}`.
        format: The response format. Default: `observation`, `thoughts` and `action`.
        thoughts: Ask for thoughts; false trains actions alone.
        processes: Run each environment in its own process.
        history_turns: Earlier steps of the episode that the agent sees again, as turns of the chat.
        history_images: How many of these, the latest, are shown with their picture.
    """

    def __init__(
        self,
        env_id: str,
        *,
        goal: str | Goal | None = None,
        actions: Actions | str | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        wrap: Callable[[gym.Env], gym.Env] | str | None = None,
        success: Callable[[Sequence[Transition]], bool] | str | None = None,
        expert: Expert | str | None = None,
        judge: Callable[[Response, Mapping[str, Any]], Mapping[str, bool]] | str | None = None,
        prompt: str = PROMPT,
        format: ThoughtFormat | None = None,
        thoughts: bool = True,
        processes: bool = False,
        history_turns: int = 0,
        history_images: int = 0,
    ) -> None:
        self.env_id = env_id
        self.goal = _function("goal", goal) if not isinstance(goal, str) or _PATH.fullmatch(goal) else goal
        self.name = f"gym:{env_id}"
        self.env_kwargs = dict(env_kwargs or {})
        self._wrap = _function("wrap", wrap)
        self._functions = {
            "success": _function("success", success),
            "expert": _function("expert", expert),
            "judge": _function("judge", judge),
        }
        self.vectorization = "processes" if processes else "sync"
        self.history_turns, self.history_images = history_turns, history_images
        check_history(self)
        self.render_mode: str | None = None
        if isinstance(actions, str):
            actions = _function("actions", actions)
        self.actions = self._examine(actions)
        named = {"wrap": self._wrap, **self._functions}
        self.options = {
            **({"goal": _path(self.goal) if callable(self.goal) else self.goal} if self.goal is not None else {}),
            "actions": _path(self.actions) if callable(self.actions) else self.actions,
            **({"env_kwargs": self.env_kwargs} if self.env_kwargs else {}),
            **{name: _path(function) for name, function in named.items() if function is not None},
            **({"prompt": prompt} if prompt != PROMPT else {}),
            **({} if thoughts else {"thoughts": False}),
            **({"history_turns": history_turns} if history_turns else {}),
            **({"history_images": history_images} if history_images else {}),
        }
        self.format = format or ThoughtFormat(FIELDS if thoughts else (), action_help="one of the allowed actions")
        self._prompt = _checked_template(prompt)
        if expert is None and format is None:
            self._functions["expert"] = self._table_expert()

    # -- what the environment must offer ---------------------------------------------------------------------------

    def _examine(self, actions: Actions | None) -> Mapping[str, int] | Sequence[str] | Callable[..., Sequence[str]]:
        """Make one environment: choose where the picture comes from, name the actions, try a seed twice."""
        env = self._bare_env()
        try:
            if not is_picture(env.observation_space):
                modes = env.metadata.get("render_modes") or []
                if "rgb_array" not in modes:
                    raise ValueError(
                        f"{self.env_id} gives no pictures: its observation is {env.observation_space} and it renders "
                        f"{', '.join(map(repr, modes)) or 'nothing'}, not 'rgb_array'. Add that render mode, or pass "
                        "`wrap=` with a wrapper whose observation is a uint8 picture of shape (height, width, 3)."
                    )
                self.render_mode = "rgb_array"
            checked = _named_actions(self.env_id, env, actions)
        finally:
            env.close()
        self._try_seed()
        return checked

    def _bare_env(self) -> gym.Env:
        kwargs = {"render_mode": self.render_mode} if self.render_mode else {}
        _register(self.env_id)
        try:
            env = gym.make(self.env_id, disable_env_checker=True, **kwargs | self.env_kwargs)
        except (gym.error.UnregisteredEnv, ModuleNotFoundError) as error:
            raise ValueError(
                f"gymnasium can't make {self.env_id!r}: {error} If a package registers it, install the package and "
                f"name its module: gym:MODULE:{self.env_id.rpartition(':')[2]}."
            ) from error
        except TypeError as error:
            if "unexpected keyword argument 'render_mode'" not in str(error):
                raise
            raise ValueError(
                f"{self.env_id} says that it renders 'rgb_array', but can't be made with a render mode: give its "
                "`__init__` the parameter `render_mode` and keep it as `self.render_mode`."
            ) from error
        return self._wrap(env) if self._wrap else env

    def _try_seed(self) -> None:
        env = self.make_env()
        try:
            first, second, other = (env.reset(seed=seed) for seed in (0, 0, 1))
        finally:
            env.close()
        shapes = {env.observation_space.shape, *(picture.shape for picture, _ in (first, second, other))}
        if len(shapes) > 1:
            what = "`render()` draws" if self.render_mode else "observations are"
            raise ValueError(
                f"Pictures of {self.env_id} must all have the same size, not {' and '.join(map(str, shapes))}: pass "
                f"`wrap=` with a wrapper that resizes what {what}."
            )
        if not data_equivalence(first, second):
            warnings.warn(
                f"reset(seed=…) of {self.env_id} doesn't determine how an episode starts, so runs can't be repeated "
                "or resumed exactly. Draw random numbers from `self.np_random` only.",
                stacklevel=1 + len(list(takewhile(_is_ours, inspect.stack(0)))),
            )

    def _table_expert(self) -> TableExpert | None:
        if self._wrap is not None or not isinstance(self.actions, Mapping):  # a wrapper may change what actions do
            return None
        if (transitions := transitions_of(self._bare_env)) is None:
            return None
        return TableExpert(transitions, self.actions, [field.key for field in self.format.fields])

    def make_env(self, *, evaluation: bool = False) -> gym.Env:
        env = self._bare_env()
        return RenderedObservation(env) if self.render_mode else env

    # -- words -----------------------------------------------------------------------------------------------------

    def prompt(self, observation: Any, info: Mapping[str, Any]) -> str:
        return self._prompt.format(
            game=self.env_id,
            goal=self._goal_in(observation, info),
            actions=", ".join(self.legal_actions(info)),
            instructions=self.format.instructions(),
        )

    def _goal_in(self, observation: Any, info: Mapping[str, Any]) -> str:
        if callable(self.goal):
            return self.goal(observation, info)
        if self.goal is not None:
            return self.goal
        match info.get("observation"):
            case {"mission": str() as mission}:
                return f"{mission}."
        return ANY_GOAL

    def legal_actions(self, info: Mapping[str, Any]) -> Sequence[str]:
        return list(self.actions(info) if callable(self.actions) else self.actions)

    def to_env_action(self, response: Response, info: Mapping[str, Any]) -> Any | None:
        if not response.valid:
            return None
        legal = self.legal_actions(info)
        place = match_action(response.action, legal)
        if place is None:
            return None
        return self.actions[legal[place]] if isinstance(self.actions, Mapping) else legal[place]

    def public_state(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"actions": self.legal_actions(info)}

    # -- what the caller knows about the game ----------------------------------------------------------------------

    def defines(self, name: str) -> bool:
        """A judge or expert is defined if there is one."""
        return super().defines(name) and (name not in _OPTIONAL or self._functions[name] is not None)

    def success(self, transitions: Sequence[Transition]) -> bool:
        if (given := self._functions["success"]) is not None:
            return bool(given(transitions))
        if not transitions:
            return False
        last = transitions[-1]
        final = last.final_info or {}
        return bool(final.get("success", last.reward > 0))

    def judge(self, response: Response, info: Mapping[str, Any]) -> Mapping[str, bool]:
        given = self._functions["judge"]
        return {} if given is None else given(response, info)

    def expert(self, info: Mapping[str, Any], hint: Response | None = None) -> Response | None:
        given = self._functions["expert"]
        answer = None if given is None else given(info)
        if answer is None:
            return None
        match answer:
            case (Mapping() as thought, str() as action) if match_action(action, self.legal_actions(info)) is not None:
                return self.format.respond(thought, action)
        raise ValueError(
            f"expert(info) must return a pair (thought, action), not {answer!r:.200}. The thought is a mapping with "
            f"the keys {[field.key for field in self.format.fields]}, the action one of {self.legal_actions(info)}."
        )


def _is_ours(called: inspect.FrameInfo) -> bool:
    """Whether a function was called in this package, so that a warning should point further up."""
    return str(called.frame.f_globals.get("__name__")).partition(".")[0] == __name__.partition(".")[0]


def _register(env_id: str) -> None:
    """Import MiniGrid if the environment is one of its levels, whose package can be told from the id."""
    if not env_id.startswith(_MINIGRID) or env_id in gym.registry:
        return
    try:
        importlib.import_module("minigrid")
    except ModuleNotFoundError as error:
        if error.name != "minigrid":
            raise
        raise ValueError(f'{env_id} needs a package that is not installed: pip install "trl-gtr[minigrid]"') from error


def _function(name: str, given: Any) -> Any:
    """A function, or the one that `package.module:function` names."""
    if isinstance(given, str):
        try:
            given = pkgutil.resolve_name(given)
        except (ValueError, ImportError, AttributeError) as error:
            raise ValueError(
                f"`{name}` must be a function or `package.module:function`, but {given!r} can't be found: {error}."
            ) from error
    if given is not None and not callable(given):
        raise ValueError(f"`{name}` must be a function, not {given!r:.100}.")
    return given


def _path(function: Callable[..., Any]) -> str:
    """How a function is written in a file: `package.module:function`."""
    return f"{function.__module__}:{function.__qualname__}"


def _checked_template(prompt: str) -> str:
    try:
        prompt.format(game="", goal="", actions="", instructions="")
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"`prompt` may use {{game}}, {{goal}}, {{actions}} and {{instructions}}; write other braces twice. It "
            f"fails with {error!r}."
        ) from error
    if "{instructions}" not in prompt:
        raise ValueError("`prompt` must contain {instructions}: they tell the agent the response format.")
    return prompt


def _named_actions(env_id: str, env: gym.Env, given: Actions | None) -> Any:
    """Checked names: a mapping to environment actions if they are discrete, otherwise the allowed texts."""
    space = env.action_space
    if isinstance(space, spaces.Text):
        if given is None or isinstance(given, Mapping) or (not callable(given) and not given):
            raise ValueError(
                f"The actions of {env_id} are texts: pass `actions=` with the allowed texts, or with a function from "
                "`info` to them."
            )
        return given if callable(given) else list(given)
    if not isinstance(space, spaces.Discrete):
        ready = "`gymnasium.wrappers.DiscretizeAction(env, bins=5)`, or " if isinstance(space, spaces.Box) else ""
        raise ValueError(
            f"The actions of {env_id} must be discrete or texts, not {space}. Pass `wrap=` with a function that makes "
            f"them discrete: one that returns {ready}a `gymnasium.ActionWrapper` of your own, whose `action_space` is "
            "`Discrete(n)` and whose `action` gives the environment's action for each index."
        )
    if callable(given):
        raise ValueError(f"The actions of {env_id} are discrete: name them with a list, not with a function.")
    first, count = int(space.start), int(space.n)
    if isinstance(given, Mapping):
        names = {str(name): int(index) for name, index in given.items()}
    else:
        listed = _own_names(env_id, env, count) if given is None else [str(name) for name in given]
        if len(listed) != count:
            raise ValueError(
                f"{env_id} has {count} actions, but `actions` names {len(listed)}: {', '.join(listed)}. To leave some "
                'out, map names to indices, e.g. actions={"left": 0, "right": 1}.'
            )
        names = {name: first + index for index, name in enumerate(listed)}
        if len(names) < count:
            raise ValueError(f"Two actions of {env_id} have the same name: {', '.join(listed)}.")
    wrong = [f"{name}: {index}" for name, index in names.items() if not first <= index < first + count]
    if wrong or not names or len({name.strip().casefold() for name in names} - {""}) < len(names):
        raise ValueError(
            f"Actions of {env_id} need names that differ by more than case, and indices from {first} to "
            f"{first + count - 1}, not {names}."
        )
    return names


def _own_names(env_id: str, env: gym.Env, count: int) -> list[str]:
    """The names that the environment itself has for its actions (Atari, MiniGrid, the games of this package)."""
    if env.has_wrapper_attr("get_action_meanings"):
        return [str(name).lower() for name in env.get_wrapper_attr("get_action_meanings")()]
    named = env.get_wrapper_attr("actions") if env.has_wrapper_attr("actions") else None
    if inspect.isclass(named) and issubclass(named, enum.IntEnum):
        return [action.name for action in sorted(named)]
    if isinstance(named, Iterable) and (texts := list(named)) and all(isinstance(text, str) for text in texts):
        return texts
    raise ValueError(
        f"{env_id} has no names for its {count} actions: pass `actions=` with {count} names in the order of their "
        'indices, e.g. actions=["left", "down", "right", "up"].'
    )
