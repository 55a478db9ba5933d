"""ALFWorld in THOR: the working part of alfworld 0.4.2's `AlfredThorEnv`, one simulator for each environment.

What it needs (ai2thor 2.1.0, OpenCV, an X display with GL, a Unity build, ALFWorld's data) is checked before it
starts, and what is missing is named with its remedy.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np

from .backend import Moment
from .belief import Belief
from .check import missing_for_thor
from .commands import as_move, as_put
from .games import Game
from .generator import rules
from .goals import Goal
from .installed import import_package
from .planner import Plan, plan

FRAME = 300
ENDLESS = 10**9  # steps; the limit of an episode is gymnasium's business

CONFIGURATION: dict[str, Any] = {
    "env": {
        "goal_desc_human_anns_prob": 0.0,
        "thor": {
            "screen_width": FRAME,
            "screen_height": FRAME,
            "smooth_nav": False,
            "save_frames_to_disk": False,
            "save_frames_path": "./",
        },
    },
    "controller": {"type": "oracle", "debug": False, "load_receps": True},
    "general": {"training_method": "dagger"},
    "dagger": {"training": {"max_nb_steps_per_episode": ENDLESS}},
}
"""As much of alfworld's base_config.yaml, which its wheel doesn't carry, as is read."""


class ThorBackend:
    """Frames are THOR's, in RGB. The plan is made from the texts: THOR names a thing once it is seen."""

    def __init__(self) -> None:
        missing = missing_for_thor()
        if missing:
            raise ImportError("THOR can't start:\n" + "\n".join(f"- {finding}" for finding in missing))
        self._thor: Any = None
        self._thread: ThreadPoolExecutor | None = None
        self.goal: Goal | None = None
        self._belief: Belief | None = None

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
        if self._thor is None:
            self._thread = ThreadPoolExecutor(1, "thor")
            self._thor = self._thread.submit(open_thor).result()
        with seeded(seed):
            text = self._run(self._thor.reset, str(trajectory))
        holds = rules().holds
        self._belief = Belief(
            text,
            openable=frozenset(kind.lower() for kind in ("Fridge", "Cabinet", "Microwave", "Drawer", "Safe", "Box")),
            can_contain=frozenset((kind.lower(), thing.lower()) for kind in holds for thing in holds[kind]),
        )
        return self._moment()

    def step(self, command: str) -> Moment:
        if self._thor is None:
            raise RuntimeError("THOR isn't running: reset the environment.")
        self._run(self._thor.step, as_put(command))  # 0.4.2 offers "move" but its controller reads "put" only
        assert self._belief is not None
        self._belief.follow(command, self._thor.get_results()[0])
        return self._moment()

    def close(self) -> None:
        if self._thor is not None:
            thor, self._thor = self._thor, None
            thor.env.stop()
            assert self._thread is not None
            self._thread.shutdown(wait=False)

    def _run(self, method: Callable[[str], Any], argument: str) -> Any:
        """In a thread, for alfworld's controllers swallow every error of a step, and would swallow an interrupt here.

        A lost simulator is swallowed too; so it is looked for, and ended.
        """
        simulator = self._thor.env
        assert self._thread is not None
        try:
            return self._thread.submit(method, argument).result()
        finally:
            if simulator.lost is not None:
                self.close()
                raise simulator.lost

    def _moment(self) -> Moment:
        feedback, _, admissible, won, goal_rate, _ = self._thor.get_results()
        assert self._belief is not None
        assert self.goal is not None
        world = self._belief.world()
        found = Plan([], None) if won else plan(world, self.goal, self._belief.seen, self._belief.refused())
        return Moment(
            image=np.ascontiguousarray(self._thor.get_last_frame()[:, :, ::-1]),  # BGR → RGB
            feedback=feedback,
            admissible_commands=sorted({as_move(command) for command in admissible}),
            won=bool(won),
            goal_rate=float(goal_rate),
            view=world.view(),
            plan=found,
        )


def open_thor() -> Any:
    """alfworld's `Thor` and its simulator. `Thor` is a thread that is never started: there its errors would be lost.

    It is told to evaluate, for in training it asks alfworld's handcoded expert at every step, and ours plans instead.
    """
    import_package()
    from alfworld.agents.environment.alfred_thor_env import AlfredThorEnv

    from .simulator import Simulator

    thor = AlfredThorEnv.Thor(Queue(), train_eval="eval_in_distribution")
    thor.env = Simulator(player_screen_height=FRAME, player_screen_width=FRAME)
    thor.init_env(CONFIGURATION)
    return thor


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's global generator, seeded for a while: THOR's wording of a task is drawn from it."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
