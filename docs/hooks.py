"""Called by mkdocs while it builds the site: puts the notebook on its page, and fixes code in tables."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebooks" / "quickstart.ipynb"
MARKER = "<!-- the notebook -->"
TABLE_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pictures among the outputs to the site."""
    for name, output in _outputs(_cells()):
        if "image/png" in output.get("data", {}):
            files.append(File.generated(config, name, content=base64.b64decode(output["data"]["image/png"])))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri != "notebook.md":
        return TABLE_ROW.sub(_without_escapes, markdown)
    if MARKER not in markdown:
        raise ValueError(f"docs/notebook.md has no line {MARKER}, where the notebook goes")
    # The page has a title already.
    parts = [part for number, cell in enumerate(_cells()) for part in _shown(cell, number)]
    return markdown.replace(MARKER, "\n\n".join(parts).partition("\n")[2])


def _without_escapes(row: re.Match[str]) -> str:
    r"""A row whose code has `|` instead of `\|`, which GitHub needs and mkdocs would show."""
    return re.sub(r"`[^`]+`", lambda code: code[0].replace(r"\|", "|"), row[0])


def _cells() -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    return cells


def _outputs(cells: list[dict[str, Any]], first: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every output, with the name of its picture if it is one."""
    for number, cell in enumerate(cells, first):
        for place, output in enumerate(cell.get("outputs", [])):
            yield f"assets/notebook/{number}-{place}.png", output


def _shown(cell: dict[str, Any], number: int) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for name, output in _outputs([cell], number):
        if "image/png" in output.get("data", {}):
            yield f"![What the cell above draws]({name})"
        elif output["output_type"] == "stream":
            yield f"```text\n{''.join(output['text']).rstrip()}\n```"
