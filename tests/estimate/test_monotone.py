"""Under a fixed plan a faster device, wire or host is never slower, whatever the engine."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from farspan import models
from farspan.domain.cluster import Cluster, Device, Host, Interconnect, Link
from farspan.domain.engine import load_engine
from farspan.estimate.estimate_plan import estimate
from tests.estimate.parts import plans

ENGINES = ("farspan", "torch2024", "megatron2021", "compiled2024", "alpa2022")
#: Of a step, that rounding may add.
ROUNDING = 1 + 1e-9


def step_s(there: Cluster, plan, name: str) -> float:
    return estimate(plan, models.graph(plan.model), there, load_engine(name)).step_s


def with_device(there: Cluster, rank: int, change) -> Cluster:
    """The cluster whose device of that number is another."""
    places = [(host.name, index) for host in there.hosts for index in range(len(host.devices))]
    return there.with_devices(
        lambda host, index: (
            change(host.devices[index])
            if (host.name, index) == places[rank]
            else host.devices[index]
        )
    )


@given(made=plans(), name=st.sampled_from(ENGINES), by=st.sampled_from([1.1, 3.0]), data=st.data())
def test_a_faster_device_is_never_slower(made, name, by, data):
    there, plan = made
    figure = data.draw(st.sampled_from(["flops", "bandwidth"]))

    def faster(one: Device) -> Device:
        if figure == "bandwidth":
            return one.but(bandwidth=by * one.sheet.bandwidth)
        sheet = {key: getattr(one.sheet, key) for key in ("flops", "measured")}
        return one.but(
            **{
                key: {dtype: by * rate for dtype, rate in rates.items()}
                for key, rates in sheet.items()
            }
        )

    rank = data.draw(st.integers(0, len(there.devices) - 1))
    assert step_s(with_device(there, rank, faster), plan, name) <= ROUNDING * step_s(
        there, plan, name
    )


@given(made=plans(), name=st.sampled_from(ENGINES), by=st.sampled_from([1.1, 3.0]), data=st.data())
def test_a_faster_link_is_never_slower(made, name, by, data):
    there, plan = made
    if not there.links:
        return

    def faster(link: Link) -> Link:
        if figure == "rtt_s":
            # What was timed holds for the round trip that it was timed at.
            return msgspec.structs.replace(link, rtt_s=link.rtt_s / by, transfer_s={})
        return msgspec.structs.replace(
            link, bandwidth=None if link.bandwidth is None else by * link.bandwidth
        )

    figure = data.draw(st.sampled_from(["rtt_s", "bandwidth"]))
    at = data.draw(st.integers(0, len(there.links) - 1))
    if figure == "rtt_s":
        there = msgspec.structs.replace(
            there, links=tuple(msgspec.structs.replace(link, transfer_s={}) for link in there.links)
        )
    links = tuple(faster(link) if i == at else link for i, link in enumerate(there.links))
    assert step_s(msgspec.structs.replace(there, links=links), plan, name) <= ROUNDING * step_s(
        there, plan, name
    )


@given(
    made=plans(),
    name=st.sampled_from(ENGINES),
    rate=st.sampled_from([1e8, 1e9]),
    by=st.sampled_from([1.1, 3.0]),
)
def test_a_faster_local_network_card_or_interconnect_is_never_slower(made, name, rate, by):
    there, plan = made

    def joined(host: Host, rate: float) -> Host:
        bus = Interconnect(kind="pcie", rate=rate, p2p=True)
        devices = tuple(one.but(interconnect=bus) for one in host.devices)
        return msgspec.structs.replace(host, nic=rate, devices=devices)

    def world(rate: float) -> Cluster:
        sites = tuple(
            msgspec.structs.replace(site, lan_bandwidth=rate, lan_rtt_s=1e3 / rate)
            for site in there.sites
        )
        return msgspec.structs.replace(there, sites=sites).with_hosts(
            lambda host: joined(host, rate)
        )

    assert step_s(world(by * rate), plan, name) <= ROUNDING * step_s(world(rate), plan, name)
