"""Check which parts of ALFWorld can run here, and what the rest needs."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path

from .games import DEFAULT_DATA, FOLDER
from .generator import SPLITS, bundled_games

TESTED = {"alfworld": "0.4.2", "ai2thor": "2.1.0"}
THOR_BUILDS = "~/.ai2thor/releases"


@dataclass(frozen=True)
class Finding:
    """One requirement: whether it is met, what was found, and what to do if it isn't."""

    name: str
    there: bool
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        mark = "ok     " if self.there else "missing"
        remedy = "" if self.there or not self.remedy else f"\n          → {self.remedy}"
        return f"{mark} {self.name}: {self.detail}{remedy}"


def text_findings() -> list[Finding]:
    install = 'pip install "trl-gtr[alfworld]" (compiles two packages: needs g++ and make, takes minutes)'
    count = sum(len(bundled_games(split)) for split in SPLITS)
    return [
        _package("alfworld", "alfworld", install),
        _package("textworld", "textworld", install),
        _package("fast_downward", "fast-downward-textworld", install),
        Finding("bundled games", True, f"{count}, generated when played; no download"),
    ]


def data_finding() -> Finding:
    setting = os.environ.get("ALFWORLD_DATA")
    root = Path(os.path.expandvars(setting or DEFAULT_DATA)).expanduser()
    counts = {split: len(list((root / FOLDER / split).glob("*/*/game.tw-pddl"))) for split in SPLITS}
    where = f"ALFWORLD_DATA={setting}" if setting else f"ALFWORLD_DATA is not set; looked in {root}"
    found = ", ".join(f"{split} {count}" for split, count in counts.items())
    return Finding(
        "ALFWorld's games",
        any(counts.values()),
        f"{where} ({found})",
        "alfworld-download, or set ALFWORLD_DATA to the folder that holds json_2.1.1/",
    )


def thor_findings() -> list[Finding]:
    visual = 'pip install "alfworld[vis]==0.4.2"'
    return [
        _package("alfworld", "alfworld", 'pip install "trl-gtr[alfworld]"'),
        _package("ai2thor", "ai2thor", f"{visual} (it needs ai2thor 2.1.0)"),
        _opencv(),
        _package("torchvision", "torchvision", visual),
        _display(),
        _build(),
        data_finding(),
    ]


def missing_for_thor() -> list[Finding]:
    """What THOR needs in any case. Not the Unity build, which ai2thor downloads when first started."""
    ignored = ("Unity build", data_finding().name)
    return [finding for finding in thor_findings() if not finding.there and finding.name not in ignored]


def report() -> tuple[str, bool]:
    """The full report, and whether the text backend can run."""
    text, thor, data = text_findings(), thor_findings(), data_finding()
    playable = all(finding.there for finding in text)
    verdicts = {
        'backend="text" on bundled games': playable,
        'backend="text" on ALFWorld\'s games': playable and data.there,
        'backend="thor"': data.there and not missing_for_thor(),
    }
    lines = ["Text games", *map(str, text), str(data), "", "THOR", *map(str, thor[1:-1]), "", "So"]
    lines += [f"{'can run' if able else 'can NOT run'}: {name}" for name, able in verdicts.items()]
    return "\n".join(lines), playable


def _package(module: str, distribution: str, remedy: str) -> Finding:
    # Check the metadata instead of importing: a script in the current folder could have the same name.
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return Finding(module, False, "not installed", remedy)
    tested = TESTED.get(distribution, version)
    return Finding(module, True, version if version == tested else f"{version} (tested with {tested})")


def _opencv() -> Finding:
    """Several distributions provide it (opencv-python, -headless, -contrib…), so try importing it."""
    try:
        import cv2
    except ImportError as error:  # also if it is installed, but a library such as libGL isn't
        return Finding("cv2", False, str(error), "pip install opencv-python-headless, which needs no libGL")
    return Finding("cv2", True, cv2.__version__)


def _display() -> Finding:
    """Check that an X server answers on the socket for its display number."""
    display = os.environ.get("DISPLAY", "")
    remedy = (
        "ai2thor 2.1.0 has no headless mode: start an X server with GL, e.g. with the startx.py of the ALFRED "
        "repository (`sudo python startx.py 0`, NVIDIA), then `export DISPLAY=:0`"
    )
    if not display:
        return Finding("X display", False, "DISPLAY is not set", remedy)
    host, _, screen = display.rpartition(":")
    socket = Path(f"/tmp/.X11-unix/X{screen.split('.')[0]}")
    if host in ("", "unix") and not socket.exists():
        return Finding("X display", False, f"DISPLAY={display}, but no server answers there", remedy)
    return Finding("X display", True, f"DISPLAY={display}")


def _build() -> Finding:
    folder = Path(THOR_BUILDS).expanduser()
    builds = sorted(path.name for path in folder.glob("thor-*")) if folder.is_dir() else []
    return Finding(
        "Unity build",
        bool(builds),
        ", ".join(builds) or f"none in {THOR_BUILDS}",
        "ai2thor downloads it when first started; without internet, copy thor-201909061227-Linux64 there",
    )
