"""Devices: cores, speed shares and memory caps, against the kernel's own accounts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from farspan_lab import devices, state
from farspan_lab.lab import Device
from tests.lab.conftest import OWN, Start, parsed

pytestmark = pytest.mark.slow

needs_groups = pytest.mark.skipif(
    sys.platform != "linux" or not devices.parents(),
    reason="waits for control groups that can be written",
)
#: Computes for so many seconds; prints its processor time over the time that passed.
BUSY = """
import sys, time
began, used = time.perf_counter(), time.process_time()
while time.perf_counter() - began < float(sys.argv[1]):
    pass
print((time.process_time() - used) / (time.perf_counter() - began))
"""
FOUR = "sites: {a: {devices: 2}, b: {devices: [{cores: 2}, {speed: 50%}]}}"


def throttled(device: Device) -> float:
    """The share of its periods in which a device had used up its time."""
    stat = next(path for group in device.cgroups if (path := Path(group, "cpu.stat")).exists())
    figures = dict(line.split() for line in stat.read_text().splitlines())
    return int(figures["nr_throttled"]) / max(1, int(figures["nr_periods"]))


@needs_groups
@pytest.mark.parametrize("share", [0.05, 0.161, 0.3])
def test_a_device_gets_its_share_of_a_core(start: Start, share: float):
    lab = start(f"name: {OWN}-shares\nsites: {{utah: {{devices: [{{speed: {share:.1%}}}]}}}}")
    command = [*state.enter(lab, "utah", 0), sys.executable, "-c", BUSY, "2"]
    most = 0.0
    for _ in range(4):  # Who else wants the core only takes away.
        got = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        assert got < 1.05 * share
        if (most := max(most, got)) > 0.95 * share:
            break
    if most < 0.95 * share and throttled(lab.lab.sites[0].devices[0]) < 0.9:
        pytest.skip("waits for a core that is free: other processes took the device's time")
    assert most > 0.95 * share


@needs_groups
def test_a_worker_starts_at_full_speed_and_is_held_to_its_share_when_it_has_started(start: Start):
    lab = start(f"name: {OWN}-starts\nsites: {{utah: {{devices: [{{speed: 10%}}]}}}}")
    (file, held, free), *_ = devices.quotas(lab.lab.sites[0].devices[0])
    words = [*state.enter(lab, "utah", 0), sys.executable, "-c"]
    see = f"print(open({str(file)!r}).read().strip())"

    def said(code: str, **environment: str) -> list[str]:
        done = subprocess.run(
            [*words, code, "1"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, **environment},
        )
        return done.stdout.splitlines()

    started = said(
        f"{see}\nfrom farspan.runtime.device import apply_lab_limits; apply_lab_limits()\n"
        f"{see}\n{BUSY}",
        FARSPAN_STARTING="1",
    )
    assert started[:2] == [free, held] and float(started[2]) < 0.12
    # One that ended before it was held leaves nothing to what comes next.
    assert said(see, FARSPAN_STARTING="1") == [free]
    assert said(see) == [held]


@pytest.mark.parametrize(
    ("speed", "cores", "turn_ms"),
    # 5 ms with a quarter of them, 10 ms with 1 ms of them (the kernel's least), and both cores' 2.5
    # of 5 ms at once.
    [
        (None, 1, 0.0),
        (1.0, 1, 0.0),
        (0.25, 1, 3.75**2 / 5 / 2),
        (0.1, 1, 9**2 / 10 / 2),
        (0.5, 2, 2.5**2 / 5 / 2),
    ],
)
def test_a_message_waits_for_half_of_the_rest_of_a_period_that_is_used_up(speed, cores, turn_ms):
    found = devices.turn_s(Device(speed=speed, cores=cores, memory=None))
    assert found == pytest.approx(turn_ms / 1e3)


@needs_groups
def test_a_device_that_takes_more_memory_than_it_has_is_killed_alone(start: Start):
    lab = start(
        f"name: {OWN}-memory\nsites: {{utah: {{devices: [{{memory: 100MB}}, {{memory: 400MB}}]}}}}"
    )
    greedy = [sys.executable, "-c", "print(len(bytearray(200_000_000)))"]
    killed, fine = (
        subprocess.run([*state.enter(lab, "utah", index), *greedy], capture_output=True, text=True)
        for index in (0, 1)
    )
    assert killed.returncode == -signal.SIGKILL
    assert (fine.returncode, fine.stdout) == (0, "200000000\n")


def test_a_process_runs_on_the_cores_of_its_device_in_the_folder_it_came_from(
    start: Start, tmp_path: Path
):
    lab = start(f"name: {OWN}-cores\nsites: {{utah: {{devices: 2}}, star: {{}}}}")
    found = "[list(os.sched_getaffinity(0)), os.getcwd(), os.getpid(), dict(os.environ)]"
    for site in lab.lab.sites:
        for index, device in enumerate(site.devices):
            code = f"import json, os; print(json.dumps({found}))"
            process = subprocess.Popen(
                [*state.enter(lab, site.name, index), sys.executable, "-c", code],
                stdout=subprocess.PIPE,
                cwd=tmp_path,
                env={**os.environ, "GIVEN": "a b"},
            )
            cores, folder, pid, environment = json.loads(process.communicate()[0])
            assert (tuple(cores), folder, pid) == (device.cpus, str(tmp_path), process.pid)
            assert (environment["GIVEN"], environment["GLOO_SOCKET_IFNAME"]) == ("a b", "wan0")


@pytest.mark.parametrize(
    ("cpus", "expected"),
    [
        (range(6), [(0,), (1,), (2, 3), (4,)]),
        ([3, 7], [(3,), (3,), (7,), (7,)]),
        (range(4), [(0, 1), (0, 1), (2, 3), (2, 3)]),
        ([5], [(5,), (5,), (5,), (5,)]),
    ],
    ids=["each its own", "each site its own", "two cores a site", "one for all"],
)
def test_cores_are_kept_apart_as_far_as_they_go(cpus, expected):
    placed = devices.placed(parsed(FOUR), list(cpus), [Path("/groups")])
    assert [device.cpus for site in placed.sites for device in site.devices] == expected


def test_lab_notes_report_limits_that_the_machine_cannot_enforce():
    enough = devices.placed(parsed(FOUR), list(range(6)), [Path("/groups")])
    short = devices.placed(parsed(FOUR), [3, 7], [Path("/groups")])
    without = devices.placed(parsed(FOUR), list(range(6)), [])
    unreachable = enough.notes[0]
    assert "a and b" in unreachable
    assert enough.notes == (unreachable,)
    assert [note for note in short.notes if "cores [3] ask for 200%" in note]
    assert [note for note in short.notes if "cores [7] ask for 250%" in note]
    assert [note for note in short.notes if "relay" in note]
    assert "not in force" in without.notes[-1]
    assert {(device.speed, device.memory) for site in without.sites for device in site.devices} == {
        (None, None)
    }
