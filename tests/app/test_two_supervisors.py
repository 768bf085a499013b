"""A run folder that was copied to another machine: of two supervisors one trains, whatever of the
cluster each reaches. The hosts are real processes with disks of their own; a gate closes the way of
one supervisor to one host."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from farspan import models
from farspan.domain.cluster import Cluster, Device, Host, Link, Site
from farspan.domain.cluster_json import save_cluster_json
from farspan.domain.engine import load_engine
from farspan.domain.plan import Plan
from farspan.domain.problems import Problem
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.run_events import Finished
from farspan.domain.struct_files import load, save
from farspan.estimate.estimate_plan import estimate
from farspan.launch import host_claims
from farspan.launch.host_claims import describe_holder
from tests import tiny
from tests.app.supervised import Watched, made
from tests.launch.test_launchers import TRAIN
from tests.waiting import LIMIT_S, wait_for

CPU = Device(kind="cpu-avx2", backend="cpu", memory=2**30)
STEPS = 60
TWO = tiny.plan(replace(TRAIN, steps=STEPS, checkpoint_every_s=0.2), rows=(4, 4))
#: Longer than any test waits, and steps that the machine with the copy makes.
ENDLESS = replace(TWO.train, steps=100_000, validate_every=100_000)
MORE = 20
ENDLESS_TWO = replace(TWO, train=ENDLESS)
#: Trains a run folder as `farspan train --until-done` does; its last word is the refusal's code.
TRAINING = """
import sys
from pathlib import Path
from farspan.app.supervisor import Supervisor
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder

def show(update):
    print(type(update).__name__, flush=True)

try:
    Supervisor(RunFolder(Path(sys.argv[1])), show, show, until_done=True).train_run()
except Refusal as refusal:
    print(refusal.problem.code)
"""


class Side:
    """A machine with a run folder of its own, which reaches hosts through its own gates."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = RunFolder(folder / "run")

    def gate(self, host: str) -> Path:
        """Where this file is, the host cannot be entered from here."""
        return self.folder / f"no-way-to-{host}"

    def cluster(self, disks: Path) -> Cluster:
        sites = []
        for name in ("a", "b"):
            enter = ("sh", "-c", f'[ -e {self.gate(name)} ] && exit 255; exec "$@"', "sh")
            host = Host(
                name=name,
                devices=(CPU, CPU),
                address="127.0.0.1",
                enter=enter,
                python=sys.executable,
                folder=str(disks / name),
            )
            sites.append(Site(name=f"site-{name}", hosts=(host,)))
        link = Link(a="site-a", b="site-b", rtt_s=0.01, bandwidth=1e8)
        return Cluster(sites=tuple(sites), links=(link,))


@pytest.fixture
def home(tmp_path: Path) -> Side:
    return make_home(tmp_path, TWO)


def make_home(tmp_path: Path, plan: Plan) -> Side:
    """A run of two workers on host a; host b is there for when it is gone."""
    side = Side(tmp_path / "home")
    devices = tuple(replace(device, host="a", index=i) for i, device in enumerate(plan.devices))
    plan = replace(plan, devices=devices)
    made(side.run.path, plan)
    record = load(side.run.record, RunRecord)
    record = replace(record, id="f00d", home=describe_holder(side.run.path))
    save(record, side.run.record)
    cluster = side.cluster(tmp_path)
    save_cluster_json(cluster, side.run.cluster)
    graph = models.graph(plan.model)
    save(estimate(plan, graph, cluster, load_engine("farspan")), side.run.estimate)
    return side


def copied(home: Side, path: Path) -> Side:
    """Another machine with a copy of the run folder."""
    side = Side(path)
    shutil.copytree(home.run.path, side.run.path)
    save_cluster_json(side.cluster(path.parent), side.run.cluster)
    return side


def train_elsewhere(side: Side, log: Path) -> subprocess.Popen[bytes]:
    """Start a supervisor as a process of its own, which writes the kinds of its updates to a
    log."""
    words = [sys.executable, "-c", TRAINING, str(side.run.path)]
    with open(log, "wb") as file:
        return subprocess.Popen(words, stdout=file, start_new_session=True)


def updates(log: Path) -> list[str]:
    return log.read_text().split()


def undisturbed(path: Path, last: int, plan: Plan = ENDLESS_TWO) -> dict[int, float]:
    """The losses of a run that nothing disturbs, until a step."""

    def stop(watched: Watched, step: int) -> None:
        if step == last:
            watched.supervisor.request_stop()

    watched = Watched(made(path / "run", plan), stop)
    watched.train()
    return {step: loss for step, loss in watched.losses.items() if step <= last}


def test_of_two_halves_of_a_cut_cluster_that_where_the_run_was_made_goes_on(
    home: Side, tmp_path: Path
) -> None:
    other = copied(home, tmp_path / "other")
    home.gate("b").touch()
    other.gate("a").touch()
    waiting = train_elsewhere(other, tmp_path / "waiting.log")
    try:
        ending = Watched(home.run, until_done=True).train()
        assert isinstance(ending, Finished) and ending.step == STEPS, ending
        wait_for(lambda: updates(tmp_path / "waiting.log"), "the other half waits", waiting)
        other.gate("a").unlink()
        waiting.wait(LIMIT_S)
    finally:
        waiting.kill()
        waiting.wait()
    assert set(updates(tmp_path / "waiting.log")) == {"Waiting", "superseded"}


def test_half_that_is_asked_to_goes_on_without_the_other_site(home: Side, tmp_path: Path) -> None:
    other = copied(home, tmp_path / "other")
    other.gate("a").touch()
    watched = Watched(other.run, until_done=True, without=("site-a",))
    ending = watched.train()
    assert isinstance(ending, Finished) and ending.step == STEPS, ending
    # Where the run was made it is known, as soon as a host is reached, that another has it.
    problem = Watched(home.run, until_done=True).train()
    assert isinstance(problem, Problem) and problem.code == "superseded", problem


@pytest.mark.slow
def test_machine_with_a_copy_goes_on_where_the_supervisor_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_home(tmp_path, ENDLESS_TWO)
    monkeypatch.setattr(host_claims, "LEASE_S", 3.0)
    supervisor = train_elsewhere(home, tmp_path / "killed.log")
    try:
        wait_for(lambda: home.run.newest_checkpoint() > 0, "the first checkpoint", supervisor)
    finally:
        supervisor.kill()
        supervisor.wait()
    other = copied(home, tmp_path / "other")
    other.run.epochs.unlink()
    resumed_at = other.run.newest_checkpoint()

    def stop(watched: Watched, step: int) -> None:
        if step == resumed_at + MORE:
            watched.supervisor.request_stop()

    watched = Watched(other.run, stop, until_done=True)
    ending = watched.train()
    assert isinstance(ending, Finished) and ending.step >= resumed_at + MORE, ending
    expected = undisturbed(tmp_path / "undisturbed", resumed_at + MORE)
    for step in range(resumed_at + 1, resumed_at + MORE + 1):
        assert watched.losses[step] == expected[step]
    problem = Watched(home.run, until_done=True).train()
    assert isinstance(problem, Problem) and problem.code == "superseded", problem
