"""The committed notebook is complete and small. `.ci/check_notebook.py` executes it."""

import json

import pytest
from paths import EXAMPLES, ROOT

NOTEBOOK = EXAMPLES / "notebooks" / "quickstart.ipynb"


@pytest.fixture(scope="module")
def code():
    return [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_was_executed_from_top_to_bottom(code):
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}  # no "error"
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 4


def test_is_small_and_says_nothing_of_a_machine(code):
    assert NOTEBOOK.stat().st_size < 300_000
    text = "".join(line for cell in code for output in cell["outputs"] for line in output.get("text", []))
    assert "/home/" not in text
    assert str(ROOT) not in text


def test_installs_nothing(code):
    lines = [line for cell in code for line in "".join(cell["source"]).splitlines()]
    assert not [line for line in lines if line.startswith(("!", "%"))]
