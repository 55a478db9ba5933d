"""What the README and the documentation show must run: their Python blocks and the README's two commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<ticks>`{3,}|~{3,})(?P<language>[^`]*)$")


def python_script(page: str) -> str:
    """The page's Python blocks, everything else replaced by blank lines: line N of the script is line N of the page.

    A block is left out if the last line with text above it is `<!-- no-run -->`.
    """
    script, closing, wanted, above = [], None, False, ""
    for line in page.splitlines():
        fence = FENCE.match(line)
        keep = False
        if closing is None and fence:
            closing = fence["ticks"]
            language = fence["language"].strip().split(" ")[0]
            wanted = language in ("python", "py") and above != "<!-- no-run -->"
            if wanted and fence["indent"]:
                raise ValueError(f"an indented Python block cannot be run; move it to the margin: {line!r}")
        elif closing is not None and fence and fence["ticks"] == closing and not fence["language"]:
            closing = None
        elif closing is not None:
            keep = wanted
        script.append(line if keep else "")
        above = line.strip() or above
    return "\n".join(script) + "\n"


def has_code(page: Path) -> bool:
    return bool(python_script(page.read_text("utf-8")).strip())


@pytest.mark.parametrize("page", [page for page in PAGES if has_code(page)], ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path):
    """All blocks of a page, in its order, as one program: a later block may use what an earlier one has defined."""
    script = tmp_path / f"{page.stem}.py"
    script.write_text(python_script(page.read_text("utf-8")), "utf-8")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{page.relative_to(ROOT)} (lines as in the page)\n{done.stdout}\n{done.stderr}"


def test_readme_shows_python():
    assert has_code(ROOT / "README.md")


def test_script_keeps_lines_and_skips_marked_blocks():
    skipped = "<!-- no-run -->\n\n```python\nboom\n```\n```bash\nls\n```\n"
    page = "a\n```python\nx = 1\n```\n" + skipped + "```python\nprint(x)\n```\n"
    assert python_script(page) == "\n\nx = 1\n\n\n\n\n\n\n\n\n\n\nprint(x)\n\n"
    with pytest.raises(ValueError, match="indented"):
        python_script("- item\n  ```python\n  x = 1\n  ```\n")


def readme_command(name: str) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "readme_command.py", name], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["run", "test"])
def test_readme_commands_are_short_and_pinned(name):
    command = readme_command(name)
    assert len(command.splitlines()) <= 2
    installs = re.findall(r"pip install ([^&\n]*)", command)
    assert installs, "the command must work in an empty environment"
    assert all("-c constraints.txt" in install for install in installs)
    for script in re.findall(r"(?:python|launch) (\S+\.py)", command):
        assert (ROOT / script).is_file(), script


def test_readme_test_command_runs_pytest():
    assert readme_command("test").endswith("python -m pytest")


def test_unknown_command_is_an_error():
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "readme_command.py", "dance"], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "exactly one" in done.stderr
