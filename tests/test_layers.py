"""Imports go one way: a module imports from its own room and from the layers below it, also inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from paths import ROOT

PACKAGE = "trl_gtr"

# From the bottom up. The longest prefix of a module's name decides; rooms of one layer don't know each other.
LAYERS = [
    ["types"],
    ["storage", "distributed"],
    ["config", "environments", "responses"],
    ["tasks"],
    ["tiny_llava"],
    ["policy"],
    ["correctors", "engines"],
    ["correctors.local"],
    ["rollouts"],
    ["guides"],
    ["learning"],
    ["evaluation"],
    ["runs", "planning", "interop", "distributed.trl_bridge"],
    ["trainer", "report"],
    ["scripts"],
    ["cli"],
]
LOCAL = "correctors.local"
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}

# What a layer may not use although it lies below: correctors speak for themselves, except the one that is a policy.
APART = {("correctors", "policy"), ("correctors", "tiny_llava"), ("policy", "config"), ("policy", "tasks")}


def modules() -> dict[str, str]:
    """Dotted name inside the package → source, packages under their own name."""
    found = {}
    for path in (ROOT / PACKAGE).rglob("*.py"):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        found[".".join(parts)] = path.read_text("utf-8")
    del found["__init__"]  # the public surface offers everything
    return found


def imports(module: str, source: str, known: set[str]) -> Iterator[str]:
    """The package's modules that this one imports anywhere, type checking aside."""
    tree = ast.parse(source)
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or id(node) in for_types:
            continue
        if node.level:
            base = [PACKAGE, *module.split(".")][: -node.level]
        elif node.module and node.module.split(".")[0] == PACKAGE:
            base = []
        else:
            continue
        target = [*base, *(node.module.split(".") if node.module else [])][1:]
        for name in node.names:
            inner = ".".join([*target, name.name])
            yield inner if inner in known else ".".join(target)


def place(module: str) -> str:
    """The room, or part of a room, that has a layer of its own."""
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in LEVELS), module)


def problem(module: str, target: str) -> str | None:
    here, there = place(module), place(target)
    if there not in LEVELS:
        return f"{target or 'the public surface'} has no layer"
    same_room = here.split(".")[0] == there.split(".")[0]
    if same_room and (LEVELS[here] >= LEVELS[there] or there == LOCAL):  # that one loads a policy only when made
        return None
    if (here, there) in APART:
        return f"{here} must not know {there}"
    return None if LEVELS[here] > LEVELS[there] else f"{there} is not below {here}"


def test_imports_go_one_way() -> None:
    sources = modules()
    known = {name.removesuffix(".__init__") for name in sources}
    wrong = [
        f"{module} imports {target}: {fault}"
        for module, source in sorted(sources.items())
        for target in sorted({*imports(module, source, known)})
        if (fault := problem(module.removesuffix(".__init__"), target)) is not None
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_has_a_layer() -> None:
    assert not [name for name in modules() if place(name.removesuffix(".__init__")) not in LEVELS]


@pytest.mark.parametrize(
    ("module", "source", "allowed"),
    [
        ("tasks.base", "from ..responses.format import ThoughtFormat", True),
        ("tasks.base", "def f():\n    from ..policy.scoring import VLMPolicy", False),
        ("correctors.openai.chat", "from ...types import Response", True),
        ("correctors.expert", "from ..policy.scoring import VLMPolicy", False),
        ("correctors.local", "from ..policy.scoring import VLMPolicy", True),
        ("rollouts.collector", "from ..trainer import GTRTrainer", False),
        ("tasks.base", "from .. import make_task", False),
        ("config", "from .distributed.ppo_base import PPOConfig", True),
        ("config", "from .scripts.arguments import json_options", False),
    ],
)
def test_the_check_sees_what_it_guards(module: str, source: str, allowed: bool) -> None:
    known = {name.removesuffix(".__init__") for name in modules()}
    assert all(problem(module, target) is None for target in imports(module, source, known)) == allowed


def test_the_top_level_is_the_public_surface() -> None:
    files = {path.stem for path in (ROOT / PACKAGE).glob("*.py")}
    assert files == {"__init__", "config", "types", "trainer", "cli"}
