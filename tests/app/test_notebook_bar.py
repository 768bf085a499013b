"""The progress bar of notebooks: drawn in place, from real updates, in a real kernel."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbclient import NotebookClient

from farspan.app.notebook_bar import NotebookBar, show_progress
from farspan.app.updates import Note
from farspan.domain.problems import Refusal
from farspan.domain.run_events import Step, Warned
from farspan.retrieval.index_work import IndexWork
from tests.cli.conftest import WORDS


def test_a_line_follows_the_work_and_is_drawn_a_few_times_a_second(capsys):
    clock = iter([10.0, 10.0, 10.1, 10.1, 10.5, 10.5, *[11.0] * 9])
    bar = NotebookBar(html=False, clock=lambda: next(clock))
    bar(Note("reading the text"))
    work = IndexWork(changed=bar)
    work.add_expected("embedding", 4)
    for _ in range(3):
        work.add_done(1)
    bar.end()
    drawn = [line.strip() for line in capsys.readouterr().err.split("\r") if line.strip()]
    assert drawn[0] == "reading the text"
    assert drawn[-1].startswith("[###############.....]  75% embedding")
    assert len(drawn) < 5
    assert all(len(line) < 80 for line in drawn)


def test_a_call_without_updates_draws_nothing(capsys):
    NotebookBar(html=False, clock=lambda: 0.0).end()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_work_that_is_refused_leaves_its_bar_where_it_stood(capsys, monkeypatch):
    shell = SimpleNamespace(get_ipython=lambda: object())
    monkeypatch.setitem(sys.modules, "IPython", shell)
    with pytest.raises(Refusal), show_progress(None) as shown:
        work = IndexWork(changed=shown)
        work.add_expected("embedding", 4)
        work.add_done(1)
        raise Refusal("usage", what="it stops", where="here", fact="as asked", remedy="none")
    with show_progress(None) as shown:
        shown(Note("reading the text"))
    lines = [line.strip() for line in re.split(r"[\r\n]", capsys.readouterr().err) if line.strip()]
    assert lines[-3].startswith("[#####...............]  25% embedding")
    assert lines[-1] == "[####################] 100% done"


def test_warnings_stay_and_texts_are_escaped():
    bar = NotebookBar(html=False, clock=lambda: 0.0)
    bar(Warned(at=0.0, message="<b>the loss jumped</b>"))
    bar(Note("<script>"))
    assert "warning: &lt;b&gt;the loss jumped&lt;/b&gt;" in bar.html
    assert "<script>" not in bar.html and "&lt;script&gt;" in bar.html


def test_every_event_prints_as_a_line():
    step = Step(
        at=0.0,
        step=3,
        loss=4.25,
        lr=0.1,
        grad_norm=None,
        tokens=100,
        step_s=0.5,
        memory_bytes=1,
        steps=12,
    )
    assert str(step) == "step 3/12 · loss 4.250 · 200 tokens/s"


def test_a_notebook_shows_one_bar_and_prints_nothing(tmp_path: Path, monkeypatch):
    (tmp_path / "papers").mkdir()
    for number in range(20):
        words = " ".join(WORDS[(number * k) % len(WORDS)] for k in range(200))
        (tmp_path / "papers" / f"{number:02}.txt").write_text(f"Paper {number}\n\n{words}.\n")
    monkeypatch.setenv("FARSPAN_CACHE", str(tmp_path / "cache"))
    code = "import farspan\nfolder, corpus = farspan.prepare('papers', tokenizer={'vocab': 300})"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    outputs = notebook.cells[0].outputs
    assert [output.output_type for output in outputs] == ["display_data"]
    assert re.search(r'<progress .*value="1.0000".*</progress> done', outputs[0].data["text/html"])
