"""Wires and collectives by hand, and rings against a simulation of every part on every hop."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan import models
from farspan.domain import catalog
from farspan.domain.cluster import (
    LINK_BANDWIDTH,
    SITE_BANDWIDTH,
    SITE_RTT_S,
    Cluster,
    Host,
    Interconnect,
    Link,
    Site,
)
from farspan.domain.plan import Plan
from farspan.estimate.estimate_plan import estimate
from farspan.estimate.network import LOCAL_DELAY_S, SEGMENT, UNKNOWN_LINK_BANDWIDTH, Network, NoLink
from farspan.semantics.communications import WireFlow
from tests.estimate.parts import (
    ENGINES,
    TIED,
    cluster,
    costs,
    device,
    mesh,
    named,
    pipeline,
    plain,
    plan,
    planned,
    plans,
    stage,
)


def network(there: Cluster, **changes) -> Network:
    return Network(there, planned(there), plain(**changes))


def two(link: dict, **changes) -> Network:
    """One device in each of two sites."""
    made = Link(**{"a": "A", "b": "B", "rtt_s": 0.099, "bandwidth": 1e9} | link)
    return network(cluster([[device()]], [[device()]], links=(made,)), **changes)


def wire(link: dict, *, collective: bool = False, streams: int = 1, **changes):
    return two(link, **changes).wire(0, 1, collective=collective, streams=streams)


def test_the_least_of_line_window_loss_and_software_decides():
    # The engine's 1 ms for a message lengthens each round trip: 0.1 s.
    assert wire({}).rate == 1e9
    assert wire({"window": 10**6}).rate == pytest.approx(1e7)
    assert wire({"window": 10**6}, streams=4).rate == pytest.approx(4e7)
    assert wire({}, window=10**6).rate == pytest.approx(1e7)
    assert wire({"window": 10**6}, window=10**9).rate == pytest.approx(1e7)
    lost = 1448 / 0.099 * math.sqrt(1.5 / 1e-4)
    assert SEGMENT == 1448
    assert wire({"loss": 1e-4}).rate == pytest.approx(lost)
    assert wire({"loss": 1e-4}, streams=3).rate == pytest.approx(3 * lost)
    assert wire({}, host_rate=5e8).rate == 5e8
    assert wire({"bandwidth": None}, host_rate=5e8).rate == 5e8
    assert wire({"bandwidth": None}).rate == UNKNOWN_LINK_BANDWIDTH
    assert wire({}).delay_s == 0.0495


def test_software_bounds_what_is_under_way():
    assert wire({}, collective_bytes=10**5, collective=True).rate == pytest.approx(1e6)
    assert wire({}, collective_bytes=10**5).rate == 1e9
    assert wire({}, send_bytes=10**5).rate == pytest.approx(1e6)
    assert wire({"window": 10**4}, send_bytes=10**5).rate == pytest.approx(1e5)


def test_measured_bytes_under_way_go_before_windows_and_loss():
    measured = {"in_flight": {1: 10**6, 4: 3 * 10**6}, "window": 1, "loss": 0.5}
    assert wire(measured).rate == pytest.approx(1e7)
    assert wire(measured, streams=4).rate == pytest.approx(3e7)
    assert wire(measured, streams=2).rate == pytest.approx(1.5e7)  # Half of what four carry.
    assert wire(measured, streams=16).rate == pytest.approx(3e7)
    # Three streams carry at least what one does.
    assert wire({"in_flight": {1: 10**6, 4: 11 * 10**5}}, streams=3).rate == pytest.approx(1e7)


def test_a_measured_transfer_goes_before_the_rate():
    timed = {"transfer_s": {10**6: 0.25, 3 * 10**6: 0.45}, "window": 10}
    there = two(timed)
    one = there.wire(0, 1, collective=False, streams=1)
    assert there.send_s(one, 2e6) == pytest.approx(0.35 - 0.0495)
    assert there.send_s(one, 4e6) == pytest.approx(0.55 - 0.0495)
    assert there.send_s(one, 1e10) == pytest.approx(1e3 + 0.15 - 0.0495)
    # The line bounds what the points would say far outside them.
    assert there.send_s(one, 1e3) == pytest.approx(max(1e-6, 0.1501 - 0.0495))
    # Several streams, and collectives, were not what was timed.
    assert there.wire(0, 1, collective=False, streams=2).timed == ()
    assert there.wire(0, 1, collective=True).timed == ()


def test_messages_take_size_over_rate_and_share_the_line_but_not_their_windows():
    there = two({"window": 4 * 10**7})  # 4e8 bytes a second each.
    one = there.wire(0, 1, collective=False)
    assert there.send_s(one, 8e8) == pytest.approx(2.0)
    assert (one.shared(1), one.shared(2), one.shared(5)) == (4e8, 4e8, 2e8)


@pytest.mark.parametrize(("each", "seconds"), [(1, 2.001), (2, 2.001), (4, 3.201)])
def test_messages_between_hosts_share_the_line_of_their_sites(each, seconds):
    sites = [[device()] * each], [[device()] * each]
    there = network(
        cluster(*sites, links=(Link(a="A", b="B", rtt_s=0.099, bandwidth=1e9, window=4 * 10**7),))
    )
    hop = there.flows_s([WireFlow(k, each + k, 8e8) for k in range(each)], 1)
    assert hop == pytest.approx((seconds, 0.0495))
    # Who sends several messages makes them one after another.
    posted = there.flows_s([WireFlow(0, each + k, 8e8) for k in range(each)], 1)
    assert posted.busy == pytest.approx(seconds + (each - 1) * 1e-3)


def test_hosts_of_a_site_have_ways_out_of_their_own_and_devices_of_a_host_ports():
    there = network(cluster([[device()] * 2, [device()] * 2, [device()] * 2]))
    wire = there.wire(0, 2, collective=False)
    size = 8e8
    apart = there.flows_s([WireFlow(0, 2, size), WireFlow(4, 3, size)], 1).busy
    together = there.flows_s([WireFlow(0, 2, size), WireFlow(1, 4, size)], 1).busy
    assert apart == pytest.approx(max(size / wire.line, size / wire.rate) + 1e-3)
    assert together == pytest.approx(max(2 * size / wire.line, size / wire.rate) + 1e-3)
    local = there.local_rate[there.hosts[0]]
    assert there.flows_s([WireFlow(0, 1, size), WireFlow(1, 0, size)], 1).busy == pytest.approx(
        size / local + 1e-3
    )
    assert there.flows_s([], 1) == (0.0, 0.0)


def test_inside_a_host_and_inside_a_site():
    there = network(cluster([[device()] * 2, [device()]]))
    local = there.wire(0, 1, collective=False)
    near = there.wire(0, 2, collective=False)
    assert (local.delay_s, local.rate, local.local) == (LOCAL_DELAY_S, 1e10, True)
    assert (near.delay_s, near.rate, near.local) == (SITE_RTT_S / 2, SITE_BANDWIDTH, False)


def catalogued(*kinds: str, **figures) -> Cluster:
    """One host of devices of the catalogue."""
    made = catalog.load_devices()
    devices = tuple(made[kind].device(kind) for kind in kinds)
    return Cluster(sites=(Site(name="A", hosts=(Host(name="a0", devices=devices, **figures),)),))


V100 = 150e9  # Bytes a second of its six links together, of which a pair has two at most.


@pytest.mark.parametrize(("devices", "rate"), [(2, 0.27), (4, 0.8), (8, 0.8)])
def test_a_ring_inside_a_host_has_the_rate_of_rings_of_its_size(devices, rate):
    there = network(catalogued(*["v100-16"] * 8))
    ring = tuple(range(devices))
    size = 8e9
    moved = 2 * (devices - 1) * size / devices
    assert there.ring_rate(ring) == pytest.approx(rate * V100)
    assert there.all_reduce_s(ring, size) == pytest.approx(moved / (rate * V100), rel=1e-3)
    assert there.all_gather_s(ring, size) == pytest.approx(moved / 2 / (rate * V100), rel=1e-3)
    assert there.inside_s(ring, size, 2) == pytest.approx(2 * size / devices / (rate * V100))
    part = size / devices
    assert there.direct_s(ring, part) == pytest.approx(moved / 2 / (rate * V100), rel=1e-3)
    # A message between two devices goes over the links of that pair.
    assert there.wire(0, 5, collective=False).rate == pytest.approx(0.27 * V100)
    assert there.flows_s([WireFlow(0, 1, size)], 1).busy == pytest.approx(
        size / 0.27 / V100 + 1e-3, rel=1e-6
    )


def test_a_tensor_axis_of_two_waits_for_the_links_of_a_pair():
    """In a plan of all eight devices."""
    using = costs(catalogued(*["v100-16"] * 8), plain())
    pair, all_of_them = (
        using.waited_s("all_reduce", tuple(range(count)), 1e9, 1) for count in (2, 8)
    )
    assert pair == pytest.approx(2 * LOCAL_DELAY_S + 1e9 / 0.27 / V100)
    assert all_of_them == pytest.approx(14 * LOCAL_DELAY_S + 2 * 7 / 8 * 1e9 / 0.8 / V100)


def test_assumptions_name_the_rate_of_each_ring_size_of_the_plan():
    def inside(axes: dict[str, int], **figures: float) -> list[str]:
        there = catalogued(*["v100-16"] * 8, **figures)
        one = pipeline([stage(mesh(*range(8), **axes), (1,) * axes["data"])], 1, (1,))
        priced = plan(there, one)
        return [
            line
            for line in estimate(priced, models.graph(TIED), there, plain()).assumptions
            if line.startswith("a0: ")
        ]

    assert inside({"data": 8}) == [
        "a0: devices of the host exchange 960 Gbit/s each way; farspan probe measures it"
    ]
    assert inside({"data": 4, "tensor": 2}) == [
        "a0: rings of 2 devices 324 Gbit/s, of 4 devices 960 Gbit/s each way; farspan probe "
        "measures a ring of all"
    ]
    assert inside({"data": 8}, local_rate=100e9) == []
    assert inside({"data": 4, "tensor": 2}, local_rate=100e9) == [
        "a0: rings of 2 devices 270 Gbit/s each way, by the catalogue's shares of the measured "
        "ring of all"
    ]


def test_a_ring_has_the_rate_of_its_own_devices_and_not_of_others_in_the_host():
    there = network(catalogued("a100-80", "a100-80", "t4", "t4"))
    alone = network(catalogued("a100-80", "a100-80"))
    slow = network(catalogued("t4", "t4"))
    assert there.ring_rate((0, 1)) == alone.ring_rate((0, 1))
    assert there.ring_rate((2, 3)) == slow.ring_rate((0, 1)) == there.ring_rate((1, 2))
    assert there.ring_rate((0, 1)) > 10 * there.ring_rate((0, 2))


def test_a_ring_over_devices_with_unlike_links_takes_the_slowest():
    """Of four cards two have twelve links, where the others have eighteen."""
    known = catalogued(*["h100"] * 4)
    few = Interconnect(kind="nvlink", rate=300e9)
    devices = [
        one.but(interconnect=few) if place > 1 else one
        for place, one in enumerate(known.hosts[0].devices)
    ]
    there = network(known.with_devices(lambda host, place: devices[place]))
    assert there.ring_rate((0, 1)) == catalog.ring_rate(devices[0].sheet.interconnect, 2)
    assert there.ring_rate((2, 3)) == there.ring_rate((1, 2)) == catalog.ring_rate(few, 2)
    assert there.ring_rate((0, 1, 2, 3)) == catalog.ring_rate(few, 4) < there.ring_rate((0, 1))


def test_a_measured_rate_counts_for_all_devices_and_by_the_catalogue_for_fewer():
    probed = network(catalogued(*["v100-16"] * 8, local_rate=100e9))
    assert probed.ring_rate(tuple(range(8))) == 100e9
    assert probed.ring_rate((3, 6)) == pytest.approx(100e9 * 0.27 / 0.8)
    # Where no interconnect is known, the measured rate stands for every ring.
    unknown = cluster([[device()] * 4]).with_hosts(
        lambda host: msgspec.structs.replace(host, local_rate=5e9)
    )
    assert {network(unknown).ring_rate(tuple(range(n))) for n in (2, 3, 4)} == {5e9}


@given(st.sampled_from(sorted(catalog.load_devices())), st.integers(2, 16), st.data())
def test_rings_of_one_kind_are_as_fast_wherever_they_lie_and_a_full_one_is_the_hosts(
    kind, devices, data
):
    made = catalog.load_devices()[kind].device(kind, 2**34)
    there = network(cluster([[made] * devices]))
    ring = data.draw(st.lists(st.integers(0, devices - 1), min_size=2, unique=True))
    other = tuple(range(len(ring)))
    assert there.ring_rate(ring) == there.ring_rate(other)
    assert there.ring_rate(tuple(range(devices))) == there.local_rate["a0"]
    joined = made.sheet.interconnect
    known = None if joined is None else catalog.ring_rate(joined, len(ring))
    assert there.ring_rate(ring) == (there.engine.local_rate if known is None else known)


@given(st.integers(2, 16), st.floats(1e3, 1e10), st.sampled_from(["reduce", "gather"]))
def test_a_larger_ring_of_the_same_rate_never_takes_less(devices, size, kind):
    there = network(cluster([[device()] * 17]))
    smaller = tuple(range(devices))
    larger = tuple(range(devices + 1))
    assert there.ring_rate(smaller) == there.ring_rate(larger)
    took = there.all_reduce_s if kind == "reduce" else there.all_gather_s
    assert took(smaller, size) <= took(larger, size)


def test_a_host_pair_of_its_own_goes_before_its_sites():
    own = Link(a="a1", b="b0", rtt_s=0.5, bandwidth=1e6)
    sites = Link(a="A", b="B", rtt_s=0.1, bandwidth=1e9)
    there = network(cluster([[device()], [device()]], [[device()]], links=(own, sites)))
    assert there.wire(0, 2, collective=False).delay_s == 0.05
    assert there.wire(1, 2, collective=False).delay_s == 0.25
    with pytest.raises(NoLink, match="no link between a0 and b0"):
        network(cluster([[device()]], [[device()]])).wire(0, 1, collective=False)


def test_rings_between_two_sites_by_hand():
    there = two({"bandwidth": 1e6})
    hop = 0.0495 + 1e-3
    assert there.reduce_scatter_s((0, 1), 4e6) == pytest.approx(hop + 2.0)
    assert there.all_gather_s((0, 1), 4e6) == pytest.approx(hop + 2.0)
    assert there.all_reduce_s((0, 1), 4e6) == pytest.approx(2 * hop + 4.0)
    assert there.all_reduce_s((0, 1), 4e6, messages=10) == pytest.approx(20 * hop + 4.0)
    assert there.all_reduce_s((0, 1), 4e6, concurrent=3) == pytest.approx(2 * hop + 12.0)
    assert there.all_to_all_s((0, 1), 4e6) == pytest.approx(hop + 1.0)
    assert there.all_reduce_s((0,), 4e6) == 0.0


def test_ring_over_heterogeneous_links_takes_the_slowest_rate_and_longest_delays():
    links = (
        Link(a="A", b="B", rtt_s=0.2, bandwidth=1e6),
        Link(a="B", b="C", rtt_s=0.02, bandwidth=1e9),
        Link(a="A", b="C", rtt_s=0.1, bandwidth=1e8),
    )
    there = network(cluster([[device()]], [[device()]], [[device()]], links=links))
    # Hops 0 -> 1, 1 -> 2, 2 -> 0 of 0.101, 0.011, 0.051 s; two steps' longest way is 2 -> 0 -> 1.
    assert there.reduce_scatter_s((0, 1, 2), 3e6) == pytest.approx(0.152 + 2.0)
    # Four steps: once around, and the longest hop.
    assert there.all_reduce_s((0, 1, 2), 3e6) == pytest.approx(0.163 + 0.101 + 4.0)


def test_a_ring_that_crosses_a_line_twice_shares_it():
    link = Link(a="A", b="B", rtt_s=0.1, bandwidth=1e6)
    there = network(cluster([[device()] * 2], [[device()] * 2], links=(link,)))
    straight, zigzag = (there.reduce_scatter_s(ring, 4e6) for ring in ((0, 1, 2, 3), (0, 2, 1, 3)))
    assert straight == pytest.approx(0.051 * 2 + LOCAL_DELAY_S + 3.0)
    assert zigzag == pytest.approx(0.051 * 3 + 6.0)


def test_hierarchical_all_reduce_crosses_the_wide_area_once():
    link = Link(a="A", b="B", rtt_s=0.1, bandwidth=1e6)
    there = network(cluster([[device()] * 4], [[device()] * 4], links=(link,)))
    group = tuple(range(8))
    size = 8e6
    # Inside: 3 steps of a quarter at 1e10, twice. Across: one rank of each site, which is ready, is
    # sent all of the other's sum.
    inside = 3 * LOCAL_DELAY_S + 3 / 4 * size / 1e10
    across = 0.05 + 0.001 + size / 1e6
    assert there.all_reduce_s(group, size, topology="hierarchical") == pytest.approx(
        2 * inside + across
    )
    # One ring of 14 steps: all eight hops, then the six in a row with both wide ones among them.
    flat = 2 * 7 / 8 * size / 1e6
    assert there.all_reduce_s(group, size) == pytest.approx(flat + 4 * 0.051 + 10 * LOCAL_DELAY_S)
    # Inside one site there is nothing to cross.
    assert there.all_reduce_s((0, 1), size, topology="hierarchical") == there.all_reduce_s(
        (0, 1), size
    )


def test_direct_exchange_shares_the_link_between_sites_and_the_uplink_of_a_host():
    link = Link(a="A", b="B", rtt_s=1e-6, bandwidth=1e8)
    by_two, each = (
        network(cluster(*([hosts] * 2), links=(link,)), message_s=0.0)
        for hosts in ([[device()] * 2], [[device()]] * 2)
    )
    for made in (by_two, each):  # Four pairs each way, whatever hosts they are of.
        assert made.direct_s((0, 1, 2, 3), 1e6) == pytest.approx(4e6 / 1e8, rel=5e-3)
    inside = network(cluster([[device()] * 2] * 3), message_s=0.0)
    # Each host sends for two devices to four others.
    assert inside.direct_s(range(6), 1e6) - SITE_RTT_S == pytest.approx(8e6 / SITE_BANDWIDTH)


def simulated_ring(delays, busy, steps):
    """When the last part arrives: each rank passes on what it received before, over a wire that
    carries one part at a time."""
    n = len(delays)
    arrived = [0.0] * n
    free = [0.0] * n
    for _ in range(steps):
        left = [max(arrived[i], free[i]) for i in range(n)]
        free = [left[i] + busy[i] for i in range(n)]
        arrived = [free[i - 1] + delays[i - 1] for i in range(n)]
    return max(arrived)


@given(st.integers(2, 6), st.data(), st.sampled_from(["reduce_scatter", "all_reduce"]))
def test_rings_against_a_simulation_of_every_part(n, data, kind):
    """The formula adds the longest way and the slowest wire's work; a ring needs each, and at most
    both."""
    rtts = [data.draw(st.floats(1e-4, 0.3)) for _ in range(n)]
    rates = [data.draw(st.floats(1e5, 1e9)) for _ in range(n)]
    names = "ABCDEF"
    links = [
        Link(a=names[i], b=names[(i + 1) % n], rtt_s=rtts[i], bandwidth=rates[i]) for i in range(n)
    ]
    links = links[: 1 if n == 2 else n]
    there = network(cluster(*([[device()]] for _ in range(n)), links=tuple(links)))
    size = 1e6
    steps = (n - 1) * (2 if kind == "all_reduce" else 1)
    found = getattr(there, f"{kind}_s")(range(n), size)
    if n == 2:
        rtts = rtts[:1] * 2
        rates = rates[:1] * 2
    exact = simulated_ring(
        [rtt / 2 + 1e-3 for rtt in rtts], [size / n / rate for rate in rates], steps
    )
    assert exact * (1 - 1e-9) <= found <= 2 * exact
    if len(set(rtts)) == len(set(rates)) == 1:
        assert found == pytest.approx(exact)


def test_a_ring_of_gloo_waits_for_an_answer_at_every_step():
    """2 x 2 ranks at 0.1 s and 10 MB/s: an all-reduce has 6 steps, an all-gather 3."""
    link = Link(a="A", b="B", rtt_s=0.1, bandwidth=1e7)
    there = cluster([[device(), device()]], [[device(), device()]], links=(link,))
    gloo = {"ring_answered": True, "collectives": 2, "message_s": 0.0}
    found = network(there, **gloo)
    ranks = (0, 1, 2, 3)
    # The answer, then a quarter of the bytes; unless so few may be under way that their round trips
    # take longer.
    assert found.all_reduce_s(ranks, 4e6) == pytest.approx(6 * (0.1 + 0.1))
    assert network(there, collective_bytes=2e5, **gloo).all_reduce_s(ranks, 4e6) == pytest.approx(
        6 * 1e6 / 2e6
    )
    # Two messages at a time hide each other's answers, and share the line.
    assert found.all_gather_s(ranks, 4.0, messages=4) == pytest.approx(4 / 2 * 3 * 0.1, rel=1e-4)
    assert found.all_gather_s(ranks, 4.0, messages=4, at_once=1) == pytest.approx(
        4 * 3 * 0.1, rel=1e-4
    )
    assert found.all_gather_s(ranks, 32e6, messages=2) == pytest.approx(3 * 0.8)


def test_an_engine_may_be_another_between_cpus():
    made = plain(cpu={"ring_answered": True, "overlap": 0.0}, overlap=0.8)
    assert made.on(["cpu", "cpu"]) == plain(ring_answered=True, overlap=0.0)
    assert made.on(["cpu", "cuda"]) == made


def changed(there: Cluster, site: dict[str, float], host: dict[str, float]) -> Cluster:
    """The same cluster with other figures of every site and of every host."""
    sites = tuple(msgspec.structs.replace(each, **site) for each in there.sites)
    hosts = msgspec.structs.replace(there, sites=sites).with_hosts(
        lambda each: msgspec.structs.replace(each, **host)
    )
    assert isinstance(hosts, Cluster)
    return hosts


@given(
    plans(),
    st.sampled_from(ENGINES),
    st.sampled_from([1e6, 1e8, 1e10]),
    st.sampled_from([1.0, 3.0, 100.0]),
    st.sampled_from(["lan_bandwidth", "lan_rtt_s", "nic"]),
)
def test_no_faster_local_network_or_card_makes_a_plan_slower(
    case: tuple[Cluster, Plan], name: str, rate: float, times: float, what: str
) -> None:
    there, made = case
    figures = {"lan_bandwidth": rate, "lan_rtt_s": 1e-3, "nic": rate}
    better = figures | {
        what: figures[what] / times if what == "lan_rtt_s" else figures[what] * times
    }
    graph = models.graph(made.model)
    engine = named(name)

    def step_s(known: dict[str, float]) -> float:
        site = {key: value for key, value in known.items() if key != "nic"}
        return estimate(made, graph, changed(there, site, {"nic": known["nic"]}), engine).step_s

    before, after = map(step_s, (figures, better))
    assert after <= before * (1 + 1e-9)


def test_hosts_of_a_site_communicate_at_the_slower_of_local_network_and_nic() -> None:
    there = cluster([[device()], [device()]])
    assert LINK_BANDWIDTH == UNKNOWN_LINK_BANDWIDTH
    for site, host, rate, rtt_s in (
        ({}, {}, SITE_BANDWIDTH, SITE_RTT_S),
        ({"lan_bandwidth": 12.5e9}, {}, 12.5e9, SITE_RTT_S),
        ({"lan_bandwidth": 12.5e9, "lan_rtt_s": 2e-5}, {"nic": 3e9}, 3e9, 2e-5),
        ({}, {"nic": 25e9}, 25e9, SITE_RTT_S),
    ):
        found = network(changed(there, site, host)).wire(0, 1, collective=False)
        assert (found.line, found.delay_s) == pytest.approx((rate, rtt_s / 2))


def test_link_rate_between_hosts_is_that_of_the_slower_nic() -> None:
    there = cluster([[device()], [device()], [device()]])
    nics = {"a0": 1e9, "a1": 1e9, "a2": 1e8}
    there = there.with_hosts(lambda host: msgspec.structs.replace(host, nic=nics[host.name]))
    known = network(there)
    assert [known.wire(0, other, collective=False).line for other in (1, 2)] == [1e9, 1e8]
