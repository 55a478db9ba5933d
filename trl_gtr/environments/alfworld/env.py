"""ALFWorld as a gymnasium environment: pictures in, text commands out."""

from __future__ import annotations

import copy
import os
import string
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from .backend import Backend, Moment
from .commands import project
from .games import Game, find_games, game_chances
from .installed import import_package

BACKENDS = ("text", "thor")
REWARD_STYLES = ("increase", "rl4vlm")
EXPERTS = ("planner", "explorer")

WIN = 50.0
ILLEGAL = -1.0
MAX_TEXT = 256

_INSTALL = 'ALFWorld needs packages that are not installed: pip install "trl-gtr[alfworld]"'


class ALFWorldEnv(gym.Env[np.ndarray, str]):
    """Household tasks: find things, take them, heat, cool or clean them, and put them where they belong.

    ## Observation
    RGB, uint8, 300×300×3: for `backend="text"` the scene drawn from the state of the game, for `"thor"` THOR's frame.

    ## Action
    A text that names one of `info["admissible_commands"]` (see `commands.project`); "put X in/on Y" and "move X to Y"
    mean the same. Any other text changes nothing and is illegal.

    ## Reward
    50 for winning, plus the change of the goal-condition rate, −1 for an illegal action.
    `reward_style="rl4vlm"` pays the rate itself at every step, as RL4VLM and GTR do.

    ## Episode end
    Terminated when won. `gym.make` truncates after 50 steps; `max_episode_steps=` sets another limit.

    ## Info
    `task`, `task_type`, `goal`, `observation_text`, `admissible_commands`, `won`, `goal_condition_success_rate`,
    `previous_actions`, `legal` (of the last action), `view` (what the picture shows, in words), `extra.gamefile`, and
    the hidden knowledge `extra.expert_plan` (the commands to the goal) and `subgoal` (what the first of them serves).

    The environment can be pickled in mid-episode: a copy starts the game again and replays its commands when it is
    first needed.

    Args:
        backend: `"text"` or `"thor"`.
        games: `"auto"`, `"bundled"`, `"data"` or a list; see `games.find_games`.
        split: `"train"`, `"valid_seen"` or `"valid_unseen"`.
        task_types: Only these of the six task types.
        reward_style: `"increase"` or `"rl4vlm"`.
        expert: `"planner"` knows where everything is; `"explorer"` plans with what was seen in the episode and looks
            for the rest. THOR always has the explorer.
        task_type_weights: How often each task type is drawn; a type that isn't named has weight 1, and 0 leaves one
            out. `None`: every game is equally likely.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 2}  # noqa: RUF012

    def __init__(
        self,
        backend: str = "text",
        games: str | Sequence[str | os.PathLike[str]] = "auto",
        split: str = "train",
        task_types: Sequence[str] | None = None,
        reward_style: str = "increase",
        expert: str = "planner",
        task_type_weights: Mapping[str, float] | None = None,
        render_mode: str | None = None,
    ) -> None:
        for name, value, choices in (
            ("backend", backend, BACKENDS),
            ("reward_style", reward_style, REWARD_STYLES),
            ("expert", expert, EXPERTS),
            ("render_mode", render_mode, (None, *self.metadata["render_modes"])),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}.")
        self.backend, self.reward_style, self.expert, self.render_mode = backend, reward_style, expert, render_mode
        self.games = find_games(games, split, task_types, backend)
        self._chances = None if task_type_weights is None else game_chances(self.games, task_type_weights)
        self._engine: Backend | None = None
        self._commands: list[str] | None = None  # since the episode's start; None: no episode is under way
        self._moment: Moment | None = None  # the last one; a copy that was pickled has none until it is needed
        self._game: Game | None = None
        self._seed, self._task, self._goal_rate = 0, "", 0.0
        self._previous: list[str] = []
        self._set_spaces()
        self._make_engine()  # a missing package is told now, not after a model was loaded

    def _set_spaces(self) -> None:
        self.observation_space = spaces.Box(0, 255, (300, 300, 3), np.uint8)
        self.action_space = spaces.Text(MAX_TEXT, min_length=0, charset=string.printable)

    # -- gymnasium -------------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """`options={"game": …}` chooses a game of this environment by its place in `games` or by its name."""
        super().reset(seed=seed)
        self._game = self._choose_game(options or {})
        self._seed = int(self.np_random.integers(2**31))
        self._commands = None  # if the game can't start, there is no episode
        self._previous = []
        moment = self._make_engine().start(self._game, self._seed)
        self._commands = []
        self._task = _task_text(moment.feedback)
        self._goal_rate = moment.goal_rate
        return self._observe(moment, legal=True)

    def step(self, action: str) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        moment = self._now()
        assert self._commands is not None
        assert self._engine is not None
        command = project(action, moment.admissible_commands)
        if command is None:
            moment = _unchanged(moment)
            self._previous.append(" ".join(action.split())[:80])
        else:
            moment = self._engine.step(command)
            self._commands.append(command)
            self._previous.append(command)
        reward = self._reward(moment) + (0.0 if command is not None else ILLEGAL)
        self._goal_rate = moment.goal_rate
        observation, info = self._observe(moment, legal=command is not None)
        if moment.won:
            self._commands = None
        return observation, reward, moment.won, False, info

    def render(self) -> np.ndarray | None:
        if self.render_mode != "rgb_array":
            return None
        if self._commands is not None:
            self._now()  # a copy from a pickle catches up
        if self._moment is None:
            raise ValueError("There is nothing to see yet: call reset() before render().")
        return self._moment.image.copy()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    # -- a game ----------------------------------------------------------------------------------------------------

    def _choose_game(self, options: dict[str, Any]) -> Any:
        unknown = sorted(set(options) - {"game"})
        if unknown:
            raise ValueError(f"reset has no option {', '.join(unknown)}; it knows 'game'.")
        choice = options.get("game")
        if choice is None:
            if self._chances is not None:
                return self.games[int(self.np_random.choice(len(self.games), p=self._chances))]
            return self.games[int(self.np_random.integers(len(self.games)))]
        found = [game for place, game in enumerate(self.games) if choice in (place, game.name)]
        if not found:
            raise ValueError(
                f"There is no game {choice!r} among the {len(self.games)} of this environment; give a number below "
                "that, or the name of one of `env.unwrapped.games`."
            )
        return found[0]

    def _reward(self, moment: Moment) -> float:
        paid = moment.goal_rate if self.reward_style == "rl4vlm" else moment.goal_rate - self._goal_rate
        return WIN * moment.won + paid

    def _observe(self, moment: Moment, legal: bool) -> tuple[np.ndarray, dict[str, Any]]:
        self._moment = moment
        assert self._engine is not None
        assert self._game is not None
        goal = self._engine.goal
        assert goal is not None
        info = {
            "task": self._task,
            "task_type": goal.task_type,
            "goal": {"object": goal.object, "receptacle": goal.receptacle, "toggle": goal.toggle},
            "observation_text": moment.feedback,
            "admissible_commands": list(moment.admissible_commands),
            "won": moment.won,
            "goal_condition_success_rate": moment.goal_rate,
            "previous_actions": list(self._previous),
            "legal": legal,
            "view": copy.deepcopy(moment.view),
            "extra.gamefile": self._game.name,
            "extra.expert_plan": list(moment.plan.commands),
            "subgoal": list(moment.plan.subgoal or ()),
        }
        return moment.image.copy(), info

    # -- engines come and go ---------------------------------------------------------------------------------------

    def _make_engine(self) -> Backend:
        if self._engine is None:
            if self.backend == "thor":
                from .thor import ThorBackend

                self._engine = ThorBackend()
            else:
                try:
                    import_package()
                    from .text import TextBackend
                except ImportError as error:
                    raise ImportError(_INSTALL) from error
                self._engine = TextBackend(explore=self.expert == "explorer")
        return self._engine

    def _now(self) -> Moment:
        """The current state; a copy from a pickle plays its episode again up to here."""
        if self._commands is None:
            raise ValueError("The episode is over or was never begun: call reset() before step().")
        if self._engine is None:
            engine = self._make_engine()
            assert self._game is not None
            self._moment = engine.start(self._game, self._seed)
            for command in self._commands:
                self._moment = engine.step(command)
        assert self._moment is not None
        return self._moment

    def __getstate__(self) -> dict[str, Any]:
        dropped = ("_engine", "_moment", "observation_space", "action_space")
        return {name: value for name, value in vars(self).items() if name not in dropped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._engine = self._moment = None
        self._set_spaces()


def _task_text(intro: str) -> str:
    """What the game says after "Your task is to:"."""
    return intro.rpartition("Your task is to:")[2].strip().rstrip(".")


def _unchanged(moment: Moment) -> Moment:
    values = {**vars(moment), "feedback": "Nothing happens."}
    return Moment(**values)
