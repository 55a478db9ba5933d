"""A stand-in for THOR's Unity build: a process that speaks the protocol of ai2thor 2.1.0, under all that is genuine.

`ai2thor` starts it, like Unity, as `~/.ai2thor/releases/<build>/<build>`. It posts a frame with metadata to
`http://$AI2THOR_HOST:$AI2THOR_PORT/train`, and the answer is the next action. The rooms are those of ALFRED: their
receptacles, and the points to see them from, come with alfworld; a game's `object_poses` fill them. Who stands at such
a point sees the receptacles that belong to it and what is in or on them, unless they are closed.

It never ends by itself when it loses its connection, so that a test notices a simulator that nobody has ended.
Only the standard library and NumPy are used. `UNITY_STAND_IN` holds settings as JSON:

- `log`: a file that gets a line for every start ("start <pid>") and every action;
- `exit_on`, `hang_on`: an action, or "start", at which it crashes, or answers no more;
- `refuse`: lists of an action and the beginning of an object's id; such actions fail.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

SIZE = 300
BOUNDARY = "unity-stand-in"
LIFETIME = 600.0  # seconds; so long may an orphan be found, then the machine is rid of it
OPENABLE = {"Fridge", "Cabinet", "Microwave", "Drawer", "Safe", "Box"}
LAMPS = {"Desk": "DeskLamp", "SideTable": "DeskLamp", "Sofa": "FloorLamp"}


class Refused(Exception):
    """An action that fails; the message goes to the metadata."""


class Room:
    """A floor plan with its objects. Objects are the dictionaries that THOR's metadata holds."""

    def __init__(self, scene: str, refuse: list[list[str]]) -> None:
        self.refuse = refuse
        self.agent = {"x": 0.0, "y": 0.9, "z": 0.0, "rotation": 0.0, "horizon": 30.0}
        self.objects: dict[str, dict[str, Any]] = {}
        self.parent: dict[str, str] = {}
        self.hand = ""
        self.views = read_layout(scene)
        for name in self.views:
            kind = name.split("|")[0] + ("Basin" if name.endswith("Basin") else "")
            self.add(name, kind, receptacle=True, openable=kind in OPENABLE, toggleable=kind == "Microwave")
            if kind == "SinkBasin":
                self.add_fixture("Faucet", name)
        for kind, lamp in LAMPS.items():
            places = [name for name in self.views if name.startswith(kind + "|")]
            if places and not any(each["objectType"] == lamp for each in self.objects.values()):
                self.add_fixture(lamp, places[0])

    def add(self, name: str, kind: str, **properties: Any) -> None:
        x, y, z = (float(part) for part in name.split("|")[1:4])
        can = dict.fromkeys(("receptacle", "openable", "toggleable", "pickupable", "dirtyable", "sliceable"), False)
        self.objects[name] = {
            "objectId": name,
            "name": name.replace("|", "_"),
            "objectType": kind,
            "position": {"x": x, "y": y, "z": z},
            "rotation": {"x": 0.0, "y": 0.0, "z": 0.0},
            **can,
            "isOpen": False,
            "isToggled": False,
            "isDirty": False,
            **properties,
        }

    def add_fixture(self, kind: str, place: str) -> None:
        """A thing that belongs to a receptacle and stays there."""
        name = "|".join([kind, *place.split("|")[1:4]])
        self.add(name, kind, toggleable=True)
        self.parent[name] = place

    # -- what is seen ----------------------------------------------------------------------------------------------

    def seen(self) -> list[str]:
        pose = [self.agent[key] for key in ("x", "z", "rotation", "horizon")]
        places = [name for name, view in self.views.items() if np.allclose(view, pose)]
        return places + [name for name in self.parent if self.parent[name] in places and self.reachable(name)]

    def reachable(self, name: str) -> bool:
        place = self.objects[self.parent[name]]
        return not place["openable"] or place["isOpen"]

    def metadata(self) -> list[dict[str, Any]]:
        seen = set(self.seen())
        return [
            {
                **each,
                "visible": name in seen,
                "distance": 1.0 if name in seen else 5.0,
                "parentReceptacles": [self.parent[name]] if name in self.parent else None,
                "receptacleObjectIds": [one for one, place in self.parent.items() if place == name],
            }
            for name, each in self.objects.items()
        ]

    def color(self, name: str) -> list[int]:
        place = list(self.objects).index(name)
        return [40 + place % 8 * 25, 40 + place // 8 % 8 * 25, 40 + place // 64 * 25]

    def draw(self) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """The picture, top row first, and the bounds of each thing in it: one field of a grid for each."""
        picture = np.zeros((SIZE, SIZE, 3), np.uint8)
        seen = self.seen()
        columns = max(1, math.ceil(math.sqrt(len(seen))))
        field = SIZE // columns
        bounds = []
        for i, name in enumerate(seen):
            row, column = divmod(i, columns)
            left, top = column * field, row * field
            picture[top : top + field, left : left + field] = self.color(name)
            box = [left, SIZE - top - field, left + field, SIZE - top]
            bounds.append({"color": self.color(name), "bounds": box})
        return picture, bounds

    # -- actions ---------------------------------------------------------------------------------------------------

    def act(self, action: dict[str, Any]) -> None:
        method = getattr(self, action["action"], None)
        if method is None or not action["action"][0].isupper():
            raise LookupError(f"Invalid action: {action['action']}")
        for kind, start in self.refuse:
            target = action.get("receptacleObjectId", action.get("objectId", ""))
            if action["action"] == kind and target.startswith(start):
                raise Refused(f"{kind} {target} is refused on purpose")
        method(action)

    def Initialize(self, action: dict[str, Any]) -> None: ...

    def Pass(self, action: dict[str, Any]) -> None: ...

    def SetStateOfAllObjects(self, action: dict[str, Any]) -> None:
        for each in self.objects.values():
            each["isDirty"] = each["dirtyable"] and action["forceAction"] and action["StateChange"] == "CanBeDirty"

    def SetObjectToggles(self, action: dict[str, Any]) -> None:
        for toggle in action["objectToggles"]:
            for each in self.objects.values():
                if each["objectType"] == toggle["objectType"]:
                    each["isToggled"] = toggle["isOn"]

    def SetObjectPoses(self, action: dict[str, Any]) -> None:
        """Each thing lies in or on the receptacle that is nearest to its position."""
        for pose in action["objectPoses"]:
            kind = pose["objectName"].split("_")[0]
            point = [pose["position"][axis] for axis in "xyz"]
            name = "|".join([kind, *(f"{number:+06.2f}" for number in point)])
            self.add(name, kind, pickupable=True, dirtyable=True)
            self.parent[name] = min(self.views, key=lambda place: math.dist(point, self.point(place)))

    def point(self, name: str) -> list[float]:
        return list(self.objects[name]["position"].values())

    def TeleportFull(self, action: dict[str, Any]) -> None:
        self.agent = {key: float(action[key]) for key in ("x", "y", "z", "horizon")}
        self.agent["rotation"] = float(action["rotation"]["y"]) % 360

    def OpenObject(self, action: dict[str, Any]) -> None:
        self.target(action, "openable")["isOpen"] = True

    def CloseObject(self, action: dict[str, Any]) -> None:
        self.target(action, "openable")["isOpen"] = False

    def ToggleObjectOn(self, action: dict[str, Any]) -> None:
        self.toggle(action, on=True)

    def ToggleObjectOff(self, action: dict[str, Any]) -> None:
        self.toggle(action, on=False)

    def toggle(self, action: dict[str, Any], on: bool) -> None:
        target = self.target(action, "toggleable")
        if target["isToggled"] == on:
            raise Refused(f"{target['objectId']} is so already")
        if target["openable"] and target["isOpen"]:
            raise Refused(f"{target['objectId']} must be closed")
        target["isToggled"] = on

    def CleanObject(self, action: dict[str, Any]) -> None:
        self.objects[action["objectId"]]["isDirty"] = False

    def PickupObject(self, action: dict[str, Any]) -> None:
        target = self.target(action, "pickupable")
        if self.hand:
            raise Refused("the hand is full")
        self.hand = target["objectId"]
        del self.parent[self.hand]

    def PutObject(self, action: dict[str, Any]) -> None:
        place = self.target({"objectId": action["receptacleObjectId"]}, "receptacle")
        if not self.hand or self.hand != action["objectId"]:
            raise Refused("the hand doesn't hold it")
        if place["openable"] and not place["isOpen"]:
            raise Refused(f"{place['objectId']} is closed")
        self.parent[self.hand], self.hand = place["objectId"], ""

    def target(self, action: dict[str, Any], ability: str) -> dict[str, Any]:
        name = action["objectId"]
        if name not in self.seen() or not self.objects[name][ability]:
            raise Refused(f"{name} is not in sight, or not {ability}")
        return self.objects[name]


def read_layout(scene: str) -> dict[str, list[float]]:
    """Receptacle → x, z, rotation and horizon of the point to see it from; of the floor plans that alfworld brings."""
    package = importlib.util.find_spec("alfworld")
    assert package is not None
    assert package.submodule_search_locations is not None
    folder = Path(package.submodule_search_locations[0]) / "gen" / "layouts"
    return json.loads((folder / f"{scene.removesuffix('_physics')}-openable.json").read_text(encoding="utf-8"))


# -- the protocol ----------------------------------------------------------------------------------------------------


def describe(room: Room, sequence: int, action: str, error: str, code: str) -> dict[str, Any]:
    _, bounds = room.draw()
    agent = {
        "screenWidth": SIZE,
        "screenHeight": SIZE,
        "colors": [{"name": name, "color": room.color(name)} for name in room.objects],
        "colorBounds": bounds,
        "thirdPartyCameras": [],
        "lastAction": action,
        "lastActionSuccess": not error,
        "errorMessage": error,
        "errorCode": code,
        "isSceneAtRest": True,
        "objects": room.metadata(),
        "inventoryObjects": [{"objectId": room.hand, "objectType": room.hand.split("|")[0]}] if room.hand else [],
        "agent": {
            "position": {axis: room.agent[axis] for axis in "xyz"},
            "rotation": {"x": 0.0, "y": room.agent["rotation"], "z": 0.0},
            "cameraHorizon": room.agent["horizon"],
        },
    }
    return {"agents": [agent], "activeAgentId": 0, "sequenceId": sequence}


def form(room: Room, metadata: dict[str, Any]) -> bytes:
    """Multipart, with a line break before the first boundary too, as Unity writes it. Pictures go bottom row first."""
    picture = room.draw()[0][::-1].tobytes()
    parts = [
        ('name="metadata"', "text/plain; charset=utf-8", json.dumps(metadata).encode()),
        ('name="token"', "text/plain; charset=utf-8", os.environ["AI2THOR_CLIENT_TOKEN"].encode()),
        *(
            (f'name="{name}"; filename="{name}.rgb"', "image/raw", picture)
            for name in ("image", "image_depth", "image_ids", "image_classes")
        ),
    ]
    body = b""
    for disposition, kind, content in parts:
        head = f"\r\n--{BOUNDARY}\r\nContent-Type: {kind}\r\nContent-disposition: form-data; {disposition}\r\n\r\n"
        body += head.encode() + content
    return body + f"\r\n--{BOUNDARY}--\r\n".encode()


def wait_for_the_end() -> None:
    """Unity lives on without a connection; whoever started it has to end it."""
    time.sleep(LIFETIME)
    sys.exit(3)


def fail(event: str, settings: dict[str, Any]) -> None:
    if event == settings.get("exit_on"):
        os._exit(9)
    if event == settings.get("hang_on"):
        wait_for_the_end()


def main() -> None:
    settings = json.loads(os.environ.get("UNITY_STAND_IN", "{}"))
    log = open(settings.get("log", os.devnull), "a", buffering=1)  # noqa: SIM115  open until it ends
    log.write(f"start {os.getpid()}\n")
    fail("start", settings)
    room = Room("FloorPlan1", settings.get("refuse", []))
    connection = http.client.HTTPConnection(os.environ["AI2THOR_HOST"], int(os.environ["AI2THOR_PORT"]))
    sequence, name, error, code = 0, "", "", ""
    while True:
        try:
            headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
            connection.request("POST", "/train", form(room, describe(room, sequence, name, error, code)), headers)
            action = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError):
            wait_for_the_end()
        if "action" not in action:
            wait_for_the_end()
        sequence, name, error, code = action["sequenceId"], action["action"], "", ""
        log.write(json.dumps(action) + "\n")
        fail(name, settings)
        try:
            if name == "Reset":
                room = Room(action["sceneName"], settings.get("refuse", []))
            else:
                room.act(action)
        except Refused as refusal:
            error = str(refusal)
        except LookupError as invalid:
            error, code = str(invalid), "InvalidAction"


if __name__ == "__main__":
    main()
