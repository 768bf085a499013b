"""Runs whose checkpoints are copied to another place: what is left there after a loss is whole, and
a run goes on from it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest
from msgspec.structs import replace

from farspan.app import copy_process
from farspan.app.checkpoints import flaw_of
from farspan.app.configs import as_yaml, refuse_edited
from farspan.app.copy_places import refuse_unusable_places, shared_disk
from farspan.app.copy_process import copy_to_places, last_step
from farspan.app.copying import RunCopies
from farspan.app.restoring import (
    fetch_missing_checkpoints,
    read_copied_ledger,
    restore_run,
    write_copied_ledger,
)
from farspan.app.training import resume_run
from farspan.app.updates import Note
from farspan.corpus.find_prepared import find_corpus
from farspan.domain.cluster import Cluster, Site
from farspan.domain.cluster_json import load_cluster_json, save_cluster_json
from farspan.domain.config import RunConfig
from farspan.domain.corpus import CorpusManifest
from farspan.domain.epoch_fence import Ledger, read_ledger
from farspan.domain.problems import Problem, Refusal
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.run_events import Finished, Saved, Step, Warned, read_events
from farspan.domain.struct_files import load, save
from farspan.launch.copied_run import CopiedRun, copy_name, list_checkpoints
from farspan.launch.copies.folder import Folder
from farspan.launch.copy_run import LINKS_FOLDER
from farspan.launch.transfer_pacing import Pacer
from farspan.launch.trust import require_trusted, seal_run
from tests import tiny
from tests.app.copied import TWO, asked_for, copied_run, copied_steps
from tests.app.supervised import Watched
from tests.app.test_deleted import delete
from tests.launch.test_copy_places import bucket, far_host, server  # noqa: F401
from tests.waiting import LIMIT_S, wait_for


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, with a state folder and a cache of its own."""
    monkeypatch.setenv("FARSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "place").mkdir()
    return tmp_path


def losses(run: RunFolder) -> dict[int, float]:
    """By step; of one that was made twice the later."""
    return {event.step: event.loss for event in read_events(run.events) if isinstance(event, Step)}


def notes_of(updates: list[object]) -> str:
    return "\n".join(update.text for update in updates if isinstance(update, Note))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run, with two checkpoints and the best weights."""
    watched = Watched(copied_run(tmp_path_factory.mktemp("t") / "run", asked_for(())))
    assert isinstance(watched.train(), Finished)
    assert len(list(watched.run.checkpoints.glob("step-*"))) == 2
    return watched.run


def test_run_whose_folder_and_text_are_deleted_is_restored_and_ends_with_the_same_losses(
    desk: Path, trained: RunFolder
) -> None:
    place = desk / "place"
    config = asked_for(place)
    run = copied_run(desk / "run", config)

    def lose(watched: Watched, step: int) -> None:
        if any(isinstance(event, Saved) for event in watched.events) and step < 100:
            wait_for(lambda: copied_steps(place, run), "a copy")
            delete(run.path)
            shutil.rmtree(desk / "corpus")

    ending = Watched(run, lose).train()
    assert isinstance(ending, Problem) and ending.code == "path-missing"
    assert not run.path.exists()

    notes = list[object]()
    restored = restore_run(run.path, config, notes.append)
    assert restored is not None and restored.newest_checkpoint() > 0
    assert "is restored from" in notes_of(notes) and "the text is fetched" in notes_of(notes)
    report = resume_run(restored)
    assert report is not None
    assert losses(restored) == losses(trained)
    # The end of the run is copied too.
    assert copied_steps(place, restored)[0] == restored.newest_checkpoint() == 120
    events = (place / copy_name(restored) / "events.jsonl").read_bytes()
    assert events == restored.events.read_bytes()


# -- copies of a run that is not trained meanwhile
#   ------------------------------------------------------------------------------------------------


def steps_of(run: RunFolder) -> list[int]:
    return sorted(int(path.name[5:]) for path in run.checkpoints.glob("step-*"))


def twin(
    trained: RunFolder, path: Path, config: RunConfig, identity: str = "1d" * 8, year: int = 2026
) -> RunFolder:
    """The same run in another folder, as another run.yaml would have made it."""
    shutil.copytree(trained.path, path)
    run = RunFolder(path)
    run.config.write_bytes(as_yaml(config))
    record = load(run.record, RunRecord)
    save(replace(record, asked=config, id=identity, created=f"{year}-01-01T00:00:00"), run.record)
    seal_run(run)
    return run


def copied(run: RunFolder) -> str:
    """Copy a run to its place; return why that failed."""
    (report,) = copy_to_places(run, Pacer())
    return report.fact


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)


@pytest.fixture
def twice(trained: RunFolder, desk: Path) -> RunFolder:
    """A run whose two checkpoints are copied."""
    run = twin(trained, desk / "run", asked_for(desk / "place"))
    newest = run.checkpoints / f"step-{steps_of(run)[1]:08d}"
    newest.rename(desk / "later")
    assert copied(run) == ""
    (desk / "later").rename(newest)
    assert copied(run) == ""
    assert copied_steps(desk / "place", run) == steps_of(run)[::-1]
    return run


def parts_of_copy(desk: Path, run: RunFolder, step: int) -> list[Path]:
    return sorted((desk / "place" / copy_name(run)).glob(f"checkpoints/step-{step:08d}.*/part-*"))


def test_deleted_checkpoints_are_fetched_and_the_text_too(twice: RunFolder, desk: Path) -> None:
    before = {path.name: path.read_bytes() for path in twice.checkpoints.glob("*/part-*")}
    newest = steps_of(twice)[1]
    shutil.rmtree(twice.checkpoints)
    save(replace(load(twice.record, RunRecord), corpus=str(desk / "gone")), twice.record)
    notes = list[object]()
    fetch_missing_checkpoints(twice, notes.append)
    assert steps_of(twice) == [newest] and flaw_of(twice.checkpoints / f"step-{newest:08d}") == ""
    assert flaw_of(twice.best) == "" and before
    assert f"step-{newest:08d} is fetched from {desk / 'place'}" in notes_of(notes)
    assert "the text is fetched" in notes_of(notes)
    assert not (twice.path / ".fetched").exists()


def test_damaged_checkpoint_is_replaced_by_its_copy(twice: RunFolder) -> None:
    newest = twice.checkpoints / f"step-{steps_of(twice)[1]:08d}"
    flip_byte(next(newest.glob("part-*")))
    assert flaw_of(newest)
    notes = list[object]()
    fetch_missing_checkpoints(twice, notes.append)
    assert flaw_of(newest) == ""
    assert f"{newest} is damaged" in notes_of(notes)


def test_whole_checkpoints_are_left_as_they_are(twice: RunFolder) -> None:
    before = {path: path.stat().st_ino for path in twice.checkpoints.rglob("*")}
    notes = list[object]()
    fetch_missing_checkpoints(twice, notes.append)
    assert {path: path.stat().st_ino for path in twice.checkpoints.rglob("*")} == before
    assert notes == []


def test_damaged_newest_copy_is_named_and_the_one_before_is_used(
    twice: RunFolder, desk: Path
) -> None:
    older, newest = steps_of(twice)
    flip_byte(parts_of_copy(desk, twice, newest)[0])
    shutil.rmtree(twice.checkpoints)
    notes = list[object]()
    fetch_missing_checkpoints(twice, notes.append)
    assert steps_of(twice) == [older]
    assert f"step-{newest:08d}." in notes_of(notes) and "it is damaged" in notes_of(notes)


def test_damaged_checkpoint_is_not_copied_over_whole_ones(twice: RunFolder, desk: Path) -> None:
    older, newest = steps_of(twice)
    shutil.rmtree(parts_of_copy(desk, twice, newest)[0].parent)
    flip_byte(next((twice.checkpoints / f"step-{newest:08d}").glob("part-*")))
    assert "is damaged here" in copied(twice)
    assert copied_steps(desk / "place", twice) == [older]


def test_copy_that_lost_a_file_is_not_used(twice: RunFolder, desk: Path) -> None:
    config = asked_for(desk / "place")
    older, newest = steps_of(twice)
    parts_of_copy(desk, twice, newest)[0].unlink()
    shutil.rmtree(twice.path)
    restored = restore_run(twice.path, config)
    assert restored is not None and steps_of(restored) == [older]
    for step in (older, newest):
        for part in parts_of_copy(desk, twice, step):
            part.unlink()
    shutil.rmtree(twice.path)
    with pytest.raises(Refusal, match="none of its checkpoints is whole"):
        restore_run(twice.path, config)
    assert not twice.path.exists() and not list(desk.glob(".run*"))


def test_a_copy_keeps_as_many_checkpoints_as_the_plan(twice: RunFolder, desk: Path) -> None:
    newest = steps_of(twice)[1]
    shutil.rmtree(desk / "place" / copy_name(twice) / "corpus")  # Comes back with the next copy.
    half = desk / "place" / copy_name(twice) / "checkpoints" / "step-00000999.0123abcd"
    half.mkdir()
    (half / "part-00000.safetensors").write_bytes(b"half")
    save(replace(twice.load_plan(), train=replace(twice.load_plan().train, keep=1)), twice.plan)
    assert copied(twice) == ""
    assert copied_steps(desk / "place", twice) == [newest]
    assert not half.exists()
    assert (desk / "place" / copy_name(twice) / "corpus" / "train.bin").exists()


def test_copier_that_is_killed_at_random_moments_leaves_no_half_copy_that_counts(
    trained: RunFolder, desk: Path
) -> None:
    place = desk / "place"
    config = asked_for(place)
    run = twin(
        trained,
        desk / "run",
        replace(config, checkpoint=replace(config.checkpoint, copy_rate="4MB/s")),
    )
    random.seed(0)
    size = sum(path.stat().st_size for path in run.checkpoints.rglob("*"))

    def stored() -> int:
        return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())

    halves = 0
    for _ in range(6):
        threshold = stored() + random.random() * size * 0.6
        copier = subprocess.Popen(
            [sys.executable, "-m", "farspan.app.copy_process", str(run.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )

        def enough(copier: subprocess.Popen[bytes] = copier, least: float = threshold) -> bool:
            return copier.poll() is not None or stored() >= least

        wait_for(enough, "some bytes are copied")
        copier.send_signal(signal.SIGKILL)
        copier.wait()
        halves += bool(list(place.rglob("*.partial")))
        files = Folder(place).list_files(copy_name(run))
        for checkpoint in list_checkpoints(files):
            fetched = desk / "fetched" / checkpoint.name
            shutil.rmtree(fetched, ignore_errors=True)
            CopiedRun(Folder(place), copy_name(run)).fetch_checkpoint(checkpoint, fetched)
            assert flaw_of(fetched) == ""
        if len(list_checkpoints(files)) == 2:  # All is there: begin again.
            shutil.rmtree(place / copy_name(run))
    assert halves
    assert copied(run) == ""
    assert copied_steps(place, run) == [steps_of(run)[1]]
    assert not list(place.rglob("*.partial"))


def test_events_of_a_checkpoint_are_copied_before_it(
    trained: RunFolder, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is lost during a copy leaves no checkpoint without the losses of its steps."""
    run = twin(trained, desk / "run", asked_for(desk / "place"))
    put = []
    put_file = Folder.put_file

    def record(place: Folder, name: str, content: BinaryIO, size: int) -> None:
        put.append(name.removeprefix(f"{copy_name(run)}/"))
        put_file(place, name, content, size)

    monkeypatch.setattr(Folder, "put_file", record)
    assert copied(run) == ""
    first_checkpoint = min(
        place for place, name in enumerate(put) if name.startswith("checkpoints/")
    )
    for name in ("events.jsonl", "run.json", "corpus.json"):
        assert put.index(name) < first_checkpoint


def test_copy_waits_for_the_events_of_its_checkpoint(
    trained: RunFolder, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's host sends them apart from the checkpoint, and later."""
    run = twin(trained, desk / "run", asked_for(desk / "place"))
    newest = steps_of(run)[-1]
    lines = run.events.read_bytes().splitlines(keepends=True)
    late = next(
        place
        for place, line in enumerate(lines)
        if b'"step","at"' in line and f'"step":{newest},'.encode() in line
    )
    run.events.write_bytes(b"".join(lines[:late]))
    assert last_step(run.events) == newest - 1
    # However slow the machine is, the events come in time.
    monkeypatch.setattr(copy_process, "EVENTS_LAG_S", LIMIT_S)
    with ThreadPoolExecutor() as pool:
        copying = pool.submit(copied, run)
        wait_for((run.path / LINKS_FOLDER).exists, "the checkpoint is linked")
        with open(run.events, "ab") as file:
            file.write(b"".join(lines[late:]))
        assert copying.result() == ""
    events = desk / "place" / copy_name(run) / "events.jsonl"
    assert events.read_bytes() == b"".join(lines)


def test_full_disk_is_named_and_the_next_copy_is_whole(trained: RunFolder, desk: Path) -> None:
    run = twin(trained, desk / "run", asked_for(desk / "place"))
    # A limit on the size of a file stands for a full disk: a write fails half way.
    limited = f"ulimit -f 64; exec {sys.executable} -m farspan.app.copy_process {run.path}"
    with subprocess.Popen(
        ["bash", "-c", limited], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as copier:
        assert copier.stdout is not None
        printed = copier.stdout.read()
    assert "File too large" in printed
    assert copied_steps(desk / "place", run) == []
    assert copied(run) == ""
    assert copied_steps(desk / "place", run) == [steps_of(run)[1]]


def test_two_runs_of_one_name_lie_side_by_side_and_the_newer_is_restored(
    trained: RunFolder, desk: Path
) -> None:
    config = asked_for(desk / "place")
    older = twin(trained, desk / "a" / "run", config, "0a" * 8, 2025)
    newer = twin(trained, desk / "b" / "run", config, "0b" * 8, 2026)
    assert copied(newer) == "" and copied(older) == ""
    assert len(list((desk / "place").iterdir())) == 2
    restored = restore_run(desk / "c" / "run", config)
    assert restored is not None and load(restored.record, RunRecord).id == "0b" * 8


def test_run_of_another_run_yaml_or_name_is_not_restored(twice: RunFolder, desk: Path) -> None:
    config = asked_for(desk / "place")
    notes = list[object]()
    other = replace(config, train=replace(config.train, seed=7))
    assert restore_run(desk / "c" / "run", other, notes.append) is None
    assert "train.seed is 7, was 0 at the start" in notes_of(notes)
    assert restore_run(desk / "c" / "others", config) is None
    assert restore_run(desk / "c" / "run", asked_for(())) is None


def test_copy_of_another_run_is_not_written_over(twice: RunFolder, desk: Path) -> None:
    record = desk / "place" / copy_name(twice) / "run.json"
    save(replace(load(record, RunRecord), id="0c" * 8), record)
    before = record.read_bytes()
    assert "is the copy of another run" in copied(twice)
    assert record.read_bytes() == before


def test_place_that_cannot_be_looked_at_restores_nothing_and_says_so(
    twice: RunFolder, desk: Path
) -> None:
    (desk / "place").rename(desk / "unmounted")
    with pytest.raises(Refusal, match="may not be mounted") as refused:
        restore_run(desk / "c" / "run", asked_for(desk / "place"))
    assert refused.value.problem.code == "copy-unusable"
    assert "may not be mounted" in copied(twice)
    notes = list[object]()
    fetch_missing_checkpoints(twice, notes.append)
    assert "no look at the copy" in notes_of(notes)


# -- other places than folders
#   ------------------------------------------------------------------------------------------------


def test_copies_lie_on_a_host_of_another_site_and_come_back(trained: RunFolder, desk: Path) -> None:
    run = twin(trained, desk / "run", asked_for("site"))
    here = load_cluster_json(run.cluster)
    away = Site(name="away", hosts=(far_host(desk),))
    save_cluster_json(Cluster(sites=(*here.sites, away)), run.cluster)
    assert copied(run) == ""
    assert copied_steps(desk / "disk of its own" / "copies", run) == [steps_of(run)[1]]
    shutil.rmtree(run.checkpoints)
    fetch_missing_checkpoints(run)
    (step,) = steps_of(run)
    assert flaw_of(run.checkpoints / f"step-{step:08d}") == ""
    (desk / "gone").touch()
    assert "host far: the host does not answer" in copied(run)


@pytest.mark.slow
def test_copies_lie_in_s3_and_come_back(trained: RunFolder, desk: Path, bucket: str) -> None:  # noqa: F811
    config = asked_for(bucket)
    run = twin(trained, desk / "run", config)
    refuse_unusable_places(config.checkpoint)
    assert copied(run) == ""
    shutil.rmtree(run.path)
    shutil.rmtree(trained.path.parent / "corpus")
    restored = restore_run(run.path, config)
    assert restored is not None
    (step,) = steps_of(restored)
    assert flaw_of(restored.checkpoints / f"step-{step:08d}") == ""
    corpus = load(restored.record, RunRecord).corpus_folder
    assert find_corpus(corpus, load(restored.corpus, CorpusManifest).hash) is not None
    with pytest.raises(Refusal, match="no such bucket"):
        refuse_unusable_places(asked_for("s3://none/x").checkpoint)


# -- starts of a run
#   ------------------------------------------------------------------------------------------------


def test_start_that_another_has_replaced_copies_nothing(twice: RunFolder, desk: Path) -> None:
    ledger = read_ledger(twice.epochs)
    later = Ledger(epoch=ledger.epoch + 1, ended={ledger.epoch: steps_of(twice)[1]})
    copy = desk / "place" / copy_name(twice) / "epochs.json"
    save(later, copy)
    assert "goes on elsewhere" in copied(twice)
    with pytest.raises(Refusal) as refused:
        write_copied_ledger(twice)
    assert refused.value.problem.code == "superseded"
    assert read_ledger(copy) == later == read_copied_ledger(twice)
    # The run's own next start knows of it.
    fetch_missing_checkpoints(twice)
    assert read_ledger(twice.epochs) == later
    assert copied(twice) == ""


def test_ledger_is_copied_before_a_checkpoint(trained: RunFolder, desk: Path) -> None:
    run = twin(trained, desk / "run", asked_for(desk / "place"))
    assert read_copied_ledger(run) is None
    assert copied(run) == ""
    save(Ledger(epoch=9, ended={}), run.epochs)
    write_copied_ledger(run)
    assert read_copied_ledger(run) == Ledger(epoch=9, ended={})


# -- beside training
#   ------------------------------------------------------------------------------------------------


def test_failed_copy_is_warned_of_and_the_next_save_is_copied(
    trained: RunFolder, desk: Path
) -> None:
    run = twin(trained, desk / "run", asked_for(desk / "place"))
    newest = run.checkpoints / f"step-{steps_of(run)[1]:08d}"
    newest.rename(desk / "later")
    (desk / "place").rename(desk / "unmounted")
    updates = list[object]()
    copies = RunCopies(run, updates.append)

    def reported(word: str) -> bool:
        copies.report()
        return any(word in str(update) for update in updates)

    copies.request_copy()
    wait_for(lambda: reported("may not be mounted"), "a warning")
    assert any(isinstance(update, Warned) for update in updates)
    (desk / "unmounted").rename(desk / "place")
    (desk / "later").rename(newest)
    wait_for(lambda: reported("after every save"), "a copy")
    assert copied_steps(desk / "place", run) == [steps_of(run)[1]]
    copies.finish(LIMIT_S, lambda: False)


def test_end_of_a_run_waits_for_its_copy_no_longer_than_its_limit(
    trained: RunFolder, desk: Path
) -> None:
    # A pipe that nobody writes to: reading it never ends.
    run = twin(trained, desk / "run", asked_for(desk / "place"))
    (desk / "place" / copy_name(run)).mkdir()
    os.mkfifo(desk / "place" / copy_name(run) / "run.json")
    updates = list[object]()
    copies = RunCopies(run, updates.append)
    copies.request_copy()
    copies.finish(0.2, lambda: False)
    assert "was not copied within" in str(updates[-1])
    assert f"farspan resume {run.path}" in str(updates[-1])


def test_place_that_an_edit_adds_needs_trust(trained: RunFolder, desk: Path) -> None:
    run = twin(trained, desk / "run", asked_for(()))
    require_trusted(run)
    run.config.write_bytes(as_yaml(asked_for(desk / "place")))
    refuse_edited(run)
    with pytest.raises(Refusal, match="copies of the run, to") as refused:
        require_trusted(run)
    assert refused.value.problem.code == "run-untrusted"


@pytest.mark.parametrize(
    ("place", "fact"),
    [
        ("backup", "it would be another place"),
        ("/nowhere/at/all", "may not be mounted"),
        ("ftp://host/x", "no such kind of place"),
        ("site", "no other host with a disk of its own"),
    ],
)
def test_place_that_cannot_hold_copies_is_refused_before_a_run_begins(
    place: str, fact: str
) -> None:
    config = asked_for(place).checkpoint
    here = tiny.this_machine(TWO)
    with pytest.raises(Refusal, match=fact) as refused:
        refuse_unusable_places(config, site=here)
    assert refused.value.problem.code == "copy-unusable"


def test_run_on_the_disk_of_its_copies_is_named(desk: Path) -> None:
    assert shared_disk(asked_for(desk / "place").checkpoint, desk / "runs" / "x") is not None
    assert shared_disk(asked_for("/proc").checkpoint, desk / "runs" / "x") is None
