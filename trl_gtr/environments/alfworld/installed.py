"""Import the installed package `alfworld`, even if a script has the same name.

A script called alfworld.py, as in the examples, comes first on Python's path and hides the package from itself and
from every script in its folder. Once the package is imported, its modules are found through it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def import_package() -> None:
    if hasattr(sys.modules.get("alfworld"), "__path__"):
        return
    sys.modules.pop("alfworld", None)
    path = list(sys.path)
    sys.path[:] = [folder for folder in path if not (Path(folder) / "alfworld.py").is_file()]
    try:
        importlib.import_module("alfworld")
    finally:
        sys.path[:] = path
