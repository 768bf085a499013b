"""The code of docs/python.md in a notebook's kernel, which runs it inside an event loop."""

from __future__ import annotations

import random
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.cli.conftest import WORDS

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


#: A model that trains in seconds, in place of the time that the page gives.
SMALL = """budget="6s", tokenizer={"vocab": 300}, model={"layers": 1, "d_model": 16, "heads": 2, "context": 32}"""  # noqa: E501


def cells() -> list[str]:
    """The page's code, with less to train."""
    codes = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    instead = {'budget="10m"': SMALL, 'size="tiny", ': "", "% 100 == 0": ">= 1"}
    for before, now in instead.items():
        codes = [code.replace(before, now) for code in codes]
    return codes


def text_of(cell: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.fixture
def papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = random.Random(3)
    (tmp_path / "papers").mkdir()
    for number in range(60):
        text = " ".join(rng.choice(WORDS) for _ in range(300))
        (tmp_path / "papers" / f"paper-{number:02}.txt").write_text(
            f"Paper {number} on its sample\n\n{text}.\n"
        )
    monkeypatch.setenv("FARSPAN_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_the_page_trains_reports_searches_and_refuses(papers: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in cells()])
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(papers)}}
    ).execute()
    first, records, second, third, refusal, ranking, priced = map(text_of, notebook.cells)
    assert (
        "predicted" in first
        and "measured" in first
        and re.search(r"^\d+\.\d+ paper-\d+", first, re.M)
    )
    assert re.match(r"\d+ \d+\.\d+\n", records) and (papers / "loss.svg").exists()
    assert second.strip() and "error" not in second
    assert re.search(r"^\d+ \d\.\d", third, re.M)
    assert refusal.startswith("path-missing - ")
    assert re.match(r"\w+ on .* s a step", ranking)
    assert re.match(r"\d+\.\d+ True \[\d+, \d+, \d+, \d+\]", priced)
    assert {path.name for path in (papers / "runs").iterdir()} == {"papers", "small", "another"}
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    bars = [output for output in outputs if output.output_type == "display_data"]
    assert len(bars) >= 3 and all("<progress" in bar.data["text/html"] for bar in bars)
    others = [output for output in outputs if output not in bars]
    assert [output for output in others if output.get("name") != "stdout"] == []
