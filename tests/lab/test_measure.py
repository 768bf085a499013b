"""What `farspan probe` finds in a lab is what the lab was asked to be, survives a file, and prices
a plan."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from farspan import models
from farspan.domain.cluster import Cluster, Host
from farspan.domain.clusterfile import load_cluster, save_cluster
from farspan.domain.engine import load_engine
from farspan.domain.train import TrainSpec
from farspan.launch import cluster_measurement as measuring
from farspan.techniques import Task
from farspan_lab import devices
from farspan_lab.cluster import cpus, of_lab
from tests.lab.conftest import OWN, parsed

pytestmark = pytest.mark.slow

MODEL = models.family("gpt2").shape(d_model=64, layers=2, heads=2, vocab_size=256, context=32)


def in_fp32(cluster: Cluster) -> Cluster:
    """The same cluster, of devices that compute in fp32 alone."""

    def of(host: Host) -> Host:
        devices = tuple(device.but(dtypes=("fp32",)) for device in host.devices)
        return msgspec.structs.replace(host, devices=devices)

    sites = tuple(
        msgspec.structs.replace(site, hosts=tuple(map(of, site.hosts))) for site in cluster.sites
    )
    return msgspec.structs.replace(cluster, sites=sites)


def test_measured_cluster_of_a_lab_matches_its_spec_and_unit_times_enter_plans(
    start, tmp_path, monkeypatch
):
    for name, few in {
        "STREAMS": (1, 4),
        "SEQUENCES": (1, 4),
        "ALLREDUCE_BYTES": (8, 1_000_000),
    }.items():
        monkeypatch.setattr(measuring, name, few)
    made = start(
        f"name: {OWN}-measured\nsites: {{utah: {{devices: 2}}, star: {{}}}}\n"
        "links: [{between: [utah, star], rtt: 20ms, bandwidth: 200Mbit/s}]\n"
    )
    asked = in_fp32(of_lab(made))
    found = measuring.measure_cluster(asked, MODEL, lambda text: None).cluster
    assert set(found.allreduce_s) == {8, 1_000_000}
    (link,) = found.links
    assert (link.rtt_s, link.bandwidth) == (
        pytest.approx(0.02, rel=0.25),
        pytest.approx(25e6, rel=0.25),
    )
    two, one = found.hosts
    assert two.local_rate is not None and two.local_rate > 0 and one.local_rate is None
    # Every unit over every number of sequences: alone, and while the neighbour did the same.
    graph = models.graph(MODEL)
    kinds = ("embedding", "block", "head")
    ways = {(unit, rows) for unit in kinds for rows in measuring.SEQUENCES}
    for device, counts in (
        (two.devices[0], (1, 2)),
        (two.devices[1], (1, 2)),
        (one.devices[0], (1,)),
    ):
        for together in counts:
            times = [time for time in device.times.units if time.together == together]
            assert {(time.unit, time.rows) for time in times} == ways and len(times) == len(ways)
        assert all(
            time.model == graph.units_hash and time.seq_len == MODEL.context
            for time in device.times.units
        )
        assert all(time.forward_s > 0 and time.backward_s > 0 for time in device.times.units)

    save_cluster(found, tmp_path / "measured.yaml", "Measured.")
    read = load_cluster(tmp_path / "measured.yaml")
    assert [host.local_rate for host in read.hosts] == [host.local_rate for host in found.hosts]
    assert [device.times.units for device in read.devices] == [
        device.times.units for device in found.devices
    ]

    # What two neighbours took together is what a plan for both counts on.
    train = TrainSpec(steps=1, batch=8, seq_len=MODEL.context, precision="fp32")
    costs = Task(MODEL, graph, found.first(2), train, load_engine("farspan"), "c").costs
    (timed,) = [
        t for t in two.devices[0].times.units if (t.unit, t.rows, t.together) == ("block", 4, 2)
    ]
    assert costs.unit_s(0, graph.block, 4, {}, 1) == pytest.approx(
        (timed.forward_s, timed.backward_s)
    )


def test_workers_have_the_cores_that_they_share_as_they_share_them():
    lab = parsed(
        "name: x\nsites: {utah: {devices: 4}, star: {devices: [{speed: 50%}, {speed: 50%}]}}\n"
        "links: [{between: [utah, star], rtt: 20ms}]\n"
    )
    utah, star = devices.placed(lab, [0, 1], [Path("/groups")]).sites
    both = msgspec.structs.replace(lab, sites=(utah, star))
    # Four threads on one core; and two that get half of another one each, as they were measured.
    assert cpus(both, utah) == 1
    assert cpus(both, star) == 2
    # All on one core: four and two halves are five times as much as there is.
    crowd = devices.placed(lab, [0], [Path("/groups")])
    assert [cpus(crowd, site) for site in crowd.sites] == [1, 1]
