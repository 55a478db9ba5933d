"""Executes the notebook from top to bottom, and fails if a cell does: `python .ci/check_notebook.py`.

With `--write` the notebook is saved with its outputs, without progress bars and with small pictures.
"""

import argparse
import base64
import io
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from PIL import Image

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebooks" / "quickstart.ipynb"


def small(picture: str) -> str:
    """A PNG in base64 with a palette instead of full colour."""
    written = io.BytesIO()
    Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB").quantize(64).save(written, "PNG", optimize=True)
    return base64.b64encode(written.getvalue()).decode()


def tidy(notebook: nbformat.NotebookNode) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    output.data = {"image/png": small(output.data["image/png"])}


def check(notebook: nbformat.NotebookNode) -> None:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    drawn = sum("image/png" in output.get("data", {}) for output in outputs)
    if drawn < 4:
        sys.exit(f"error: only {drawn} pictures: the game, the curves, and episodes before and after should be shown.")
    if any("text/html" in output.get("data", {}) for output in outputs):
        sys.exit("error: transformers' own table of losses is back; GTRTrainer should remove its progress callback.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path, nargs="?", default=NOTEBOOK)
    parser.add_argument("--write", action="store_true", help="save it with its outputs")
    args = parser.parse_args()
    notebook = nbformat.read(args.notebook, as_version=4)
    with tempfile.TemporaryDirectory() as folder:  # where it writes its run
        client = NotebookClient(
            notebook, timeout=900, record_timing=False, resources={"metadata": {"path": folder}}, kernel_name="python3"
        )
        try:
            client.execute()
        except CellExecutionError as error:
            sys.exit(f"error: a cell failed\n{error}")
    check(notebook)
    if args.write:
        tidy(notebook)
        nbformat.write(notebook, args.notebook)
    print(f"executed {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells of {args.notebook.name}")


if __name__ == "__main__":
    main()
