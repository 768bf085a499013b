"""A run whose prepared text is missing or damaged at one start: it goes on once the text is back,
and nobody writes over where the text lay."""

from __future__ import annotations

import random
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from farspan.app.configs import as_yaml
from farspan.app.resolving import prepare_run_corpus
from farspan.app.training import resume_run
from farspan.domain.config import DataConfig, RunConfig, TokenizerConfig
from farspan.domain.problems import Problem, Refusal
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.run_events import Finished, Step, read_events
from farspan.domain.struct_files import load, save
from tests import tiny
from tests.app.supervised import Watched, made
from tests.launch.test_launchers import TRAIN
from tests.waiting import LIMIT_S

TWO = tiny.plan(replace(TRAIN, steps=40, validate_every=40), rows=(4, 4), micro_rows=4)
#: The step after which a run is interrupted.
CUT = 10


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with text in `docs`; the cache is `c`."""
    (tmp_path / "docs").mkdir()
    rng = random.Random(0)
    for number in range(30):
        words = rng.choices(["time", "year", "people", "way", "day", "thing", "life"], k=400)
        (tmp_path / "docs" / f"{number:02}.txt").write_text(" ".join(words))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FARSPAN_CACHE", str(tmp_path / "c"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def planned_on(desk: Path, name: str) -> RunFolder:
    """A run of two workers on the prepared text of `docs`."""
    config = RunConfig(
        data=DataConfig(source="docs", val="20%"), tokenizer=TokenizerConfig(vocab=300)
    )
    folder, manifest = prepare_run_corpus(config)
    plan = replace(TWO, inputs=replace(TWO.inputs, corpus=manifest.hash))
    run = made(desk / "runs" / name, plan)
    run.config.write_bytes(as_yaml(config))
    record = replace(load(run.record, RunRecord), corpus=str(folder))
    save(record, run.record)
    shutil.copy(folder / "corpus.json", run.corpus)
    shutil.copy(folder / "tokenizer.json", run.tokenizer)
    return run


def interrupted_on(desk: Path, name: str) -> RunFolder:
    """The same, stopped after some steps."""
    watched = Watched(
        planned_on(desk, name), lambda w, step: w.supervisor.request_stop() if step == CUT else None
    )
    ending = watched.train()
    assert isinstance(ending, Finished) and ending.reason == "interrupted"
    return watched.run


def losses(run: RunFolder) -> dict[int, float]:
    return {event.step: event.loss for event in read_events(run.events) if isinstance(event, Step)}


@pytest.fixture
def calm(desk: Path) -> dict[int, float]:
    """The losses of a run whose text is there at every start."""
    watched = Watched(planned_on(desk, "calm"))
    ending = watched.train()
    assert isinstance(ending, Finished) and ending.reason == "done"
    return watched.losses


def refused(run: RunFolder) -> Problem:
    with pytest.raises(Refusal) as refusal:
        resume_run(run)
    return refusal.value.problem


def pasted(command: str) -> int:
    """The exit code of a command of farspan."""
    first, *words = shlex.split(command)
    assert first == "farspan"
    return subprocess.run([sys.executable, "-m", "farspan", *words], timeout=LIMIT_S).returncode


@pytest.mark.slow
def test_a_run_whose_prepared_text_was_removed_prepares_it_again_and_loses_nothing(
    desk: Path, calm: dict[int, float]
) -> None:
    run = interrupted_on(desk, "run")
    record = run.record.read_bytes()
    shutil.rmtree(desk / "c")
    resume_run(run)
    assert losses(run) == calm
    assert run.record.read_bytes() == record


@pytest.mark.slow
def test_a_corpus_in_another_cache_is_found_by_its_hash(
    desk: Path, calm: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = interrupted_on(desk, "run")
    (desk / "c").rename(desk / "d")
    monkeypatch.setenv("FARSPAN_CACHE", str(desk / "d"))
    # Nothing can be prepared again.
    shutil.rmtree(desk / "docs")
    resume_run(run)
    assert losses(run) == calm
    assert load(run.record, RunRecord).corpus_folder.parent.parent == desk / "d"


@pytest.mark.slow
def test_a_run_whose_text_is_gone_is_refused_with_a_command_and_goes_on_when_it_is_back(
    desk: Path, calm: dict[int, float]
) -> None:
    run = interrupted_on(desk, "run")
    before = {path: path.read_bytes() for path in run.path.rglob("*.json")}
    shutil.rmtree(desk / "c")
    (desk / "docs").rename(desk / "elsewhere")
    problem = refused(run)
    assert problem.code == "path-missing" and "docs" in problem.fact
    assert problem.remedy == f"farspan prepare {run.config}"
    (desk / "elsewhere").rename(desk / "docs")
    text = (desk / "docs" / "07.txt").read_text()
    (desk / "docs" / "07.txt").write_text("other words")
    problem = refused(run)
    assert problem.code == "path-missing" and "text has changed" in problem.what
    assert pasted(f"farspan prepare {run.config}") == problem.exit_code
    assert before.items() <= {path: path.read_bytes() for path in run.path.rglob("*.json")}.items()
    (desk / "docs" / "07.txt").write_text(text)
    resume_run(run)
    assert losses(run) == calm


@pytest.mark.slow
def test_workers_whose_text_is_missing_leave_the_run_s_record_alone(
    desk: Path, calm: dict[int, float]
) -> None:
    """Both see rank 0's folder: neither has a corpus to send."""
    run = interrupted_on(desk, "run")
    record = run.record.read_bytes()
    (desk / "c").rename(desk / "aside")
    problem = Watched(run).train()
    assert isinstance(problem, Problem) and problem.code == "path-missing"
    assert problem.remedy == f"farspan prepare {run.config}"
    assert run.record.read_bytes() == record
    assert not list((desk / "c").glob("corpora/sent-*"))
    shutil.rmtree(desk / "c", ignore_errors=True)
    (desk / "aside").rename(desk / "c")
    watched = Watched(run)
    ending = watched.train()
    assert isinstance(ending, Finished) and ending.reason == "done"
    assert losses(run) == calm


@pytest.mark.slow
def test_overwritten_tokens_end_a_run_with_their_place_and_the_remedy_brings_them_back(
    desk: Path, calm: dict[int, float]
) -> None:
    run = interrupted_on(desk, "run")
    file = load(run.record, RunRecord).corpus_folder / "train.bin"
    whole = file.read_bytes()
    file.write_bytes(b"\xff" * 4000 + whole[4000:])
    problem = refused(run)
    assert (problem.code, problem.where) == ("corpus-damaged", str(file))
    assert "the block at byte 0 " in problem.fact
    assert problem.remedy == f"farspan prepare {run.config}"
    assert pasted(problem.remedy) == 0
    assert file.read_bytes() == whole
    resume_run(run)
    assert losses(run) == calm
