"""What the network between hosts is taken to be where nothing says it: by their shape alone."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.domain import catalog
from farspan.domain.assumed_networks import UNKNOWN_LINK, UNKNOWN_SITE, load_machines
from farspan.domain.cluster import SITE_BANDWIDTH, SITE_RTT_S, Cluster, Device, Host, Link, Site
from farspan.domain.units import parse_rate

KINDS = catalog.load_devices()


def device(kind: str) -> Device:
    made = KINDS[kind].device(kind, 2**34)
    assert made is not None
    return made


def site(*hosts: tuple[str, ...], **figures: float) -> Cluster:
    """A site of hosts that have devices of these kinds."""
    made = tuple(
        Host(name=f"h{i}", devices=tuple(map(device, kinds))) for i, kinds in enumerate(hosts)
    )
    return Cluster(sites=(Site(name="s", hosts=made, **figures),))


def rate(cluster: Cluster, a: str = "h0", b: str = "h1") -> float | None:
    link = cluster.link(a, b)
    assert link is not None
    return link.bandwidth


def test_every_known_machine_has_its_source_and_kinds_that_nvlink_joins():
    kinds: list[str] = []
    for name, machine in load_machines().items():
        assert machine.source and machine.checked.startswith("202"), name
        assert machine.devices == 8, name
        assert SITE_BANDWIDTH < parse_rate(machine.least) < parse_rate(machine.network), name
        for kind in machine.kinds:
            joined = device(kind).sheet.interconnect
            assert joined is not None and joined.kind == "nvlink", kind
        kinds += machine.kinds
    assert len(set(kinds)) == len(kinds), "one shape, two machines"


@pytest.mark.parametrize(
    ("kind", "gbit", "machine"),
    [
        ("v100-32", 400, "DGX-1"),
        ("a100-40", 1600, "DGX A100"),
        ("a100-80", 1600, "DGX A100"),
        ("h100", 3200, "DGX H100"),
        ("b200", 3200, "DGX B200"),
    ],
)
def test_hosts_of_a_known_machines_shape_have_its_network(kind, gbit, machine):
    cluster = site((kind,) * 8, (kind,) * 8)
    assert rate(cluster) == gbit * 1e9 / 8
    link = cluster.link("h0", "h1")
    assert link is not None and link.origin == "derived"
    assert link.rtt_s == pytest.approx(20e-6)
    assumed = cluster.assumed_network("h0", "h1")
    assert assumed is not None and (assumed.rate, assumed.machine) == (gbit * 1e9 / 8, machine)


@given(st.sampled_from(sorted(KINDS)), st.integers(1, 16), st.integers(1, 16))
def test_hosts_of_any_other_shape_have_10_gbit_s(kind, first, second):
    joined = device(kind).sheet.interconnect
    nvlink = joined is not None and joined.kind == "nvlink"
    known = {kind for machine in load_machines().values() for kind in machine.kinds}
    cluster = site((kind,) * first, (kind,) * second)
    if nvlink and kind in known and first == second == 8:
        assert rate(cluster) != SITE_BANDWIDTH
    else:
        assert rate(cluster) == SITE_BANDWIDTH == 10e9 / 8
        assert cluster.assumed_network("h0", "h1") == UNKNOWN_SITE


def test_the_slower_of_two_known_machines_decides_and_one_that_is_unknown_makes_both_so():
    cluster = site(("a100-80",) * 8, ("h100",) * 8, ("a30",) * 8, ("h100",) * 7 + ("h200",))
    assert rate(cluster, "h0", "h1") == rate(cluster, "h1", "h0") == 1600e9 / 8
    for a, b in itertools.combinations(["h0", "h1", "h2", "h3"], 2):
        if {a, b} != {"h0", "h1"}:
            assert rate(cluster, a, b) == SITE_BANDWIDTH


def test_cards_local_networks_and_links_that_are_given_go_before_a_known_machine():
    eight = ("a100-80",) * 8
    lan = site(eight, eight, lan_bandwidth=3e9)
    assert rate(lan) == 3e9 and lan.assumed_network("h0", "h1") is None
    cards = site(eight, eight).with_hosts(lambda host: msgspec.structs.replace(host, nic=5e9))
    assert rate(cards) == 5e9 and cards.assumed_network("h0", "h1") is None
    assert [cards.link("h0", "h1").rtt_s, lan.link("h0", "h1").rtt_s] == [SITE_RTT_S] * 2
    own = Link(a="h0", b="h1", rtt_s=1e-3, bandwidth=7e9)
    linked = msgspec.structs.replace(site(eight, eight), links=(own,))
    assert rate(linked) == 7e9 and linked.assumed_network("h0", "h1") is None
    # A card of one of them is no more than the other's machine carries.
    one = site(eight, eight).with_hosts(
        lambda host: msgspec.structs.replace(host, nic=5e9 if host.name == "h0" else None)
    )
    assert rate(one) == 5e9 and one.assumed_network("h0", "h1") is None
    # NVLink that the file takes away is none.
    bridge = device("a100-80").but(interconnect=device("a30").sheet.interconnect)
    bridged = site(eight, eight).with_devices(lambda host, place: bridge)
    assert rate(bridged) == SITE_BANDWIDTH


def test_a_line_between_sites_is_assumed_too_and_never_where_there_is_none():
    a, b = (
        Site(name=name, hosts=(Host(name=f"{name}0", devices=(device("a30"),)),)) for name in "AB"
    )
    line = Link(a="A", b="B", rtt_s=0.02)
    assert Cluster(sites=(a, b)).assumed_network("A0", "B0") is None
    assert Cluster(sites=(a, b), links=(line,)).assumed_network("A0", "B0") == UNKNOWN_LINK
    given = msgspec.structs.replace(line, bandwidth=1e8)
    assert Cluster(sites=(a, b), links=(given,)).assumed_network("A0", "B0") is None
