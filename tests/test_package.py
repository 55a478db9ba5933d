"""The package as a whole: what importing it costs, what it exports, and whether its papers agree with it."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from paths import ROOT

import trl_gtr

HEAVY = {"torch", "transformers", "trl", "accelerate", "peft", "datasets", "matplotlib", "openai"}


def modules_after(statement: str, cwd: Path) -> set[str]:
    """Names in `sys.modules` of a fresh interpreter after `statement`."""
    code = f"import sys; before = {{*sys.modules}}; {statement}; print(*{{*sys.modules}} - before, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_import_trl_gtr_loads_nothing_but_itself(tmp_path):
    loaded = modules_after("import trl_gtr", tmp_path)
    assert {name for name in loaded if name.startswith("trl_gtr")} == {"trl_gtr"}
    assert "numpy" not in loaded
    assert len(loaded) < 60  # the standard library's own


@pytest.mark.parametrize("statement", ["import trl_gtr.environments", "from trl_gtr import make_task, Task, Response"])
def test_games_and_tasks_need_no_torch(statement, tmp_path):
    loaded = modules_after(statement, tmp_path)
    assert "gymnasium" in loaded  # else the statement above has imported nothing of interest
    assert not HEAVY & loaded


def test_public_names_resolve():
    assert len(set(trl_gtr.__all__)) == len(trl_gtr.__all__) > 1
    for name in trl_gtr.__all__:
        assert getattr(trl_gtr, name) is not None
        assert name in dir(trl_gtr)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = trl_gtr.no_such_name


def test_type_checkers_see_the_same_names():
    """The `if TYPE_CHECKING` imports and the run-time table name the same things in the same modules."""
    tree = ast.parse((ROOT / "trl_gtr" / "__init__.py").read_text("utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    typed = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name, (
                f"write `{alias.name} as {alias.name}`: type checkers then call it public"
            )
            typed[alias.name] = node.module
    assert typed == trl_gtr._EXPORTS


def test_version_is_the_distributions():
    assert trl_gtr.__version__ == importlib.metadata.version("trl-gtr")
    assert f"## [{trl_gtr.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_package_is_typed():
    assert (Path(trl_gtr.__file__).parent / "py.typed").is_file()


@pytest.fixture(scope="module")
def project() -> dict:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no TOML reader")
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_every_extra_is_documented(project):
    pages = (ROOT / "README.md").read_text("utf-8") + (ROOT / "docs" / "contributing.md").read_text("utf-8")
    missing = [extra for extra in project["optional-dependencies"] if f"`{extra}`" not in pages]
    assert not missing, f"say in README.md or docs/contributing.md what these extras are for: {missing}"


def test_constraints_pin_what_pyproject_allows(project):
    pins = {}
    for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            (version,) = pin.specifier
            assert version.operator == "==", line
            pins[pin.name] = version.version
    assert pins["torch"] == "2.13.0"  # no local version: other machines need another build
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *(text for extra in extras for text in extras[extra])]:
        wanted = Requirement(text)
        # Ourselves; pinned in pyproject.toml itself; another build, with a name of its own, on every kind of machine.
        if wanted.name in ("trl-gtr", "alfworld", "vllm"):
            continue
        assert wanted.specifier.contains(pins[wanted.name]), f"{wanted} against constraints.txt's {pins[wanted.name]}"


def readme_tree() -> list[str]:
    """Paths of the README's annotated tree, relative to the root; folders end in a slash."""
    readme = (ROOT / "README.md").read_text("utf-8")
    (block,) = re.findall(r"^<!-- tree -->\n```[a-z]*\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    paths, folders = [], []
    for line in block.splitlines():
        name, _, phrase = line.strip().partition("  ")
        depth = (len(line) - len(line.lstrip())) // 2
        path = "".join(folders[:depth]) + name
        assert phrase.strip(), f"{path} has no phrase"
        paths.append(path)
        if name.endswith("/"):
            folders[depth:] = [name]
    return paths


def test_readme_tree_names_files_that_exist():
    paths = readme_tree()
    assert len(paths) > 10
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing, f"the README's tree names what isn't there: {missing}"


def test_readme_tree_is_complete():
    """Every module and example has its line, or lies in a folder whose line stands for all of it."""
    tree = readme_tree()
    folded = tuple(path for path in tree if path.endswith("/") and sum(other.startswith(path) for other in tree) == 1)
    files = [*(ROOT / "trl_gtr").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    present = {path.relative_to(ROOT).as_posix() for path in files}
    packages = {path for path in present if path.endswith("/__init__.py")} - {"trl_gtr/__init__.py"}
    missing = sorted(path for path in present - packages - {*tree} if not path.startswith(folded))
    assert not missing, f"give each of these a line in the README's tree: {missing}"
