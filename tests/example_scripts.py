"""The example scripts as modules."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

from paths import EXAMPLES


def example(name: str) -> Any:
    """An example script as a module."""
    spec = spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
