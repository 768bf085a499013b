"""Loss as `farspan probe` counts it: also where datagrams are filtered or doubled, in a file that
farspan reads."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from farspan.domain.cluster import Cluster, Device, Host, Link, Site
from farspan.domain.clusterfile import MAX_LOSS, load_cluster, save_cluster
from farspan.launch import cluster_measurement, link_measurement
from farspan.launch.hosts import Agent

CPU = Device(kind="cpu-avx2", backend="cpu", memory=10**9)


@pytest.mark.parametrize(
    ("arrived", "loss"),
    [
        (0, None),
        (1, MAX_LOSS),
        (link_measurement.DATAGRAMS // 2, 0.5),
        (link_measurement.DATAGRAMS, 0.0),
        (2 * link_measurement.DATAGRAMS, 0.0),
    ],
)
def test_loss_by_hand(arrived, loss):
    assert link_measurement.loss_share(arrived) == loss


def test_packet_loss_is_unknown_where_no_datagrams_arrive(monkeypatch):
    monkeypatch.setattr(link_measurement, "DATAGRAMS", 20)
    here, there = (
        Host(name=name, devices=(), enter=(), address="127.0.0.1") for name in ("here", "there")
    )
    with Agent(here) as a, Agent(there) as b:
        counted = link_measurement._measure_loss(a, b)
        assert counted is not None and 0 <= counted < 1
        b.target = a.target  # Another process answers there, and counts.
        assert link_measurement._measure_loss(a, b) is None


@pytest.mark.parametrize(
    ("said", "kept"), [((), None), ((Link(a="utah", b="star", rtt_s=0.05, loss=0.001),), 0.001)]
)
def test_loss_that_could_not_be_counted_stays_what_it_was(tmp_path, said, kept):
    sites = tuple(
        Site(name=name, hosts=(Host(name=f"{name}1", devices=(CPU,)),)) for name in ("utah", "star")
    )
    cluster = Cluster(sites=sites, links=said)
    found = Link(
        a="utah1", b="star1", rtt_s=0.057, loss=link_measurement.loss_share(0), origin="measured"
    )
    link = cluster_measurement.name_link_ends(found, ("star", "utah"), cluster)
    assert link == replace(found, a="star", b="utah", loss=kept)
    for loss in (link.loss, link_measurement.loss_share(1)):
        path = tmp_path / "measured.yaml"
        asked = replace(link, loss=loss)
        save_cluster(replace(cluster, links=(asked,)), path, "Measured.")
        assert load_cluster(path).links == (asked,)
