"""A killed worker is out of memory only where its control group says so, or after a second
kill at the same place. Another program that the kernel kills ends no run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from farspan.domain.cluster_json import load_cluster_json, save_cluster_json
from farspan.domain.memory_kills import (
    WorkerCgroup,
    cgroup_members,
    cgroup_oom_kills,
    machine_oom_kills,
    own_cgroup,
)
from farspan.domain.problems import Problem
from farspan.domain.run_events import Finished
from farspan.launch.kill_cause import kill_cause
from farspan_lab.devices import parents
from tests import tiny
from tests.app.supervised import Watched, made
from tests.launch.test_launchers import TRAIN

GIB = 2**30
#: Of memory, and of memory and swap: the files of versions 2 and 1.
LIMITS = (
    (("memory.max", 2**26), ("memory.swap.max", 0)),
    (("memory.limit_in_bytes", 2**26), ("memory.memsw.limit_in_bytes", 2**26)),
)


def recorded(folder: Path, kills: int, members: tuple[int, ...] = (), name: str = "") -> Path:
    """A control group of version 2 as its files show it."""
    folder.mkdir(parents=True, exist_ok=True)
    events = f"low 0\nhigh 0\nmax 9\noom 1\noom_kill {kills}\noom_group_kill 0\n"
    (folder / (name or "memory.events.local")).write_text(events)
    (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in members))
    return folder


@pytest.fixture
def child() -> Iterator[int]:
    """A process that this one has started."""
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("machine", "kills", "others", "held", "expected"),
    [
        # Nothing on the machine was killed for memory, whatever the group's files say.
        ((7, 7), 3, (), GIB, "other"),
        # Another program was, outside the worker's group.
        ((7, 8), 2, (), GIB, "other"),
        # In the worker's group, which no other program is in.
        ((7, 8), 3, (), 0, "memory"),
        # In a group that it shares with a login's shell; the worker was not the largest there.
        ((7, 8), 3, (1,), GIB // 4, "open"),
        ((7, 8), 3, (0,), 0, "open"),
        # As before, and it was the largest.
        ((7, 8), 3, (1,), GIB // 2 + 1, "memory"),
        # A machine that does not count.
        ((None, None), 2, (), 0, "other"),
        ((None, None), 3, (1,), 0, "open"),
    ],
)
def test_kill_is_for_memory_only_where_the_workers_own_group_says_so(
    tmp_path, child, machine, kills, others, held, expected
):
    folder = recorded(tmp_path / "group", kills, (os.getpid(), child, *others))
    group = WorkerCgroup(folder=str(folder), kills=2, limit=GIB)
    assert kill_cause(*machine, group, held) == expected


def test_kill_is_open_where_the_group_is_not_known_or_has_gone(tmp_path):
    assert kill_cause(7, 8, None, GIB) == "open"
    assert kill_cause(None, None, None, 0) == "open"
    gone = WorkerCgroup(folder=str(tmp_path / "gone"), kills=2, limit=GIB)
    assert kill_cause(7, 8, gone, GIB) == "open"


@pytest.mark.parametrize("name", ["memory.events.local", "memory.events"])
def test_worker_reads_its_own_group_of_version_2(tmp_path, name):
    proc = tmp_path / "proc"
    root = tmp_path / "cgroup"
    proc.mkdir()
    (proc / "cgroup").write_text("0::/user.slice/session-1.scope\n")
    folder = recorded(root / "user.slice" / "session-1.scope", 5, (12, 0), name)
    group = own_cgroup(proc, root)
    assert group is not None and (group.folder, group.kills) == (str(folder), 5)
    assert 0 < group.limit and cgroup_members(folder) == [12, 0] and cgroup_oom_kills(folder) == 5


@pytest.mark.parametrize(
    "lines", ["9:memory:/login\n0::/\n", "4:memory:/\n1:cpu:/\n", "0::/../..\n", ""]
)
def test_group_of_version_1_or_outside_this_namespace_is_not_known(tmp_path, lines):
    (tmp_path / "cgroup").write_text(lines)
    (tmp_path / "root" / "memory" / "login").mkdir(parents=True)
    assert own_cgroup(tmp_path, tmp_path / "root") is None


# -- real kills
#   ------------------------------------------------------------------------------------------------


@pytest.fixture
def little() -> Iterator[Path]:
    """A control group of so little memory that the kernel kills what starts Python with torch."""
    for parent in parents():
        group = parent / f"farspan-test-{os.getpid()}"
        group.mkdir()
        for version in LIMITS:
            if not (group / version[0][0]).exists():
                continue
            for name, value in version:
                if (group / name).exists():
                    (group / name).write_text(str(value))
            yield group
            group.rmdir()
            return
        group.rmdir()
    pytest.skip("no control groups may be made here")


def inside(group: Path) -> tuple[str, ...]:
    """The words before a command that put it into a group."""
    return ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")


def kill_a_hog(group: Path) -> None:
    """Another program takes more memory than its group has."""
    before = machine_oom_kills()
    hog = [*inside(group), sys.executable, "-c", "bytearray(2**28)"]
    assert subprocess.run(hog).returncode == -signal.SIGKILL
    assert before is not None and machine_oom_kills() != before


@pytest.mark.slow
def test_run_recovers_from_a_kill_after_another_program_ran_out_of_memory(tmp_path, little):
    train = replace(TRAIN, steps=60, validate_every=60)

    def kill_both(watched: Watched, step: int) -> None:
        if step == 20 and not watched.faulted:
            kill_a_hog(little)
            watched.signal(0, signal.SIGKILL)

    watched = Watched(made(tmp_path / "run", tiny.plan(train)), kill_both)
    ending = watched.train()
    assert isinstance(ending, Finished) and ending.reason == "done", ending
    (fault,) = watched.faulted
    assert (fault.problem.code, fault.problem.signal) == ("worker-lost", "SIGKILL")


@pytest.mark.slow
def test_second_kill_at_the_same_place_that_may_be_for_memory_ends_the_run(tmp_path, little):
    run = made(tmp_path / "run", tiny.plan(TRAIN))
    cluster = load_cluster_json(run.cluster)
    save_cluster_json(
        cluster.with_hosts(lambda host: replace(host, enter=inside(little), python=sys.executable)),
        run.cluster,
    )
    watched = Watched(run)
    problem = watched.train()
    assert isinstance(problem, Problem) and problem.code == "out-of-memory", problem
    assert "came 2 times at step 0" in problem.fact and "recompute" in problem.remedy
    (fault,) = watched.faulted
    assert (fault.problem.code, fault.problem.suspected) == ("worker-lost", "memory")
