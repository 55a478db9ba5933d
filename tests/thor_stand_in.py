"""A stand-in for THOR's simulator, under alfworld's genuine `AlfredThorEnv`: no Unity, X display, ai2thor or OpenCV.

`install()` puts it where alfworld looks for the simulator and its controllers. It plays a small kitchen and, like the
controller of alfworld 0.4.2, *offers* "move" but understands "put" only.
"""

from __future__ import annotations

import re
import sys
import types
from typing import Any

import numpy as np

RED, BLUE = 200, 10
ROOM = {"countertop 1": ["mug 1"], "desk 1": [], "fridge 1": ["apple 1"]}


class Event:
    def __init__(self, height: int, width: int) -> None:
        self.frame = np.zeros((height, width, 3), np.uint8)
        self.frame[..., 0], self.frame[..., 2] = RED, BLUE
        self.metadata: dict[str, Any] = {"lastActionSuccess": True, "objects": [], "inventoryObjects": []}


class ThorEnv:
    """What `AlfredThorEnv` uses of the simulator."""

    def __init__(self, player_screen_height: int, player_screen_width: int, **_: Any) -> None:
        self.last_event = Event(player_screen_height, player_screen_width)
        self.save_frames_to_disk = False
        self.cleaned_objects: set[str] = set()
        self.heated_objects: set[str] = set()
        self.cooled_objects: set[str] = set()
        self.stopped = False

    def reset(self, scene: str) -> None:
        self.contents = {name: list(things) for name, things in ROOM.items()}

    def restore_scene(self, *_: Any) -> None: ...

    def step(self, action: Any) -> Event:
        return self.last_event

    def set_task(self, trajectory: dict[str, Any], *_: Any, **__: Any) -> None:
        self.trajectory = trajectory

    def get_goal_satisfied(self) -> bool:
        return "mug 1" in self.contents["desk 1"]

    def get_goal_conditions_met(self) -> tuple[int, int]:
        return int(self.get_goal_satisfied()), 1

    def stop(self) -> None:
        self.stopped = True


class Controller:
    """Teleports, takes and puts, with the texts of alfworld's oracle controller."""

    sent: list[str] = []  # noqa: RUF012
    """Every command that reached the simulator, for the tests."""

    def __init__(self, env: ThorEnv, *_: Any, **__: Any) -> None:
        self.env, self.here, self.hand, self.opened = env, "", "", False
        listed = ", ".join(f"a {name}" for name in ROOM)
        self.feedback = (
            "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you "
            f"see {listed}.\n\nYour task is to: put a mug in desk"
        )

    def get_admissible_commands(self) -> list[str]:
        commands = ["inventory", "look", "help", *(f"go to {name}" for name in ROOM if name != self.here)]
        if self.here == "fridge 1":
            commands += ["open fridge 1", "close fridge 1"]
        if self.here and self.hand:
            commands.append(f"move {self.hand} to {self.here}")
        elif self.here and (self.here != "fridge 1" or self.opened):
            commands += [f"take {thing} from {self.here}" for thing in self.env.contents[self.here]]
        return commands

    def step(self, command: str) -> str:
        self.sent.append(command)
        if command == "break":
            raise RuntimeError("the simulator breaks on purpose")
        if match := re.fullmatch(r"go to (.+)", command):
            self.here = match[1]
            if self.here == "fridge 1" and not self.opened:
                return "You arrive at loc 2. The fridge 1 is closed. "
            return f"You arrive at loc 1. {self._contents(f'On the {self.here}')}"
        if command == "open fridge 1":
            self.opened = True
            return f"You open the fridge 1. The fridge 1 is open. {self._contents('In it')}"
        if match := re.fullmatch(r"take (.+) from (.+)", command):
            self.hand = match[1]
            self.env.contents[match[2]].remove(match[1])
            return f"You pick up the {match[1]} from the {match[2]}."
        if match := re.fullmatch(r"put (.+) in/on (.+)", command):
            self.env.contents[match[2]].append(self.hand)
            self.hand = ""
            return f"You put the {match[1]} in/on the {match[2]}."
        return "Nothing happens."

    def _contents(self, where: str) -> str:
        things = self.env.contents[self.here]
        return f"{where}, you see {', '.join(f'a {thing}' for thing in things) or 'nothing'}."


def install(monkeypatch: Any) -> None:
    """Let alfworld find the stand-in instead of the simulator, for one test."""
    controllers = ("OracleAgent", "OracleAStarAgent", "MaskRCNNAgent", "MaskRCNNAStarAgent")
    modules: dict[str, dict[str, Any]] = {
        "alfworld.env.thor_env": {"ThorEnv": ThorEnv},
        "alfworld.agents.detector.mrcnn": {"load_pretrained_model": lambda path: None},
        "alfworld.agents.controller": dict.fromkeys(controllers, Controller),
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "alfworld.agents.environment.alfred_thor_env", raising=False)
    monkeypatch.setattr("trl_gtr.environments.alfworld.thor.missing_for_thor", list)
    Controller.sent = []
