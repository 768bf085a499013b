"""Checkpoints of a run whose rank 0 works on a host with a disk of its own come here while it
trains: a host that is lost costs the steps since the last one that came, and that is said."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from farspan import models
from farspan.app.checkpoints import flaw_of
from farspan.domain.cluster import Cluster, Device, Host, Site
from farspan.domain.cluster_json import save_cluster_json
from farspan.domain.codec import save
from farspan.domain.engine import engine
from farspan.domain.problems import Refusal
from farspan.domain.results import Finished, Recovered, Saved, Started, read_events
from farspan.domain.run import RunFolder
from farspan.estimate.price import estimate
from farspan.launch.checkpoint_mirror import CheckpointMirror
from farspan.launch.processes import run_folder
from farspan.report.history import trace
from farspan.report.so_far import SoFar
from farspan.runtime.checkpoint import checkpoint
from tests import tiny
from tests.app.supervised import Watched, made
from tests.launch.test_launchers import TRAIN
from tests.report.fake_run import START, make_plan, train_events
from tests.waiting import wait_for

CPU = Device(kind="cpu-avx2", backend="cpu", memory=2**30)
#: Waits as long as `blocked` exists, then is tar; each call leaves a line in `calls`.
TAR = """#!/bin/sh
echo >> {folder}/calls
while [ -e {folder}/blocked ]; do sleep 0.05; done
exec {tar} "$@"
"""


class FarHost:
    """A host with a disk of its own, which can be lost, and whose `tar` can be made to wait."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.disk = folder, folder / "disk"
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
    return sorted(checkpoint.step_of(path) for path in run.checkpoints.glob("step-*"))


def test_one_copy_is_made_at_a_time_and_a_newer_checkpoint_replaces_a_waiting_one(
    far_host: FarHost, mirrored: tuple[CheckpointMirror, RunFolder, RunFolder]
) -> None:
    mirror, run, there = mirrored
    for step in (1, 2, 3):
        saved_there(there, step)
    far_host.block()
    mirror.request(1, best=False)
    wait_for(lambda: far_host.copies == 1, "the first copy is being made")
    mirror.request(2, best=False)
    mirror.request(3, best=False)
    assert here(run) == []
    far_host.unblock()
    wait_for(lambda: here(run) == [1, 3], "both are here")
    assert far_host.copies == 2
    mirror.close()
    assert mirror.warnings() == []


def test_a_checkpoint_that_is_deleted_while_it_is_copied_comes_whole(
    far_host: FarHost, mirrored: tuple[CheckpointMirror, RunFolder, RunFolder]
) -> None:
    mirror, run, there = mirrored
    saved_there(there, 1)
    far_host.block()
    mirror.request(1, best=False)
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
        mirror.request(step, best=False)
        wait_for(lambda: step in here(run), "it is here")  # noqa: B023 - called at once
    mirror.close()
    assert here(run) == [2, 3]


def test_best_weights_come_with_the_checkpoint_that_knows_of_them(
    mirrored: tuple[CheckpointMirror, RunFolder, RunFolder],
) -> None:
    mirror, run, there = mirrored
    saved_there(there, 1)
    shutil.copytree(there.checkpoints / "step-00000001", there.checkpoints / "best")
    mirror.request(1, best=True)
    wait_for(lambda: here(run) == [1], "it is here")
    assert (run.best / "manifest.json").exists()
    mirror.close()


def test_a_damaged_copy_does_not_count_and_is_told(
    far_host: FarHost, mirrored: tuple[CheckpointMirror, RunFolder, RunFolder]
) -> None:
    _, run, there = mirrored
    saved_there(there, 1)
    mirror = CheckpointMirror(far_host.host, run.load_plan(), run, there, lambda path: "torn")
    mirror.request(1, best=False)
    (warning,) = wait_for(mirror.warnings, "a warning")
    assert "step-00000001" in warning and "torn" in warning and "far" in warning
    mirror.close()
    assert list(run.checkpoints.iterdir()) == []


def test_a_closed_mirror_ends_a_copy_that_hangs(
    far_host: FarHost, mirrored: tuple[CheckpointMirror, RunFolder, RunFolder]
) -> None:
    mirror, run, there = mirrored
    saved_there(there, 1)
    far_host.block()
    mirror.request(1, best=False)
    wait_for(lambda: far_host.copies == 1, "the copy is being made")
    mirror.close()
    assert here(run) == [] and mirror.warnings() == []
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

STEPS = replace(TRAIN, steps=300, validate_every=300, checkpoint_every_s=0.3)


def on_far(path: Path, far_host: FarHost) -> RunFolder:
    """A run on that host; this machine could take it over."""
    plan = tiny.plan(STEPS, micro_rows=4)
    plan = replace(plan, devices=(replace(plan.devices[0], host="far"),))
    run = made(path, plan)
    near = Host(name="here", devices=(CPU,), enter=(), address="127.0.0.1")
    cluster = Cluster(sites=(Site(name="both", hosts=(near, far_host.host)),))
    save_cluster_json(cluster, run.cluster)
    save(estimate(plan, models.graph(plan.model), cluster, engine("farspan")), run.estimate)
    return run


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run that nothing disturbs."""
    watched = Watched(made(tmp_path_factory.mktemp("calm") / "run", tiny.plan(STEPS, micro_rows=4)))
    ending = watched.train()
    assert isinstance(ending, Finished) and ending.reason == "done"
    return watched.losses


def saved(watched: Watched) -> list[int]:
    return [event.step for event in watched.events if isinstance(event, Saved)]


@pytest.mark.slow
@pytest.mark.parametrize("copying", ["done", "interrupted"])
def test_a_lost_host_of_rank_0_costs_the_steps_after_the_last_checkpoint_that_came(
    far_host: FarHost, tmp_path: Path, calm: dict[int, float], copying: str
) -> None:
    """Interrupted: the host is lost after a save and before its copy has come."""
    blocked_at, lost_at = list[int](), list[int]()

    def at_step(watched: Watched, step: int) -> None:
        if lost_at or (newest := watched.run.newest_checkpoint()) <= 0:
            return
        if copying == "interrupted":
            if not blocked_at:
                far_host.block()
                blocked_at.append(step)
            if max(saved(watched)) <= max(newest, *blocked_at):
                return
        lost_at.append(max(saved(watched)))
        far_host.lose()
        watched.signal(0, signal.SIGKILL)

    watched = Watched(on_far(tmp_path / "run", far_host), at_step)
    ending = watched.train()
    far_host.unblock()
    assert isinstance(ending, Finished) and ending.reason == "done", ending
    (fault,) = watched.faulted
    (again,) = [event for event in watched.events if isinstance(event, Recovered)]
    assert again.replanned and 0 < again.step <= lost_at[0]
    assert again.lost == fault.step - again.step
    (change,) = [note for note in watched.notes if "to go by" in note]
    assert change.startswith(f"{STEPS.steps - again.step} steps to go by ")
    alone = [note for note in watched.notes if "saved on far alone" in note]
    assert len(alone) == (lost_at[0] > again.step)
    if copying == "interrupted":
        assert again.step < lost_at[0]
        assert f"{lost_at[0] - again.step} step" in alone[0]
    assert watched.losses == pytest.approx(calm, abs=1e-5)
    # What a report says of it.
    assert trace(read_events(watched.run.events)).lost_steps == again.lost


@pytest.mark.slow
def test_checkpoints_that_only_the_host_of_rank_0_has_count_at_the_next_start(
    far_host: FarHost, tmp_path: Path, calm: dict[int, float]
) -> None:
    """As where the process here was killed: what the workers then saved has not come."""
    run = on_far(tmp_path / "run", far_host)
    first = Watched(run, lambda w, step: w.supervisor.stop() if step == 100 else None)
    ending = first.train()
    assert isinstance(ending, Finished) and ending.reason == "interrupted"
    assert all(flaw_of(path) == "" for path in run.checkpoints.iterdir())
    shutil.rmtree(run.checkpoints)
    second = Watched(run)
    ending = second.train()
    assert isinstance(ending, Finished) and ending.reason == "done"
    (started,) = [event for event in second.events if isinstance(event, Started)]
    assert started.step >= 100
    assert first.losses | second.losses == calm
    assert max(here(run)) == STEPS.steps


@pytest.mark.slow
def test_checkpoints_come_while_the_run_trains_and_are_whole(
    far_host: FarHost, tmp_path: Path, calm: dict[int, float]
) -> None:
    came = dict[int, int]()

    def at_step(watched: Watched, step: int) -> None:
        if (newest := watched.run.newest_checkpoint()) > 0:
            came.setdefault(newest, step)

    run = on_far(tmp_path / "run", far_host)
    watched = Watched(run, at_step)
    ending = watched.train()
    assert isinstance(ending, Finished) and ending.reason == "done"
    assert came and min(came.values()) < STEPS.steps
    assert watched.losses == calm
    for path in run.checkpoints.iterdir():
        assert flaw_of(path) == ""
    part = next(run.checkpoints.glob("step-*/part-*"))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    assert "does not match its checksum" in flaw_of(part.parent)


def test_a_start_from_an_earlier_checkpoint_has_no_later_one() -> None:
    started = train_events(make_plan(4), first=0, last=4, at=START, reason="done")[0]
    so_far = SoFar(10)
    for step in (2, 4, 6):
        so_far.take(Saved(at=1.0, step=step, path="run", size_bytes=1, seconds=1.0))
    for step, newest in ((6, 6), (5, 4), (1, None)):
        so_far.take(replace(started, step=step))
        assert (so_far.saved.step if so_far.saved else None) == newest
