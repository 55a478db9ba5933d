"""ALFWorld in THOR: `AlfredThorEnv` of alfworld 0.4.2, one simulator for each environment.

What it needs (ai2thor 2.1.0, OpenCV, an X display with GL, a Unity build, ALFWorld's data) is checked before it
starts, and what is missing is named with its remedy.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .backend import Moment
from .belief import Belief
from .check import missing_for_thor
from .commands import as_move, as_put
from .games import Game
from .generator import rules
from .goals import TASK_TYPES, Goal
from .installed import import_package
from .planner import Plan, plan

FRAME = 300
ENDLESS = 10**9  # steps; the limit of an episode is gymnasium's business


def configuration(folder: Path) -> dict[str, Any]:
    """What alfworld's base_config.yaml says, which its wheel doesn't carry, for the games in `folder`."""
    return {
        "dataset": {
            "data_path": str(folder),
            "eval_id_data_path": str(folder),
            "eval_ood_data_path": str(folder),
            "num_train_games": -1,
            "num_eval_games": -1,
        },
        "env": {
            "type": "AlfredThorEnv",
            "task_types": list(range(1, len(TASK_TYPES) + 1)),
            "goal_desc_human_anns_prob": 0.0,
            "expert_type": "handcoded",
            "thor": {
                "screen_width": FRAME,
                "screen_height": FRAME,
                "smooth_nav": False,
                "save_frames_to_disk": False,
                "save_frames_path": "./",
            },
        },
        "controller": {"type": "oracle", "debug": False, "load_receps": True},
        "mask_rcnn": {"pretrained_model_path": ""},
        "general": {"training_method": "dagger"},
        "dagger": {"training": {"max_nb_steps_per_episode": ENDLESS}},
    }


class ThorBackend:
    """Frames are THOR's, in RGB. The plan is made from the texts: THOR names a thing once it is seen."""

    def __init__(self) -> None:
        missing = missing_for_thor()
        if missing:
            raise ImportError("THOR can't start:\n" + "\n".join(f"- {finding}" for finding in missing))
        self._simulator: Any = None
        self._error: Exception | None = None

    def start(self, game: Game, seed: int) -> Moment:
        folder = Path(game.name).parent
        trajectory = folder / "traj_data.json"
        if game.bundled or not trajectory.is_file():
            raise ValueError(f"THOR needs the trajectory of a game, {trajectory}: it is part of ALFWorld's data.")
        data = json.loads(trajectory.read_text(encoding="utf-8"))
        parameters = data["pddl_params"]
        self.goal = Goal(
            data["task_type"],
            parameters["object_target"].lower(),
            parameters["parent_target"].lower() if data["task_type"] != "look_at_obj_in_light" else "",
            parameters["toggle_target"].lower(),
        )
        if self._simulator is None:
            self._simulator = self._open(folder)
        # The class draws a game from this list by the global generator, whatever its seed: leave it no choice.
        self._simulator.json_file_list = [str(trajectory)]
        with seeded(seed):
            texts, infos = self._simulator.reset()
        self._check()
        law = rules()
        self._belief = Belief(
            texts[0],
            openable=frozenset(kind.lower() for kind in ("Fridge", "Cabinet", "Microwave", "Drawer", "Safe", "Box")),
            can_contain=frozenset((kind.lower(), thing.lower()) for kind in law.holds for thing in law.holds[kind]),
        )
        return self._moment(texts[0], infos)

    def step(self, command: str) -> Moment:
        # 0.4.2 offers "move" but its controller reads "put" only.
        texts, _, _, infos = self._simulator.step([as_put(command)])
        self._check()
        self._belief.follow(command, texts[0])
        return self._moment(texts[0], infos)

    def close(self) -> None:
        if self._simulator is not None:
            self._simulator.close()
            self._simulator = None

    def _open(self, folder: Path) -> Any:
        import_package()
        from alfworld.agents.environment import get_environment

        simulator = get_environment("AlfredThorEnv")(configuration(folder), train_eval="train").init_env(batch_size=1)
        # An error would end the simulator's thread, and the next command would wait for ever.
        thread = simulator.envs[0]
        thread.step, thread.reset = self._noted(thread.step), self._noted(thread.reset)
        return simulator

    def _noted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            try:
                return method(*arguments)
            except Exception as error:
                self._error = error

        return call

    def _check(self) -> None:
        """Raise here what was raised in the simulator's thread."""
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError(f"THOR has failed: {error!r}. Reset the environment.") from error

    def _moment(self, text: str, infos: dict[str, Any]) -> Moment:
        world = self._belief.world()
        won = bool(infos["won"][0])
        return Moment(
            image=np.ascontiguousarray(self._simulator.get_frames()[0][:, :, ::-1]),  # BGR → RGB
            feedback=text,
            admissible_commands=sorted({as_move(command) for command in infos["admissible_commands"][0]}),
            won=won,
            goal_rate=float(infos["goal_condition_success_rate"][0]),
            view=world.view(),
            plan=Plan([], None) if won else plan(world, self.goal, self._belief.seen),
        )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's global generator, seeded for a while: THOR's wording of a task is drawn from it."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
