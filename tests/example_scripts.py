"""The example scripts as modules."""

from __future__ import annotations

import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import module_from_spec, spec_from_file_location
from io import StringIO
from typing import Any
from unittest import mock

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


def run_here(name: str, *options: Any) -> str:
    """What an example prints, both streams. It runs in this process: a new one needs ten seconds for its imports."""
    words, shown = [f"{name}.py", *map(str, options)], StringIO()
    with mock.patch.object(sys, "argv", words), redirect_stdout(shown), redirect_stderr(shown):
        try:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    return shown.getvalue()
