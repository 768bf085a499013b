"""Every writer of a run's or a cache's files leaves alone what a link in the place of its file
leads to; also on hosts with a disk of their own."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

from farspan.corpus.prepare import prepare_corpus
from farspan.domain.cluster import Cluster, Device, Host, Site
from farspan.domain.clusterfile import REMOTE_FOLDER
from farspan.domain.config import DataConfig, TokenizerConfig
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder, RunRecord, SpareTask
from farspan.domain.run_events import Event, Finished
from farspan.domain.struct_files import load
from farspan.domain.train import TrainSpec
from farspan.launch import trust
from farspan.launch.launchers import launch_workers
from farspan.launch.processes import run_folder
from farspan.launch.run_folder_transfer import RemoteRun
from farspan.launch.run_lock import Lease
from farspan.retrieval.index_work import IndexWork
from farspan.retrieval.stores import StoreLocation
from farspan.retrieval.stores import load as load_store
from farspan.runtime import spare
from farspan.runtime.checkpoint import checkpoint_folder
from farspan.runtime.checkpoint.slice_files import OwnedSlice
from farspan.runtime.training.events import EventLog
from farspan_lab import state
from farspan_lab.cluster import of_lab
from farspan_lab.lab import Status
from tests import tiny
from tests.launch.test_ends import scripted
from tests.waiting import LIMIT_S

TRAIN = TrainSpec(steps=4, batch=4, seq_len=16, precision="fp32", validate_every=4, seed=3)
CPU = Device(kind="cpu-avx2", backend="cpu", memory=2**30)


@pytest.fixture
def diary(tmp_path: Path) -> Path:
    """A file of the user's own, that no link may lead to."""
    path = tmp_path / "diary.txt"
    path.write_text("dear diary")
    return path


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN))


def home_of(far: Host, folder: Path) -> Path:
    """Where a folder of that host lies on this machine."""
    return Path(far.enter[1].removeprefix("HOME=")) / str(folder).removeprefix("~/")


# -- one writer after another
#   ------------------------------------------------------------------------------------------------


def write_part(run: RunFolder) -> None:
    path = run.checkpoints / "step-00000004"
    slices = [OwnedSlice("model/w", (2,), (0,), torch.zeros(2))]
    checkpoint_folder.write_part(path, 0, slices)


def embed_block(run: RunFolder) -> None:
    work = IndexWork()
    work.folder = run.index
    with work.features("block"):
        raise AssertionError("a link was opened")


def take_place(run: RunFolder) -> None:
    """Let this process be a spare that is given a place."""
    task = SpareTask(plan="", run="", environment={}, log=str(run.logs / "rank-1.log"))
    reading, writing = os.pipe()
    os.write(writing, msgspec.json.encode(task) + b"\n")
    before = os.dup(0)
    os.dup2(reading, 0)
    try:
        spare.main()
    finally:
        os.dup2(before, 0)
        for descriptor in (before, reading, writing):
            os.close(descriptor)


WRITERS: dict[str, Callable[[RunFolder], object]] = {
    "lock": Lease,
    "events.jsonl": lambda run: EventLog(run.events),
    "logs/rank-0.log": lambda run: tiny.workers(run).log("rank-0"),
    "logs/rank-1.log": take_place,
    "checkpoints/.step-00000004.tmp/part-00000.safetensors": write_part,
    "index/block.features": embed_block,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("target", ["diary.txt", "new.txt"])
def test_a_link_in_the_place_of_a_file_of_a_run_is_not_written_through(
    run: RunFolder,
    diary: Path,
    name: str,
    target: str,
) -> None:
    link = run.path / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(diary.parent / target)
    with pytest.raises(Refusal) as refusal:
        WRITERS[name](run)
    assert refusal.value.problem.code == "path-unusable"
    assert refusal.value.problem.where == str(link)
    assert diary.read_text() == "dear diary"
    assert not (diary.parent / "new.txt").exists()


def test_changes_of_an_index_are_not_written_through_a_link(tmp_path: Path, diary: Path) -> None:
    pytest.importorskip("faiss", reason="waits for farspan[faiss]")
    import numpy as np

    place = StoreLocation(folder=tmp_path / "store", dim=2)
    store = load_store("faiss").create(place)
    store.add([1], np.array([[1.0, 0.0]], np.float32), [{}])
    (place.folder / "rows").symlink_to(diary)
    with pytest.raises(Refusal, match="path-unusable"):
        store.finish()
    assert diary.read_text() == "dear diary"


def test_links_are_looked_for_while_the_run_removes_old_checkpoints(run: RunFolder) -> None:
    ended = threading.Event()

    def make_and_remove() -> None:
        while not ended.is_set():
            for step in range(20):
                (run.checkpoints / f"step-{step:08d}" / "part").mkdir(parents=True)
            shutil.rmtree(run.checkpoints)

    trainer = threading.Thread(target=make_and_remove)
    trainer.start()
    try:
        for _ in range(200):
            trust.require_own_links(run)
    finally:
        ended.set()
        trainer.join()


# -- a cache, which others may write to
#   ------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> DataConfig:
    (tmp_path / "docs").mkdir()
    for number in range(40):
        (tmp_path / "docs" / f"{number}.txt").write_text(f"text number {number} of many " * 20)
    return DataConfig(source=str(tmp_path / "docs"), val="20%")


def prepared(source: DataConfig, cache: Path) -> None:
    prepare_corpus(
        source, TokenizerConfig(vocab=300), cache, workers=1, write_line=lambda line: None
    )


@pytest.fixture
def work(source: DataConfig, tmp_path: Path) -> str:
    """What the folder of the work on this text is called in any cache."""
    prepared(source, tmp_path / "before")
    (key,) = (tmp_path / "before").glob(".key-*")
    return key.name.replace("key", "work", 1)


@pytest.mark.parametrize(
    "name",
    [
        "lock",
        "00000.docs",
        "00000.marks.npy",
        "00000.shingles",
        "00000.ends.npy",
        "00000.sign.done",
        "00000.fates.npy",
        "00000.train.bin",
        "00000.train.zst",
        "00000.train.sizes.npy",
        "00000.encode_shard.done",
    ],
)
def test_prepared_text_is_not_written_through_a_link(
    source: DataConfig, tmp_path: Path, work: str, name: str
) -> None:
    (tmp_path / "cache" / work).mkdir(parents=True)
    link = tmp_path / "cache" / work / name
    link.symlink_to(tmp_path / "new.txt")
    with pytest.raises(Refusal) as refusal:
        prepared(source, tmp_path / "cache")
    assert refusal.value.problem.where == str(link)
    assert not (tmp_path / "new.txt").exists()


def test_text_is_not_prepared_in_a_linked_folder_of_a_cache(
    source: DataConfig, tmp_path: Path, work: str
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "lock").write_text("mine")
    (tmp_path / "cache" / work).symlink_to(tmp_path / "home")
    with pytest.raises(Refusal, match="path-unusable"):
        prepared(source, tmp_path / "cache")
    # Nor is it swept away as work of days ago.
    other = tmp_path / "cache" / ".work-0123"
    other.symlink_to(tmp_path / "home")
    os.utime(other, (0, 0), follow_symlinks=False)
    os.utime(tmp_path / "home", (0, 0))
    (tmp_path / "cache" / work).unlink()
    prepared(source, tmp_path / "cache")
    assert (tmp_path / "home" / "lock").read_text() == "mine"
    assert other.is_symlink()


# -- hosts with a disk of their own
#   ------------------------------------------------------------------------------------------------


def test_events_of_a_host_are_not_added_to_what_a_link_leads_to(
    run: RunFolder, far: Host, diary: Path
) -> None:
    plan = run.load_plan()
    plan = replace(plan, devices=(replace(plan.devices[0], host="far"),))
    there = run_folder(far, plan, run)
    away = RemoteRun(far, plan, run, there)
    away.send_run()
    home_of(far, there.events).write_bytes(b"an event\n")
    run.events.symlink_to(diary)
    with pytest.raises(Refusal, match="path-unusable"):
        away.pull_events()
    assert diary.read_text() == "dear diary"


def test_linked_checkpoints_of_the_user_s_own_are_sent_to_a_host(
    run: RunFolder, far: Host, tmp_path: Path
) -> None:
    plan = run.load_plan()
    plan = replace(plan, devices=(replace(plan.devices[0], host="far"),))
    (tmp_path / "scratch" / "step-00000002").mkdir(parents=True)
    (tmp_path / "scratch" / "step-00000002" / "manifest.json").write_text("{}")
    run.checkpoints.symlink_to(tmp_path / "scratch")
    there = run_folder(far, plan, run)
    RemoteRun(far, plan, run, there).send_run()
    sent = home_of(far, there.checkpoints)
    assert (sent / "step-00000002" / "manifest.json").read_text() == "{}"
    assert not sent.is_symlink()
    # Only the far user reads what was sent.
    corpus = home_of(far, Path(load(home_of(far, there.record), RunRecord).corpus))
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in (sent.parent, corpus))


def test_text_that_an_earlier_version_left_readable_on_a_host_is_closed(
    far: Host, tmp_path: Path
) -> None:
    plan = tiny.plan(TRAIN, rows=(2, 2), micro_rows=2)
    plan = replace(plan, devices=(plan.devices[0], replace(plan.devices[1], host="far")))
    run = tiny.run_folder(tmp_path / "run", plan)
    folder = home_of(far, Path(REMOTE_FOLDER))
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    here = Host(name="here", devices=(CPU,), enter=())
    cluster = Cluster(sites=(Site(name="here", hosts=(here, far)),))
    with scripted(run, "true", "true", cluster=cluster) as workers:
        list(workers)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.slow
def test_a_host_that_is_sent_plan_and_tokens_writes_through_no_link_and_keeps_them_to_itself(
    lab: Status, tmp_path: Path, diary: Path
) -> None:
    # Star has a home of its own, and does not see the corpus.
    home = tmp_path / "home"
    whole = of_lab(lab)
    utah, star = whole.hosts
    (device,) = star.devices
    at_home = ("env", f"HOME={home}")
    star = replace(
        star,
        folder=REMOTE_FOLDER,
        enter=(*(star.enter or ()), *at_home),
        devices=(device.but(enter=(*(device.slot.enter or ()), *at_home)),),
    )
    sites = tuple(
        replace(site, hosts=(host,)) for site, host in zip(whole.sites, (utah, star), strict=True)
    )
    plan = tiny.plan(TRAIN, rows=(2, 2), micro_rows=2)
    devices = tuple(
        replace(device, host=host.name)
        for device, host in zip(plan.devices, (utah, star), strict=True)
    )
    run = tiny.run_folder(tmp_path / "run", replace(plan, devices=devices))
    hide = ["mount", "-t", "tmpfs", "none", str(tmp_path / "corpus")]
    subprocess.run([*state.enter(lab, "star"), *hide], check=True, timeout=LIMIT_S)

    def train() -> list[Event]:
        with launch_workers("local", run.load_plan(), run, replace(whole, sites=sites)) as workers:
            return list(workers)

    cache = home / REMOTE_FOLDER.removeprefix("~/")
    there = home / str(run_folder(star, run.load_plan(), run).path).removeprefix("~/")
    there.mkdir(parents=True)
    cache.chmod(0o755)  # As an earlier version left it.
    lock = there / ".fetch.lock"
    lock.symlink_to(diary)
    with pytest.raises(Refusal, match="path-unusable"):
        train()
    assert diary.read_text() == "dear diary"
    lock.unlink()
    events = train()
    assert isinstance(events[-1], Finished) and events[-1].reason == "done"
    assert (cache / "cache" / "corpora" / f"sent-{tiny.CORPUS_HASH}" / "train.bin").exists()
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (cache, there)] == [0o700, 0o700]
