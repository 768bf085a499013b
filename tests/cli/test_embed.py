"""`farspan embed`: its progress, interrupted and resumed, and searches while it runs."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from farspan.cli.index_progress import IndexProgress
from farspan.domain.problems import EXIT_CODES
from farspan.retrieval.index_work import IndexWork
from tests.cli.conftest import Farspan
from tests.waiting import LIMIT_S, wait_for

#: `farspan WORDS...`, which stops itself once it has embedded and kept a first batch of texts.
STOPPING = """
import os, signal, sys
from farspan.cli.main import main
from farspan.retrieval.index_work import IndexWork
did, batches = IndexWork.add_done, []
def did_then_stop(work, amount, *, kept=False, **more):
    did(work, amount, kept=kept, **more)
    if work.kind == "embedding" and not kept:
        batches.append(amount)
        if len(batches) == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
IndexWork.add_done = did_then_stop
sys.exit(main(sys.argv[1:]))
"""


def is_stopped(process: subprocess.Popen[str]) -> bool:
    flags = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, flags) is not None


@pytest.fixture
def embedding(run: Path, tmp_path: Path, farspan: Farspan, environment: dict[str, str]):
    """A process stopped in the middle of embedding for an evaluated index, and its run's folder,
    which has an index that was not evaluated."""
    path = Path(shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("index*")))
    done = farspan("embed", str(path), "--no-eval", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["manifest"]["evaluation"] is None
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPING, "embed", str(path)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: is_stopped(process), "a first batch of texts", process)
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
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == EXIT_CODES["interrupted"] and err.count("error[interrupted]") == 1
    assert f"farspan embed {path}" in err and "Traceback" not in err
    done = farspan("embed", str(path))
    assert done.returncode == 0 and "had been embedded before" in done.stdout


def shown(console: Console, seconds: int) -> None:
    """An embedding of 100 characters a second, for so long, out of 10,000 characters."""
    now = [0.0]
    with IndexProgress(console, lambda: now[0]) as progress:
        work = IndexWork(lambda: now[0], progress.show)
        work.add_expected("embedding", 10_000)
        work.start_kind("embedding")
        for _ in range(seconds):
            now[0] += 1.0
            work.add_done(100)


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
