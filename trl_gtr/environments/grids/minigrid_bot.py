"""BabyAI's bot as the expert of MiniGrid and BabyAI levels. Needs the extra `minigrid`.

The bot keeps a plan, so it must be told every action that is really taken. It knows only what the agent has seen,
and explores for the rest.
"""

from __future__ import annotations

import re
from typing import Any

from minigrid.core.actions import Actions
from minigrid.core.constants import COLOR_NAMES
from minigrid.core.world_object import WorldObj
from minigrid.envs.babyai.core.roomgrid_level import RoomGridLevel
from minigrid.envs.babyai.core.verifier import OBJ_TYPES, Instr, ObjDesc, PickupInstr
from minigrid.minigrid_env import MiniGridEnv
from minigrid.utils.baby_ai_bot import (
    BabyAIBot,
    CloseSubgoal,
    DisappearedBoxError,
    DropSubgoal,
    GoNextToSubgoal,
    OpenSubgoal,
    PickupSubgoal,
    Subgoal,
)

_MOST_SUBGOALS = 100
"""Far more than any plan needs in one step; on some levels BabyAI's bot would add subgoals for ever."""
_PICK_UP = re.compile(rf"pick up the (?P<color>{'|'.join(COLOR_NAMES)}) (?P<type>{'|'.join(OBJ_TYPES)})")


class Guide:
    """Suggests the next action in one episode.

    Args:
        level: The level, just reset.
        see_all: Whether the agent sees the whole level, so that nothing needs to be explored.
    """

    def __init__(self, level: MiniGridEnv, see_all: bool) -> None:
        self._bot: _Bot | None = _Bot(level, see_all)
        self.action: Actions | None = None
        """The next action, or `None` if the bot has lost its way or believes that it has finished."""
        self.told(None)

    def told(self, action: int | None) -> None:
        """Take note of the action that was really taken; `None` at the start."""
        if self._bot is None:
            return
        try:
            planned = self._bot.replan(action)
        except (AssertionError, DisappearedBoxError):  # how the bot says that it has no plan for this state
            self._bot = self.action = None
        else:
            self.action = None if planned == Actions.done else Actions(planned)

    @property
    def plan(self) -> str:
        """What the next action is for, in words: "go to the red ball"."""
        return "" if self._bot is None or self.action is None else _in_words(self._bot)


def can_guide(level: MiniGridEnv) -> bool:
    """Whether the bot understands what this level asks for."""
    return isinstance(level, RoomGridLevel) or _instruction(level) is not None


def name_of(thing: WorldObj | None) -> str:
    """An object in words: "red ball", "locked yellow door", "goal"; "nothing" for a free square."""
    match thing:
        case None:
            return "nothing"
        case WorldObj(type="goal" | "lava" | "wall" | "floor"):
            return str(thing.type)
        case WorldObj(type="door"):
            state = "open" if thing.is_open else "locked" if thing.is_locked else "closed"
            return f"{state} {thing.color} door"
    return f"{thing.color} {thing.type}"


# -- MiniGrid's own levels, which have no instructions ---------------------------------------------------------------


class _Goal(ObjDesc):
    """A goal square, which BabyAI's language has no word for."""

    def __init__(self, goal: WorldObj, position: tuple[int, int]) -> None:
        super().__init__(None)
        self.obj_set, self.obj_poss = [goal], [position]


class _Reach:
    """The instruction to step onto a goal square."""

    def __init__(self, goal: _Goal) -> None:
        self.goal = goal


class _StepForward(Subgoal):
    """Steps onto the goal in front of the agent."""

    def replan_before_action(self) -> int:
        return Actions.forward

    def replan_after_action(self, action_taken: int | None) -> None:
        if action_taken != Actions.forward:
            self._plan_undo_action(action_taken)


def _instruction(level: MiniGridEnv) -> Instr | _Reach | None:
    """What the level asks for: to pick something up, if the mission says so, or to reach a goal."""
    if found := _PICK_UP.search(level.mission):
        wanted = ObjDesc(type=found["type"], color=found["color"])
        wanted.find_matching_objs(_AsBabyAI(level, None))
        return PickupInstr(wanted)
    for row in range(level.height):
        for column in range(level.width):
            thing = level.grid.get(column, row)
            if thing is not None and thing.type == "goal":
                return _Reach(_Goal(thing, (column, row)))
    return None


class _AsBabyAI:
    """A MiniGrid level with the parts of a BabyAI level that the bot uses."""

    def __init__(self, level: MiniGridEnv, instrs: Instr | _Reach | None) -> None:
        self.level, self.instrs = level, instrs

    @property
    def unwrapped(self) -> _AsBabyAI:
        return self

    def room_from_pos(self, x: int, y: int) -> None:
        """Rooms matter only to instructions with a place, "the ball on your left"."""

    def __getattr__(self, name: str) -> Any:
        if name == "level":  # while unpickling
            raise AttributeError(name)
        return getattr(self.level, name)


class _Subgoals(list[Subgoal]):
    """The bot's stack, which ends a search for a plan that goes round in circles."""

    added = 0
    """Since the last action."""

    def append(self, subgoal: Subgoal) -> None:
        self.added += 1
        if self.added > _MOST_SUBGOALS:
            raise AssertionError("the bot's plan has no end")  # as the bot itself says that it has no plan
        super().append(subgoal)


class _Bot(BabyAIBot):
    """BabyAI's bot, also for MiniGrid's own levels."""

    stack: _Subgoals

    def __init__(self, level: MiniGridEnv, see_all: bool) -> None:
        self._see_all = see_all
        _set_positions(level)
        super().__init__(level if isinstance(level, RoomGridLevel) else _AsBabyAI(level, _instruction(level)))
        self.stack = _Subgoals(self.stack)

    def replan(self, action_taken: int | None = None) -> int:
        self.stack.added = 0
        return super().replan(action_taken)

    def _process_obs(self) -> None:
        """Note what is in view: everything that can be reached without opening a door, if the agent sees it all.

        The bot takes it for granted that there is a way to whatever it has seen.
        """
        super()._process_obs()
        if self._see_all:
            self.vis_mask[:] = True
            here = (*self.mission.unwrapped.agent_pos, 1, 0)
            _, _, reached = self._breadth_first_search([here], lambda *_: False, ignore_blockers=True)
            self.vis_mask[:] = False
            self.vis_mask[tuple(zip(*reached, strict=True))] = True

    def _process_instr(self, instr: Any) -> None:
        if isinstance(instr, _Reach):
            self.stack.extend([_StepForward(self), GoNextToSubgoal(self, instr.goal)])
        else:
            super()._process_instr(instr)


def _set_positions(level: MiniGridEnv) -> None:
    """Tell each object where it is: some levels set doors into the grid without doing so, and the bot asks them."""
    for row in range(level.height):
        for column in range(level.width):
            thing = level.grid.get(column, row)
            if thing is not None and thing.type != "wall" and thing.cur_pos is None:
                thing.init_pos = thing.cur_pos = (column, row)


# -- plans in words --------------------------------------------------------------------------------------------------


def _in_words(bot: _Bot) -> str:
    subgoal = bot.stack[-1]
    match subgoal:
        case GoNextToSubgoal(reason="Explore"):
            sought = next((each.datum for each in reversed(bot.stack) if isinstance(each.datum, ObjDesc)), None)
            return "explore" if sought is None else f"find the {_described(sought)}"
        case GoNextToSubgoal(reason="PutNext"):
            return f"go next to the {_described(subgoal.datum)}"
        case GoNextToSubgoal():
            return f"go to the {_described(subgoal.datum)}"
        case PickupSubgoal():
            return f"pick up the {name_of(subgoal.fwd_cell)}"
        case DropSubgoal():
            return f"drop the {name_of(subgoal.carrying)}"
        case OpenSubgoal():
            return f"open the {name_of(subgoal.fwd_cell)}"
        case CloseSubgoal():
            return f"close the {name_of(subgoal.fwd_cell)}"
        case _StepForward():
            return "step onto the goal"
    raise TypeError(f"there are no words for the subgoal {subgoal}")


def _described(datum: Any) -> str:
    match datum:
        case _Goal():
            return "goal"
        case ObjDesc():
            return f"{datum.color or ''} {datum.type or 'object'}".strip()
        case WorldObj():
            return name_of(datum)
    return "next free square"
