"""Labs and hosts for tests of what works on several hosts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farspan.domain.cluster import Cluster, Device, Host
from farspan.domain.clusterfile import REMOTE_FOLDER
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import convert, parse_yaml
from farspan_lab import spec, state
from farspan_lab.cluster import of_lab
from farspan_lab.lab import Status
from tests.waiting import LIMIT_S


def up(text: str) -> Status:
    """The lab of a YAML text; skips where this system allows none."""
    try:
        state._unshare()
    except Refusal as refusal:
        pytest.skip(f"waits for a system that allows labs: {refusal.problem.fact}")
    return state.up(
        spec.read(convert(parse_yaml(text, "lab.yaml"), spec.LabFile, "lab.yaml", text), "lab.yaml")
    )


@pytest.fixture
def far(tmp_path: Path) -> Host:
    """A host with a home of its own, and its runs and its cache in the default folder there."""
    (tmp_path / "home").mkdir()
    return Host(
        name="far",
        devices=(Device(kind="cpu-avx2", backend="cpu", memory=2**30),),
        address="127.0.0.1",
        enter=("env", f"HOME={tmp_path}/home"),
        python=sys.executable,
        folder=REMOTE_FOLDER,
    )


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine is too busy for a host to answer in time."""
    monkeypatch.setattr("farspan.launch.hosts.HOST_START_S", LIMIT_S)
    monkeypatch.setattr("farspan.launch.run_folder_transfer.RUN_ANSWER_S", LIMIT_S)
    monkeypatch.setattr("farspan.launch.link_measurement.REACH_S", LIMIT_S)


@pytest.fixture
def impatient(_patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that do not come about are waited for through two SYNs, not three."""
    monkeypatch.setattr("farspan.launch.link_measurement.REACH_S", 3.0)


@pytest.fixture
def lab() -> Iterator[Status]:
    """Two sites of one device, 20 ms and 1 Gbit/s between them."""
    name = f"launch-{os.getpid()}"
    links = "links: [{between: [utah, star], rtt: 20ms, bandwidth: 1Gbit/s}]"
    made = up(f"name: {name}\nsites: {{utah: {{devices: 1}}, star: {{devices: 1}}}}\n{links}\n")
    yield made
    state.down(name)


@pytest.fixture
def cluster(lab: Status) -> Cluster:
    return of_lab(lab)
