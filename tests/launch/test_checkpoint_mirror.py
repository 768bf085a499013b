"""Checkpoints of a run whose rank 0 works on a host with a disk of its own come here while it
trains: a host that is lost costs the steps since the last one that came, and that is said."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from farspan import models
from farspan.app.checkpoints import flaw_of
from farspan.domain.cluster import Cluster, Device, Host, Site
from farspan.domain.cluster_json import save_cluster_json
from farspan.domain.engine import load_engine
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Finished, Recovered, Saved, Started, read_events
from farspan.domain.struct_files import save
from farspan.domain.units import counted
from farspan.estimate.estimate_plan import estimate
from farspan.launch.checkpoint_mirror import CheckpointMirror
from farspan.launch.processes import run_folder
from farspan.report.history import follow_events
from farspan.report.run_progress import SoFar
from farspan.runtime.checkpoint import checkpoint_folder
from tests import tiny
from tests.app.supervised import Watched, made
from tests.launch.test_launchers import TRAIN
from tests.report.fake_run import START, make_plan, train_events
from tests.waiting import LIMIT_S, wait_for

CPU = Device(kind="cpu-avx2", backend="cpu", memory=2**30)
#: Waits as long as `blocked` exists, then is tar; each call leaves a line in `calls`.
TAR = """#!/bin/sh
echo >> {folder}/calls
while [ -e {folder}/blocked ]; do sleep 0.05; done
exec {tar} "$@"
"""

#: Talks to a command on a host, with a Ctrl-C of this process's terminal meanwhile.
INTERRUPTED = """
import os, signal, subprocess
from farspan.domain.cluster import Device, Host
from farspan.launch.hosts import start_shell
signal.signal(signal.SIGINT, lambda number, frame: None)
cpu = Device(kind="cpu-avx2", backend="cpu", memory=2**30)
host = Host(name="far", devices=(cpu,), enter=("env",))
pipe = subprocess.PIPE
with start_shell(host, "echo begun; read word; echo $word", stdin=pipe, stdout=pipe) as process:
    print(process.stdout.readline().decode().strip())
    os.killpg(0, signal.SIGINT)
    process.stdin.write(b"ended\\n")
    process.stdin.close()
    print(process.stdout.read().decode().strip())
"""


class FarHost:
    """A host with a disk of its own, which can be lost, and whose `tar` can be made to wait."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = folder / "disk"
        (folder / "bin").mkdir(parents=True)
        script = folder / "bin" / "tar"
        script.write_text(TAR.format(folder=folder, tar=shutil.which("tar")))
        script.chmod(0o755)
        gate = f"[ -e {folder}/gone ] && exit 255; export PATH={folder}/bin:$PATH"
        self.host = Host(
            name="far",
            devices=(CPU,),
            address="127.0.0.1",
            enter=("sh", "-c", f'{gate}; exec "$@"', "sh"),
            python=sys.executable,
            folder=str(self.disk),
        )

    def lose(self) -> None:
        """Nothing on the host can be started any more."""
        (self.folder / "gone").touch()

    def find(self) -> None:
        """It can be entered again."""
        (self.folder / "gone").unlink()

    def block(self) -> None:
        (self.folder / "blocked").touch()

    def unblock(self) -> None:
        (self.folder / "blocked").unlink(missing_ok=True)

    @property
    def copies(self) -> int:
        """How often something was copied from there."""
        calls = self.folder / "calls"
        return len(calls.read_text().splitlines()) if calls.exists() else 0


@pytest.fixture
def far_host(tmp_path: Path) -> Iterator[FarHost]:
    host = FarHost(tmp_path / "far")
    yield host
    host.unblock()


# -- one copy after another
#   --------------------------------------------------------------------------------------------


@pytest.fixture
def mirrored(far_host: FarHost, tmp_path: Path) -> tuple[CheckpointMirror, RunFolder, RunFolder]:
    """A mirror, the run's folder here, and the one there."""
    plan = tiny.plan(replace(TRAIN, keep=2))
    plan = replace(plan, devices=(replace(plan.devices[0], host="far"),))
    run = tiny.run_folder(tmp_path / "run", plan)
    there = run_folder(far_host.host, plan, run)
    return CheckpointMirror(far_host.host, plan, run, there), run, there


def saved_there(there: RunFolder, step: int, content: bytes = b"whole") -> None:
    folder = there.checkpoints / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "part-00000.safetensors").write_bytes(content * 1000)
    (folder / "manifest.json").write_bytes(b"{%d}" % step)


def here(run: RunFolder) -> list[int]:
    return sorted(checkpoint_folder.step_of(path) for path in run.checkpoints.glob("step-*"))


def test_one_copy_is_made_at_a_time_and_a_newer_checkpoint_replaces_a_waiting_one(
    far_host: FarHost, mirrored: tuple[CheckpointMirror, RunFolder, RunFolder]
) -> None:
    mirror, run, there = mirrored
    for step in (1, 2, 3):
        saved_there(there, step)
    far_host.block()
    mirror.request_copy(1, best=False, size=5000)
    wait_for(lambda: far_host.copies == 1, "the first copy is being made")
    mirror.request_copy(2, best=False, size=5000)
    mirror.request_copy(3, best=False, size=5000)
    assert here(run) == []
    far_host.unblock()
    wait_for(lambda: here(run) == [1, 3], "both are here")
    assert far_host.copies == 2
    mirror.close()
    assert mirror.take_warnings() == []


def test_a_checkpoint_that_is_deleted_while_it_is_copied_comes_whole(
    far_host: FarHost, mirrored: tuple[CheckpointMirror, RunFolder, RunFolder]
) -> None:
    mirror, run, there = mirrored
    saved_there(there, 1)
    far_host.block()
    mirror.request_copy(1, best=False, size=5000)
    wait_for(lambda: far_host.copies == 1, "the copy is being made")
    shutil.rmtree(there.checkpoints)
    far_host.unblock()
    wait_for(lambda: here(run) == [1], "it is here")
    mirror.close()
    (part,) = run.checkpoints.rglob("part-*")
    assert part.read_bytes() == b"whole" * 1000
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000001"]
    assert not (there.path / ".copied").exists()


def test_as_many_checkpoints_are_kept_here_as_the_plan_keeps(
    mirrored: tuple[CheckpointMirror, RunFolder, RunFolder],
) -> None:
    mirror, run, there = mirrored
    for step in (1, 2, 3):
        saved_there(there, step)
        mirror.request_copy(step, best=False, size=5000)
        wait_for(lambda: step in here(run), "it is here")  # noqa: B023 - called at once
    mirror.close()
    assert here(run) == [2, 3]


def test_best_weights_come_with_the_checkpoint_that_knows_of_them(
    mirrored: tuple[CheckpointMirror, RunFolder, RunFolder],
) -> None:
    mirror, run, there = mirrored
    saved_there(there, 1)
    shutil.copytree(there.checkpoints / "step-00000001", there.checkpoints / "best")
    mirror.request_copy(1, best=True, size=5000)
    wait_for(lambda: here(run) == [1], "it is here")
    assert (run.best / "manifest.json").exists()
    mirror.close()


def test_a_damaged_copy_does_not_count_and_is_told(
    far_host: FarHost, mirrored: tuple[CheckpointMirror, RunFolder, RunFolder]
) -> None:
    _, run, there = mirrored
    saved_there(there, 1)
    mirror = CheckpointMirror(far_host.host, run.load_plan(), run, there, lambda path: "torn")
    mirror.request_copy(1, best=False, size=5000)
    (warning,) = wait_for(mirror.take_warnings, "a warning")
    assert "step-00000001" in warning and "torn" in warning and "far" in warning
    mirror.close()
    assert list(run.checkpoints.iterdir()) == []


@pytest.mark.slow
def test_a_closed_mirror_ends_a_copy_that_hangs(
    far_host: FarHost, mirrored: tuple[CheckpointMirror, RunFolder, RunFolder]
) -> None:
    mirror, run, there = mirrored
    saved_there(there, 1)
    far_host.block()
    mirror.request_copy(1, best=False, size=5000)
    wait_for(lambda: far_host.copies == 1, "the copy is being made")
    mirror.close()
    assert here(run) == [] and mirror.take_warnings() == []
    far_host.unblock()
    mirror.copy_missing()
    assert here(run) == [1]


def test_only_what_is_not_here_is_copied_between_two_starts(
    far_host: FarHost, mirrored: tuple[CheckpointMirror, RunFolder, RunFolder]
) -> None:
    mirror, run, there = mirrored
    mirror.copy_missing()  # The host has nothing yet.
    saved_there(there, 1)
    mirror.copy_missing()
    assert (here(run), far_host.copies) == ([1], 1)
    mirror.copy_missing()
    assert far_host.copies == 1
    # Made again after a fault: another file of the same name.
    shutil.rmtree(there.checkpoints)
    saved_there(there, 1, b"other")
    (there.checkpoints / "step-00000001" / "manifest.json").write_bytes(b"{other}")
    mirror.copy_missing()
    (part,) = run.checkpoints.rglob("part-*")
    assert part.read_bytes() == b"other" * 1000
    far_host.lose()
    with pytest.raises(Refusal, match="host-unreachable"):
        mirror.copy_missing()


# -- runs
#   ------------------------------------------------------------------------------------------------

#: Longer than any test waits, and steps that a run still makes after what a test is about.
ENDLESS = replace(TRAIN, steps=100_000, validate_every=100_000, checkpoint_every_s=0.3)
MORE = 20


def on_far(path: Path, far_host: FarHost) -> RunFolder:
    """A run on that host; this machine could take it over."""
    plan = tiny.plan(ENDLESS, micro_rows=4)
    plan = replace(plan, devices=(replace(plan.devices[0], host="far"),))
    run = made(path, plan)
    near = Host(name="here", devices=(CPU,), enter=(), address="127.0.0.1")
    cluster = Cluster(sites=(Site(name="both", hosts=(near, far_host.host)),))
    save_cluster_json(cluster, run.cluster)
    save(estimate(plan, models.graph(plan.model), cluster, load_engine("farspan")), run.estimate)
    return run


def calm(path: Path, last: int) -> dict[int, float]:
    """The losses of a run that nothing disturbs, until a step."""
    watched = Watched(
        made(path / "calm" / "run", tiny.plan(ENDLESS, micro_rows=4)),
        lambda w, step: w.supervisor.request_stop() if step == last else None,
    )
    watched.train()
    return {step: watched.losses[step] for step in range(1, last + 1)}


def saved(watched: Watched, before: Recovered | None = None) -> list[int]:
    """The steps of the checkpoints so far, or of those before a recovery."""
    events = watched.events[: None if before is None else watched.events.index(before)]
    return [event.step for event in events if isinstance(event, Saved)]


@pytest.mark.slow
@pytest.mark.parametrize("copying", ["done", "interrupted"])
def test_a_lost_host_of_rank_0_costs_the_steps_after_the_last_checkpoint_that_came(
    far_host: FarHost, tmp_path: Path, copying: str
) -> None:
    """Interrupted: the host is lost after a save and before its copy has come."""
    blocked_at = list[int]()
    lost_at = list[int]()

    def at_step(watched: Watched, step: int) -> None:
        newest = watched.run.newest_checkpoint()
        if lost_at:
            if watched.faulted and step == watched.faulted[0].step + MORE:
                watched.supervisor.request_stop()
        elif newest > 0 and copying == "interrupted" and not blocked_at:
            far_host.block()
            blocked_at.append(step)
        elif newest > 0 and (not blocked_at or max(saved(watched)) > max(newest, *blocked_at)):
            lost_at.append(step)
            far_host.lose()
            watched.signal(0, signal.SIGKILL)

    watched = Watched(on_far(tmp_path / "run", far_host), at_step)
    ending = watched.train()
    far_host.unblock()
    assert isinstance(ending, Finished) and ending.reason == "interrupted", ending
    (fault,) = watched.faulted
    (again,) = [event for event in watched.events if isinstance(event, Recovered)]
    # Some that the host had saved are told after it was lost.
    newest = max(saved(watched, before=again))
    assert again.replanned and 0 < again.step <= newest
    assert again.lost == fault.step - again.step
    (change,) = [note for note in watched.notes if "to go by" in note]
    assert change.startswith(f"{ENDLESS.steps - again.step:,} steps to go by ")
    alone = [note for note in watched.notes if "saved on far alone" in note]
    assert len(alone) == (newest > again.step)
    if copying == "interrupted":
        assert again.step < newest
        assert f"{counted(newest - again.step, 'step')} after it" in alone[0]
    assert watched.losses == pytest.approx(calm(tmp_path, max(watched.losses)), abs=1e-5)
    # What a report says of it.
    assert follow_events(read_events(watched.run.events)).lost_steps == again.lost


@pytest.mark.slow
def test_checkpoints_that_only_the_host_of_rank_0_has_count_at_the_next_start(
    far_host: FarHost, tmp_path: Path
) -> None:
    """As where the process here was killed: what the workers then saved has not come."""
    run = on_far(tmp_path / "run", far_host)
    first = Watched(run, lambda w, step: w.supervisor.request_stop() if step == 100 else None)
    ending = first.train()
    assert isinstance(ending, Finished) and ending.reason == "interrupted"
    shutil.rmtree(run.checkpoints)
    last = max(first.losses)
    second = Watched(
        run, lambda w, step: w.supervisor.request_stop() if step == last + MORE else None
    )
    ending = second.train()
    assert isinstance(ending, Finished) and ending.reason == "interrupted"
    (started,) = [event for event in second.events if isinstance(event, Started)]
    assert started.step == last >= 100
    both = first.losses | second.losses
    assert both == calm(tmp_path, max(both))


@pytest.mark.slow
def test_checkpoints_come_while_the_run_trains_and_are_whole(
    far_host: FarHost, tmp_path: Path
) -> None:
    """The run goes on until one has come."""
    run = on_far(tmp_path / "run", far_host)
    came = list[int]()

    def at_step(watched: Watched, step: int) -> None:
        if not came and (newest := run.newest_checkpoint()) > 0:
            came.append(newest)
            watched.supervisor.request_stop()

    watched = Watched(run, at_step)
    ending = watched.train()
    assert isinstance(ending, Finished) and ending.reason == "interrupted"
    assert came[0] < max(here(run)) == ending.step
    for path in run.checkpoints.iterdir():
        assert flaw_of(path) == ""
    part = next(run.checkpoints.glob("step-*/part-*"))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    assert "does not match its checksum" in flaw_of(part.parent)


def test_ctrl_c_does_not_reach_a_copy_that_is_being_made() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        start_new_session=True,
    )
    assert done.stdout.split() == ["begun", "ended"], done.stderr


def test_a_start_from_an_earlier_checkpoint_has_no_later_one() -> None:
    started = train_events(make_plan(4), first=0, last=4, at=START, reason="done")[0]
    so_far = SoFar(make_plan(10).train)
    for step in (2, 4, 6):
        so_far.take(Saved(at=1.0, step=step, path="run", size_bytes=1, seconds=1.0))
    for step, newest in ((6, 6), (5, 4), (1, None)):
        so_far.take(replace(started, step=step))
        assert (so_far.saved.step if so_far.saved else None) == newest
