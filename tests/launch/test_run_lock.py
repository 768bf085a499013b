"""The starts of a run are numbered on, also where its ledger of epochs is damaged, gone or an old
copy."""

from __future__ import annotations

import shlex

import msgspec
import pytest

from farspan.domain.epoch_fence import read_ledger
from farspan.domain.problems import Problem, Refusal
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Environment, Event, Recovered, Started
from farspan.launch.folder_lock import lock_file
from farspan.launch.run_lock import Lease
from tests.domain.test_epoch_fence import DAMAGED

MACHINE = Environment(
    farspan="1",
    python="3",
    torch="2",
    platform="x",
    device="cpu",
    cpus=1,
    threads=1,
    memory_bytes=1,
)
STARTED = Started(
    at=1.0, step=0, plan="p", world=1, environment=MACHINE, estimate=None, peak_flops=None
)
LOST = Problem(code="worker-lost", what="lost", where="log", fact="gone", remedy="resume")
#: Restores that have no number of their own, and those after a fault that have.
AFTER = Recovered(at=2.0, step=40, epoch=6, fault=LOST, lost=0, down_s=1.0)


def made(run: RunFolder, events: list[Event], saved: dict[int, int]) -> None:
    """A run of these events, and of checkpoints that starts have saved, by step."""
    run.make()
    run.events.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    for step, number in saved.items():
        folder = run.checkpoints / f"step-{step:08d}"
        folder.mkdir(parents=True)
        progress = {"step": step, "epoch": number, "plan": "p", "elapsed_s": 1.0}
        content = {"progress": progress, "tensors": {}, "checksum": "x"}
        (folder / "manifest.json").write_bytes(msgspec.json.encode(content))


def test_busy_run_has_a_fix_that_shows_it_and_one_that_ends_it(tmp_path):
    run = RunFolder(tmp_path / "my run")
    run.make()
    with Lease(run), pytest.raises(Refusal) as refused:
        Lease(run)
    fix, _, end = refused.value.problem.remedy.partition("   # to end it: ")
    assert shlex.split(fix) == ["farspan", "status", str(run.path)]
    assert shlex.split(end) == ["farspan", "stop", str(run.path)]


def test_busy_folder_has_a_fix_that_shows_the_program_in_it(tmp_path):
    path = tmp_path / "my lock"
    with lock_file(path, "busy", tmp_path), pytest.raises(Refusal) as refused:
        lock_file(path, "busy", tmp_path)
    assert shlex.split(refused.value.problem.remedy) == ["fuser", "-v", str(path)]


@pytest.mark.parametrize("content", [*DAMAGED, None, b'{"epoch": 2, "ended": {"1": 10}}'])
@pytest.mark.parametrize(
    ("events", "saved", "newest"),
    [
        ([STARTED, STARTED, AFTER], {30: 3, 40: 5}, 6),
        ([STARTED, STARTED, AFTER, STARTED], {40: 7}, 7),
        ([STARTED] * 9, {40: 4}, 9),
        ([], {40: 4}, 4),
    ],
)
def test_next_start_is_numbered_after_what_checkpoints_and_events_tell(
    tmp_path, content, events, saved, newest
):
    run = RunFolder(tmp_path / "run")
    made(run, events, saved)
    if content is not None:
        run.epochs.write_bytes(content)
    with Lease(run) as lease:
        assert lease.begin_epoch().number == newest + 1
        assert lease.mended is not None and f"number {newest}" in lease.mended
        assert lease.begin_epoch().number == newest + 2 and lease.mended is None
    ledger = read_ledger(run.epochs)
    assert all(ledger.counts(number, 40) for number in range(1, newest + 3))
    assert not any(ledger.counts(number, 41) for number in range(1, newest + 2))


def test_damaged_manifest_or_checkpoint_folder_hides_no_other(tmp_path):
    run = RunFolder(tmp_path / "run")
    made(run, [], {30: 3, 40: 5})
    (run.checkpoints / "step-00000040" / "manifest.json").write_bytes(b"{")
    (run.checkpoints / "step-00000050").write_bytes(b"")
    run.epochs.write_bytes(b"{")
    with Lease(run) as lease:
        assert lease.begin_epoch().number == 4


def test_first_start_of_a_run_and_those_after_it_have_nothing_to_mend(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.make()
    with Lease(run) as lease:
        for number in (1, 2, 3):
            assert lease.begin_epoch().number == number and lease.mended is None
