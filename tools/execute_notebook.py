"""Execute examples/first_model.ipynb in an empty folder, and keep its outputs in the file.

    python tools/execute_notebook.py               # about two minutes on two quiet cores

Outputs are kept without what belongs to the machine: paths, progress bars, and all that cells with
the tag `machine` show.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "first_model.ipynb"
#: Cells with this tag show figures of the machine.
MACHINE = "machine"


def execute(notebook: NotebookNode, folder: Path, cell_limit_s: float | None = None) -> None:
    """Execute all cells with `folder` as their working directory and with a cache of its own.

    Raises nbclient's CellExecutionError at the first cell that fails.
    """
    client = NotebookClient(
        notebook,
        timeout=cell_limit_s,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
    )
    client.execute(env=os.environ | {"FARSPAN_CACHE": str(folder / "cache")})


def clean(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Return the executed notebook without what belongs to the machine."""
    text = nbformat.writes(notebook).replace(f"{folder}/", "")
    cleaned = nbformat.reads(text, as_version=4)
    cleaned.metadata.language_info = {"name": "python"}
    for cell in cleaned.cells:
        if cell.cell_type == "code":
            shows_machine = MACHINE in cell.metadata.get("tags", ())
            cell.outputs = [] if shows_machine else [*filter(is_lasting, cell.outputs)]
    return cleaned


def is_lasting(output: NotebookNode) -> bool:
    """Return whether an output is more than a progress bar."""
    return "<progress" not in output.get("data", {}).get("text/html", "")


def main() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        execute(notebook, folder)
        nbformat.write(clean(notebook, folder), NOTEBOOK)


if __name__ == "__main__":
    main()
