"""A cluster as people read it."""

from __future__ import annotations

from itertools import combinations

from farspan.cli.console import Console
from farspan.domain.cluster import Cluster, Device, Link
from farspan.domain.machines import AssumedNetwork
from farspan.domain.units import (
    counted,
    format_bytes,
    format_flops,
    format_rate,
    format_seconds,
    short_time,
)


def say_cluster(cluster: Cluster, console: Console) -> None:
    """Sites, hosts, devices and links, each with its origin."""
    console.say(cluster.summary)
    for site in cluster.sites:
        lease = f", lease {format_seconds(site.lease_s)}" if site.lease_s else ""
        egress = (
            f", egress ${site.egress_usd_per_byte * 1e9:g}/GB" if site.egress_usd_per_byte else ""
        )
        lan = (
            ""
            if site.lan_bandwidth is None
            else f", {format_rate(site.lan_bandwidth)} between its hosts"
        )
        console.say(f"site {site.name}{lease}{egress}{lan}")
        for host in site.hosts:
            console.say(
                f"  host {host.name}"
                + ("" if host.nic is None else f", card {format_rate(host.nic)}")
            )
            lines = [_device(device) for device in host.devices]
            for line in dict.fromkeys(lines):
                console.say(f"    {lines.count(line)} x {line}")
    for a, b in combinations([host.name for host in cluster.hosts], 2):
        link = cluster.link(a, b)
        text = _link(link, cluster.assumed_network(a, b)) if link else "unknown"
        console.say(f"link {a} - {b}: {text}")


def _device(device: Device) -> str:
    rates = ", ".join(
        f"{dtype} {format_flops(flops)}" for dtype, flops in device.sheet.flops.items()
    )
    price = f"${device.usd_per_hour:g}/h" if device.usd_per_hour is not None else "price unknown"
    bandwidth = f", {format_bytes(device.sheet.bandwidth)}/s" if device.sheet.bandwidth else ""
    watts = f", {device.sheet.watts:g} W" if device.sheet.watts else ""
    measured = (
        f", {counted(len(device.times.rates), 'rate')} measured" if device.times.rates else ""
    )
    measured += f", {counted(len(device.times.units), 'pass')} timed" if device.times.units else ""
    return (
        f"{device.kind}: {format_bytes(device.memory)}{bandwidth}, {rates}{watts}, "
        f"{price}{measured} [{device.origin}]"
    )


def _link(link: Link, assumed: AssumedNetwork | None) -> str:
    bandwidth = format_rate(link.bandwidth) if link.bandwidth else "bandwidth unknown"
    if assumed is not None:
        like = f", as of a {assumed.machine}" if assumed.machine else ""
        bandwidth = f"{format_rate(assumed.rate)} assumed{like}"
    window = f", window {format_bytes(link.window)}" if link.window else ""
    loss = f", loss {link.loss:.2%}" if link.loss is not None else ""
    # Of hosts side by side tenths of a millisecond say nothing.
    trip = short_time(link.rtt_s) if link.rtt_s < 1e-4 else format_seconds(link.rtt_s)
    return f"{trip}, {bandwidth}{window}{loss} [{link.origin}]"
