"""The Python API off the main thread, interrupted, and as it is imported."""

from __future__ import annotations

import json
import pkgutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

import farspan
from farspan.domain.run_events import Step
from tests.cli.conftest import WORDS
from tests.waiting import LIMIT_S, wait_for

SMALL = {
    "tokenizer": {"vocab": 300},
    "model": {"layers": 1, "d_model": 16, "heads": 2, "context": 32},
    "parallel": {"workers": 1},
}


@pytest.fixture
def papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with text, as the working folder."""
    (tmp_path / "papers").mkdir()
    for number in range(20):
        words = " ".join(WORDS[(number * k) % len(WORDS)] for k in range(200))
        (tmp_path / "papers" / f"{number:02}.txt").write_text(f"Paper {number}\n\n{words}.\n")
    monkeypatch.setenv("FARSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_script_needs_no_guard(papers: Path) -> None:
    """Processes that read text leave the script alone: a second reading of it would train again."""
    script = papers / "script.py"
    script.write_text(
        "import farspan\n"
        "print('read')\n"
        "folder, manifest = farspan.prepare('pydocs', tokenizer={'vocab': 300})\n"
        f"run = farspan.train('papers', train={{'steps': 2}}, **{SMALL!r})\n"
        "print(manifest.train.documents > 0, run)\n"
    )
    done = subprocess.run(
        [sys.executable, script], cwd=papers, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "read\nTrue Run('runs/papers')\n"), done.stderr


@pytest.mark.slow
def test_train_runs_the_plan_chosen_by_select(papers: Path) -> None:
    keys = {**SMALL, "parallel": {"workers": 2}, "train": {"steps": 3}}
    selection = farspan.select("papers", budget_s=0.0, **keys)
    run = farspan.train("papers", plan=selection, **keys)
    chosen = selection.ranking.candidates[selection.ranking.chosen]
    assert run.folder.load_plan().technique == chosen.technique
    assert run.report().measurement.steps == chosen.plan.train.steps


@pytest.mark.slow
def test_in_a_thread_it_trains_and_leaves_signals_alone(
    papers: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handlers = signal.getsignal(signal.SIGINT)
    updates = list[object]()
    ended: list[farspan.Run | BaseException] = []

    def work() -> None:
        try:
            ended.append(
                farspan.train("papers", train={"steps": 5}, progress=updates.append, **SMALL)
            )
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    assert isinstance(ended[0], farspan.Run), ended
    assert [update.step for update in updates if isinstance(update, Step)] == [1, 2, 3, 4, 5]
    assert signal.getsignal(signal.SIGINT) is handlers
    report = ended[0].report()
    assert report.measurement is not None and report.measurement.steps == 5 and report.page.exists()
    assert capfd.readouterr().out == ""


def test_ctrl_c_saves_refuses_and_leaves_no_worker(papers: Path) -> None:
    script = textwrap.dedent(f"""
        import farspan, json, os
        from farspan.domain.run_events import Step
        def told(update):
            if isinstance(update, Step) and update.step == 3:
                print("training", flush=True)
        try:
            farspan.train("papers", train={{"steps": 1_000_000}}, progress=told, **{SMALL!r})
        except farspan.Refusal as refusal:
            print(json.dumps([refusal.problem.code, refusal.problem.remedy]), flush=True)
    """)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "training\n"
        process.send_signal(signal.SIGINT)
        assert json.loads(process.stdout.readline()) == [
            "interrupted",
            "farspan resume runs/papers",
        ]
        assert process.wait(LIMIT_S) == 0
    wait_for(lambda: not workers(papers), "the workers' end")
    assert farspan.Run("runs/papers").report().run.history.reason == "interrupted"


@pytest.mark.slow
def test_ctrl_c_in_a_trial_refuses_and_leaves_no_worker(
    papers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = papers / "trials"
    trials.mkdir()
    monkeypatch.setenv("TMPDIR", str(trials))
    keys = {**SMALL, "parallel": {"workers": 2}, "train": {"steps": 1_000_000}}
    script = textwrap.dedent(f"""
        import farspan
        try:
            farspan.select("papers", **{keys!r})
        except farspan.Refusal as refusal:
            print(refusal.problem.code, flush=True)
    """)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as process:
        wait_for(lambda: [*trials.glob("farspan-trial-*/run/events.jsonl")], "a trial", process)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None and process.stdout.readline() == "interrupted\n"
        assert process.wait(LIMIT_S) == 0
    wait_for(lambda: not workers(papers), "the workers' end")
    assert not [*trials.glob("farspan-trial-*")]


def workers(folder: Path) -> list[int]:
    """The workers of runs in a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes()
            at = str((entry.parent / "cwd").readlink())
        except OSError:
            continue
        if b"farspan.runtime.worker" in words and at == str(folder):
            found.append(int(entry.parent.name))
    return found


def test_train_with_invalid_arguments_raises_a_refusal(papers: Path) -> None:
    for arguments, code in (
        ({"data": "paper"}, "path-missing"),
        ({"data": "papers", "sizes": "tiny"}, "unknown-key"),
        ({"data": "papers", "budget": "soon"}, "out-of-range"),
        ({"data": "papers", "run": "papers"}, "run-exists"),
    ):
        with pytest.raises(farspan.Refusal) as caught:
            farspan.train(**arguments)
        assert caught.value.problem.code == code
    with pytest.raises(farspan.Refusal):
        farspan.Run("papers")
    assert not (papers / "runs").exists()


def test_importing_loads_only_the_version():
    shown = (
        "import farspan, json, sys; print(json.dumps([n for n in sys.modules if "
        "n.startswith('farspan.')]))"
    )
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["farspan._version"]


def test_no_name_of_the_api_is_a_subpackages():
    packages = {module.name for module in pkgutil.iter_modules(farspan.__path__)}
    assert not packages & set(farspan.__all__)
    assert all(getattr(farspan, name) is not None for name in farspan.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        farspan.trian  # noqa: B018
