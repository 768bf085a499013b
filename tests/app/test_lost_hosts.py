"""What becomes of hosts and devices that a run has lost: real workers, hosts that go and come back,
a device that fails for good, a cloud's notice."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from farspan import models
from farspan.app import lost_hosts
from farspan.domain.cluster import Cluster, Device, Host, LearnedPace, Site, WorkerSlot
from farspan.domain.cluster_json import load_cluster_json, save_cluster_json
from farspan.domain.engine import load_engine
from farspan.domain.plan import Plan
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Finished, Recovered, Saved, Started
from farspan.domain.struct_files import save
from farspan.estimate.estimate_plan import estimate
from tests import tiny
from tests.app.supervised import Watched, made
from tests.app.test_two_supervisors import undisturbed
from tests.launch.test_checkpoint_mirror import FarHost
from tests.launch.test_launchers import TRAIN

CPU = Device(kind="cpu-avx2", backend="cpu", memory=2**30)
ENDLESS = replace(TRAIN, steps=100_000, validate_every=100_000, checkpoint_every_s=0.3)
MORE = 20


def made_on(path: Path, plan: Plan, cluster: Cluster) -> RunFolder:
    run = made(path, plan)
    save_cluster_json(cluster, run.cluster)
    graph = models.graph(plan.model)
    save(estimate(plan, graph, cluster, load_engine("farspan")), run.estimate)
    return run


@pytest.mark.slow
def test_device_that_fails_for_good_is_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    """Device 0 fails, so the plan that follows has to name device 1."""
    broken = tmp_path / "broken"
    enter = ("sh", "-c", f'[ -e {broken} ] && exit 134; exec "$@"', "sh")
    devices = (replace(CPU, slot=WorkerSlot(enter=enter)), CPU)
    host = Host(name="here", devices=devices, enter=(), address="127.0.0.1")
    plan = tiny.plan(ENDLESS, rows=(4, 4))
    second = replace(plan.devices[1], index=1)
    plan = replace(plan, devices=(plan.devices[0], second))
    run = made_on(tmp_path / "run", plan, Cluster(sites=(Site(name="here", hosts=(host,)),)))
    broke_at = list[int]()

    def at_step(watched: Watched, step: int) -> None:
        if not broke_at and watched.run.newest_checkpoint() > 0:
            broke_at.append(step)
            broken.touch()
            watched.signal(0, signal.SIGKILL)
        elif broke_at and step == broke_at[0] + MORE:
            watched.supervisor.request_stop()

    watched = Watched(run, at_step)
    ending = watched.train()
    assert isinstance(ending, Finished) and ending.reason == "interrupted", ending
    assert [(at.host, at.index) for at in run.load_plan().devices] == [("here", 1)]
    assert any(note.startswith("device 0 of here is given up") for note in watched.notes)
    expected = undisturbed(tmp_path / "undisturbed", broke_at[0] + MORE)
    for step, loss in expected.items():
        assert watched.losses[step] == pytest.approx(loss, rel=1e-5)


def test_host_that_comes_back_is_taken_in_at_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_hosts, "RETURN_POLL_S", 0.2)
    monkeypatch.setattr(lost_hosts, "RESTART_S", 0.0)
    far = FarHost(tmp_path / "far")
    # Slow enough for its return to pay, and not for its loss to be waited for.
    slow = replace(CPU, learned=LearnedPace(pace=1.5))
    near = Host(name="here", devices=(slow,), enter=(), address="127.0.0.1")
    cluster = Cluster(sites=(Site(name="both", hosts=(near, far.host)),))
    train = replace(ENDLESS, steps=2_000)
    plan = tiny.plan(train, micro_rows=4)
    plan = replace(plan, devices=(replace(plan.devices[0], host="far"),))
    run = made_on(tmp_path / "run", plan, cluster)
    whole = load_cluster_json(run.cluster)
    places = list[str]()
    lost_at = list[int]()
    found_at = list[int]()
    ended_at = list[int]()

    def at_step(watched: Watched, step: int) -> None:
        place = watched.run.load_plan().devices[0].host
        if place not in places[-1:]:
            places.append(place)
        saved = [event for event in watched.events if isinstance(event, Saved)]
        if places == ["far"] and watched.run.newest_checkpoint() > 0 and not lost_at:
            lost_at.append(step)
            far.lose()
            watched.signal(0, signal.SIGKILL)
        elif places == ["far", "here"] and saved[-1].step > lost_at[0] and not found_at:
            found_at.append(step)
            far.find()
        elif places == ["far", "here", "far"] and not ended_at:
            ended_at.append(step)
            watched.supervisor.request_stop()

    watched = Watched(run, at_step)
    ending = watched.train()
    assert isinstance(ending, Finished) and ending.reason == "interrupted", ending
    assert places == ["far", "here", "far"]
    # The move itself loses no step.
    back = [event for event in watched.events if isinstance(event, Started)][-1]
    before = watched.events[: watched.events.index(back)]
    (stopped,) = [event for event in before if isinstance(event, Finished)]
    assert back.step == stopped.step
    assert load_cluster_json(run.cluster) == whole and not run.whole_cluster.exists()
    # The other plan adds in another order, whose rounding grows with the steps.
    (again,) = [event for event in watched.events if isinstance(event, Recovered)]
    last = again.step + MORE
    expected = undisturbed(tmp_path / "undisturbed", last, tiny.plan(train, micro_rows=4))
    for step in range(again.step + 1, last + 1):
        assert watched.losses[step] == pytest.approx(expected[step], rel=1e-5)


def test_worker_whose_cloud_gives_notice_saves_that_step_and_leaves(tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    host = Host(
        name="far",
        devices=(CPU,),
        address="127.0.0.1",
        enter=("env",),
        python=sys.executable,
        notice=f"[ -e {notice} ] && rm {notice}",
    )
    plan = tiny.plan(ENDLESS, micro_rows=4)
    plan = replace(plan, devices=(replace(plan.devices[0], host="far"),))
    run = made_on(tmp_path / "run", plan, Cluster(sites=(Site(name="far", hosts=(host,)),)))

    def at_step(watched: Watched, step: int) -> None:
        if step == 3:
            notice.touch()

    watched = Watched(run, at_step, lambda watched: watched.supervisor.request_stop())
    watched.train()
    (fault,) = watched.faulted
    assert fault.problem.code == "preempted" and fault.problem.ranks == (0,)
    assert run.newest_checkpoint() == fault.step
