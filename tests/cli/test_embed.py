"""`farspan embed` as a person meets it: how far it is, stopped and gone on with, searched
meanwhile."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from farspan.cli.index_progress import IndexProgress
from farspan.domain.problems import EXIT_CODES
from farspan.retrieval.work import IndexWork
from tests.cli.conftest import Farspan


@pytest.fixture
def embedding(run: Path, tmp_path: Path, farspan: Farspan, environment: dict[str, str]):
    """A run with an index that was not evaluated, and a process held in the middle of making the
    evaluated one."""
    path = Path(shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("index*")))
    done = farspan("embed", str(path), "--no-eval", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["manifest"]["evaluation"] is None
    process = subprocess.Popen(
        [sys.executable, "-m", "farspan", "embed", str(path)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not any(file.stat().st_size for file in path.glob("index.building/*/*.features")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        yield process, path
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_old_index_answers_and_second_embed_is_refused_during_embed(embedding, farspan: Farspan):
    process, path = embedding
    found = farspan("search", "time school", "--run", str(path), "--json")
    assert found.returncode == 0 and json.loads(found.stdout)["answer"]["results"]
    second = farspan("embed", str(path))
    assert second.returncode == EXIT_CODES["run-busy"] and "being made already" in second.stderr
    process.kill()
    process.communicate()
    assert farspan("search", "time school", "--run", str(path), "--json").stdout == found.stdout
    done = farspan("embed", str(path), "--json")
    answer = json.loads(done.stdout)
    assert answer["kept"] > 0 and answer["embedded"] > 0 and answer["manifest"]["evaluation"]
    assert sorted(entry.name for entry in path.glob("index*")) == ["index"]


@pytest.mark.slow
def test_embed_interrupted_by_ctrl_c_resumes_with_the_same_command(embedding, farspan: Farspan):
    process, path = embedding
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == EXIT_CODES["interrupted"] and err.count("error[interrupted]") == 1
    assert f"farspan embed {path}" in err and "Traceback" not in err
    done = farspan("embed", str(path))
    assert done.returncode == 0 and "had been embedded before" in done.stdout


def shown(console: Console, seconds: int) -> None:
    """An embedding of 100 characters a second, for so long, out of 10,000 characters."""
    now = [0.0]
    with IndexProgress(console, lambda: now[0]) as progress:
        work = IndexWork(lambda: now[0], progress.show)
        work.expect("embedding", 10_000)
        work.start("embedding")
        for _ in range(seconds):
            now[0] += 1.0
            work.did(100)


def test_piped_progress_is_a_line_now_and_then():
    file = io.StringIO()
    shown(Console(file=file), 35)
    etas = {10: "1 min 30 s", 20: "1 min 20 s", 30: "1 min 10 s"}
    assert file.getvalue().splitlines() == [
        f"embedding {share}% · ETA {eta}" for share, eta in etas.items()
    ]


def test_progress_on_a_terminal_is_drawn_with_its_eta():
    file = io.StringIO()
    shown(Console(file=file, force_terminal=True, width=80), 35)
    assert "embedding 35% · ETA 1 min 05 s" in file.getvalue()
