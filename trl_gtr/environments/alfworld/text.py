"""ALFWorld in TextWorld's engine, with a drawn picture of the scene."""

from __future__ import annotations

from .backend import Moment
from .commands import as_put
from .drawing import draw_scene
from .engine import EngineState, TextEngine
from .games import Game
from .goals import Goal, goal_conditions, read_goal
from .planner import Plan, plan
from .world import WorldReader


class TextBackend:
    """Args:
    explore: The plan uses what has been seen in this episode only, instead of knowing where everything is.
    """

    def __init__(self, explore: bool = False) -> None:
        self.explore = explore
        self._engine = TextEngine()
        self.goal: Goal | None = None
        self._reader: WorldReader | None = None
        self._seen: dict[str, list[str]] = {}

    def start(self, game: Game, seed: int) -> Moment:
        contents = game.load()
        self.goal = read_goal(contents["pddl_problem"])
        self._engine.load(contents)
        state = self._engine.reset()
        self._reader = WorldReader(self._engine.state, self._engine.entities)
        self._seen = {}
        return self._moment(state)

    def step(self, command: str) -> Moment:
        return self._moment(self._engine.step(command))

    def close(self) -> None:
        self._engine.close()

    def _moment(self, state: EngineState) -> Moment:
        assert self._reader is not None, "start a game first"
        assert self.goal is not None
        world = self._reader.read()
        view = world.view()
        self._seen |= {name: contents for name, door, contents in view["here"] if door != "closed"}
        met, conditions = goal_conditions(world, self.goal)
        way = Plan([], None) if state.won else plan(world, self.goal, self._seen if self.explore else None)
        if self._engine.says_put:
            way = Plan([as_put(command) for command in way.commands], way.subgoal)
        return Moment(
            image=draw_scene(view),
            feedback=state.feedback,
            admissible_commands=state.admissible_commands,
            won=state.won,
            goal_rate=met / conditions,
            view=view,
            plan=way,
        )
