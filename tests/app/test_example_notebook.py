"""The notebook in examples/: well-formed, of public names alone, and it does what it shows."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from nbformat import NotebookNode

import farspan
from farspan.app.configs import make_config

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "examples" / "first_model.ipynb"
#: Modules besides farspan that every notebook has.
MODULES = {"IPython.display", "farspan", "pathlib", "pydoc_data.topics"}
#: Functions with keys of run.yaml, whose first argument is the text.
TAKES_KEYS = {"prepare", "train"}
#: A path from the root of a disk, of Unix or of Windows.
ABSOLUTE = re.compile(r"(?<![\w.~/<:])/[\w.-]+/[\w.-]+|\b[A-Za-z]:\\\\?[\w.-]+\\")


@pytest.fixture(scope="module")
def notebook() -> NotebookNode:
    return nbformat.read(PAGE, as_version=4)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """tools/execute_notebook.py, which fills the outputs in."""
    path = ROOT / "tools" / "execute_notebook.py"
    spec = importlib.util.spec_from_file_location("execute_notebook", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def codes(notebook: NotebookNode) -> Iterator[str]:
    """The source of code cells, and the examples in text cells."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            yield cell.source
        else:
            yield from re.findall(r"```python\n(.*?)```", cell.source, re.S)


def attributes_of(notebook: NotebookNode, name: str) -> set[str]:
    """Attributes of a variable that the notebook uses anywhere."""
    attributes = set()
    for source in codes(notebook):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == name:
                attributes.add(node.attr)
    return attributes


def texts_of(cell: NotebookNode) -> str:
    """All that a code cell shows, as text."""
    shown = [output.get("text", "") for output in cell.outputs]
    for output in cell.outputs:
        shown += output.get("data", {}).values()
    return "\n".join(shown)


def cell_of(notebook: NotebookNode, name: str) -> NotebookNode:
    return next(cell for cell in notebook.cells if cell.id == name)


def results_of(notebook: NotebookNode) -> dict[str, str]:
    """The query above each table of results, with the place of the first."""
    best = {}
    query = ""
    for output in cell_of(notebook, "search").outputs:
        if output.output_type == "stream":
            query = output.text.strip()
        elif "<table" in output.data.get("text/html", ""):
            rows = re.findall(r"<tr.*?</tr>", output.data["text/html"])
            best[query] = next(row for row in rows if "<td" in row)
    return best


def test_the_notebook_is_well_formed_and_was_run_from_top_to_bottom(notebook):
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert {output.output_type for output in outputs} <= {
        "stream",
        "display_data",
        "execute_result",
    }
    assert [output for output in outputs if output.get("name") == "stderr"] == []


def test_the_notebook_holds_nothing_of_the_machine_that_ran_it(notebook, tool):
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert ABSOLUTE.findall(cell.source + texts_of(cell)) == []
    assert tool.clean(notebook, Path("/nowhere")) == notebook


def test_cleaning_leaves_out_paths_bars_and_figures_of_the_machine(tool):
    bar = {"text/html": '<div><progress max="1"></progress> step 3/3 · 900 tokens/s</div>'}
    place = {"text/plain": "/home/ann/tour/python-manual/while.txt:1"}
    page = nbformat.v4.new_notebook()
    for tags in ([], ["machine"]):
        cell = nbformat.v4.new_code_cell("1", metadata={"tags": tags})
        cell.outputs = [
            nbformat.v4.new_output("display_data", bar),
            nbformat.v4.new_output("display_data", place),
        ]
        page.cells.append(cell)
    shown, hidden = tool.clean(page, Path("/home/ann/tour")).cells
    assert [output.data["text/plain"] for output in shown.outputs] == ["python-manual/while.txt:1"]
    assert hidden.outputs == []


def test_every_call_of_the_notebook_is_of_the_public_api(notebook):
    attributes = attributes_of(notebook, "farspan")
    assert {"prepare", "plan", "train"} <= attributes <= set(farspan.__all__)
    for name in attributes_of(notebook, "run"):
        assert not name.startswith("_") and hasattr(farspan.Run, name), name
    for source in codes(notebook):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} <= MODULES
            elif isinstance(node, ast.ImportFrom):
                assert node.module in MODULES
            elif isinstance(node, ast.Call):
                check_call(node)


def check_call(call: ast.Call) -> None:
    """Check that a call of farspan, or of a run, has arguments that it takes."""
    owner, _, name = ast.unparse(call.func).rpartition(".")
    if owner not in ("farspan", "run"):
        return
    function = getattr(farspan if owner == "farspan" else farspan.Run, name)
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    own = [] if owner == "farspan" else [None]
    bound = inspect.signature(function).bind(*own, *call.args, **keywords)
    if owner == "farspan" and name in TAKES_KEYS:
        # A variable of the notebook stands for a table, whose keys its own cell has.
        values = {
            key: ast.literal_eval(value)
            for key, value in bound.arguments.get("keys", {}).items()
            if not isinstance(value, ast.Name)
        }
        make_config(ast.literal_eval(call.args[0]), **values)


def test_links_of_the_notebook_lead_somewhere(notebook):
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        page = PAGE.parent / path
        assert page.exists(), link
        if anchor:
            heads = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
            assert anchor in {
                re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads
            }


@pytest.mark.slow
def test_the_notebook_runs_in_an_empty_folder_learns_and_finds(tool, tmp_path):
    executed = nbformat.read(PAGE, as_version=4)
    tool.execute(executed, tmp_path)
    run = farspan.Run(tmp_path / "runs" / "first")
    records = run.history()
    validated = [record["val_loss"] for record in records if record["val_loss"] is not None]
    assert records[-1]["loss"] < records[0]["loss"] - 2
    assert validated[-1] < validated[0] - 1
    assert "<svg" in texts_of(cell_of(executed, "loss"))
    assert "predicted" in texts_of(cell_of(executed, "report"))
    assert len(texts_of(cell_of(executed, "generate")).split()) > 4
    places = {
        "repeat a block as long as a condition is true": "while.txt:",
        "small anonymous function": "lambda.txt:",
        "format a number with a thousands separator": "formatstrings.txt:",
    }
    results = results_of(executed)
    assert results.keys() == places.keys()
    assert [query for query, place in places.items() if place not in results[query]] == []
