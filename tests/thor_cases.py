"""What the tests of THOR share: when to skip, a machine on which the stand-in for Unity is installed, and games."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import unity_stand_in

BUILD = "thor-201909061227-Linux64"

needs_ai2thor = [
    pytest.mark.alfworld,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("alfworld", "ai2thor", "cv2")),
        reason='needs THOR\'s Python side: pip install "alfworld[vis]==0.4.2"',
    ),
    pytest.mark.skipif(sys.platform != "linux", reason="the stand-in for Unity is installed as its Linux build"),
]

KITCHEN, BEDROOM = 14, 316
GOALS: dict[str, dict[str, Any]] = {
    "pick_and_place_simple": {"scene": KITCHEN, "object": "Mug", "parent": "Cabinet"},
    "look_at_obj_in_light": {"scene": BEDROOM, "object": "CD", "toggle": "DeskLamp"},
    "pick_clean_then_place_in_recep": {"scene": KITCHEN, "object": "Mug", "parent": "Cabinet"},
    "pick_heat_then_place_in_recep": {"scene": KITCHEN, "object": "Mug", "parent": "Cabinet"},
    "pick_cool_then_place_in_recep": {"scene": KITCHEN, "object": "Mug", "parent": "Cabinet"},
    "pick_two_obj_and_place": {"scene": BEDROOM, "object": "CD", "parent": "Drawer"},
}
THINGS = {
    KITCHEN: [("Mug", (0.99, 0.95, 1.02)), ("Apple", (-0.53, 0.1, -1.55)), ("Fork", (0.99, 0.95, -1.52))],
    BEDROOM: [("CD", (1.49, 0.5, -0.82)), ("CD", (-1.7, 0.1, -0.45)), ("Book", (1.49, 0.7, -1.84))],
}
"""Floor plan → what lies in it, and where: a mug on a countertop, CDs on the shelf and on the bed."""

_DETECTOR = {
    "torchvision-0.0.dist-info/METADATA": "Name: torchvision\nVersion: 0.0\n",
    "torchvision/__init__.py": "",
    "torchvision/transforms.py": "",
    "torchvision/models/__init__.py": "",
    "torchvision/models/detection/__init__.py": "",
    "torchvision/models/detection/rpn.py": "AnchorGenerator = RPNHead = None",
    "torchvision/models/detection/faster_rcnn.py": "FastRCNNPredictor = None",
    "torchvision/models/detection/mask_rcnn.py": "MaskRCNNPredictor = None",
}


def write_game(folder: Path, task_type: str, explored: bool = True) -> Path:
    """A game as it is in ALFWorld's data, as far as THOR reads it.

    Unless it is `explored`, its first act is to look at every receptacle from all points, pixel by pixel.
    """
    goal = GOALS[task_type]
    targets = {f"{key}_target": goal.get(key, "") for key in ("object", "parent", "toggle", "mrecep")}
    poses = [
        {"objectName": f"{kind}_{i}", "position": dict(zip("xyz", point, strict=True)), "rotation": {}}
        for i, (kind, point) in enumerate(THINGS[goal["scene"]])
    ]
    scene = {
        "scene_num": goal["scene"],
        "floor_plan": f"FloorPlan{goal['scene']}",
        "object_poses": poses,
        "object_toggles": [{"objectType": goal["toggle"], "isOn": False}] if "toggle" in goal else [],
        "dirty_and_empty": "clean" in task_type,
        "init_action": {"action": "TeleportFull", "x": 0.0, "y": 0.9, "z": 0.0, "rotation": 0, "horizon": 30},
    }
    trajectory = {
        "task_type": task_type,
        "pddl_params": {**targets, "object_sliced": False},
        "scene": scene,
        "plan": {"high_pddl": [{}], "low_actions": []},
    }
    place = folder / f"{task_type}-{goal['object']}-None-Place-{goal['scene']}" / "trial_1"
    place.mkdir(parents=True)
    (place / "traj_data.json").write_text(json.dumps(trajectory))
    (place / "game.tw-pddl").write_text('{"solvable": true}')
    if explored:
        (place / "receps.json").write_text(json.dumps(receptacles(goal["scene"])))
    return place / "game.tw-pddl"


def receptacles(scene: int) -> dict[str, Any]:
    """What alfworld's controller finds out in a floor plan, as it would save it."""
    found: dict[str, Any] = {}
    for name, (x, z, rotation, horizon) in unity_stand_in.read_layout(f"FloorPlan{scene}").items():
        kind = name.split("|")[0] + ("Basin" if name.endswith("Basin") else "")
        number = 1 + sum(each["object_type"] == kind for each in found.values())
        view = {"x": x, "y": 0.9, "z": z, "rotateOnTeleport": False, "rotation": rotation, "horizon": horizon}
        found[name] = {
            "object_id": name,
            "object_type": kind,
            "locs": {"action": "TeleportFull", **view},
            "num_pixels": 1,
            "num_id": f"{kind.lower()} {number}",
            "closed": True if kind in unity_stand_in.OPENABLE else None,
        }
    return found


class Unity:
    """Installs the stand-in where ai2thor looks for Unity's build, and knows what became of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch, self.folder, self.log = monkeypatch, folder, folder / "unity.log"
        program = folder / ".ai2thor" / "releases" / BUILD / BUILD
        write_program(program, f'exec "{sys.executable}" "{unity_stand_in.__file__}" "$@"')
        write_program(folder / "bin" / "xdpyinfo", "exit 0")  # asked whether the display is there
        monkeypatch.setenv("HOME", str(folder))
        monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("DISPLAY", "localhost:0")
        self._detector()
        self.set()

    def set(self, **settings: Any) -> None:
        """How the next one behaves; see `unity_stand_in`."""
        self.monkeypatch.setenv("UNITY_STAND_IN", json.dumps({"log": str(self.log), **settings}))

    def _detector(self) -> None:
        """alfworld imports its Mask R-CNN, which the oracle doesn't use, and so torchvision, whose registry build
        can't be imported beside a torch without CUDA."""
        if torchvision_works():
            return
        for name, text in _DETECTOR.items():
            file = self.folder / "packages" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        self.monkeypatch.syspath_prepend(self.folder / "packages")

    @property
    def pids(self) -> list[int]:
        """Of all that were started."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith("start ")]

    def python(self, script: str) -> subprocess.Popen[str]:
        """A process that finds the same packages."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)

    @property
    def actions(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def gone(self, seconds: float = 20.0) -> bool:
        """Have all that were started ended, or do they within this time?"""
        return eventually(lambda: not any(running(pid) for pid in self.pids), seconds)


@cache
def torchvision_works() -> bool:
    """Asked once, before there is anything of the same name."""
    done = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True)
    return done.returncode == 0


def write_program(file: Path, command: str) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(f"#!/bin/sh\n{command}\n")
    file.chmod(0o755)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def eventually(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
