"""A cluster as people read it."""

from __future__ import annotations

from itertools import combinations

import msgspec

from farspan.cli.console import Console
from farspan.domain.assumed_networks import AssumedNetwork
from farspan.domain.cluster import Cluster, Device, Link
from farspan.domain.units import (
    counted,
    format_bytes,
    format_flops,
    format_rate,
    format_seconds,
    short_time,
)


def print_cluster(cluster: Cluster, console: Console) -> None:
    """Print sites, hosts, devices and links, each with its origin."""
    console.write_line(cluster.summary)
    for site in cluster.sites:
        text = f"site {site.name}"
        if site.lease_s:
            text += f", lease {format_seconds(site.lease_s)}"
        text += _frequency_text(site.preemptions_per_s)
        if site.egress_usd_per_byte:
            text += f", egress ${site.egress_usd_per_byte * 1e9:g}/GB"
        if site.lan_bandwidth is not None:
            text += f", {format_rate(site.lan_bandwidth)} between its hosts"
        console.write_line(text)
        for host in site.hosts:
            nic = "" if host.nic is None else f", card {format_rate(host.nic)}"
            lease = ""
            if host.lease_s is not msgspec.UNSET:
                lease = f", lease {format_seconds(host.lease_s)}"
            taken = _frequency_text(host.preemptions_per_s)
            console.write_line(f"  host {host.name}{nic}{lease}{taken}")
            lines = list(map(_device_text, host.devices))
            for line in dict.fromkeys(lines):
                console.write_line(f"    {lines.count(line)} x {line}")
    hosts = [host.name for host in cluster.hosts]
    for a, b in combinations(hosts, 2):
        link = cluster.link(a, b)
        text = _link_text(link, cluster.assumed_network(a, b)) if link else "unknown"
        console.write_line(f"link {a} - {b}: {text}")


def _frequency_text(per_s: float | msgspec.UnsetType) -> str:
    return "" if per_s is msgspec.UNSET else f", taken away {per_s * 3600:.3g} times an hour"


def _device_text(device: Device) -> str:
    sheet = device.sheet
    facts = [format_bytes(device.memory)]
    if sheet.bandwidth:
        facts.append(f"{format_bytes(sheet.bandwidth)}/s")
    rates = [f"{dtype} {format_flops(flops)}" for dtype, flops in sheet.flops.items()]
    facts.append(", ".join(rates))
    if sheet.watts:
        facts.append(f"{sheet.watts:g} W")
    price = device.usd_per_hour
    facts.append("price unknown" if price is None else f"${price:g}/h")
    times = device.times
    if times.rates:
        facts.append(f"{counted(len(times.rates), 'rate')} measured")
    if times.units:
        facts.append(f"{counted(len(times.units), 'pass')} timed")
    return f"{device.kind}: {', '.join(facts)} [{device.origin}]"


def _link_text(link: Link, assumed: AssumedNetwork | None) -> str:
    bandwidth = format_rate(link.bandwidth) if link.bandwidth else "bandwidth unknown"
    if assumed is not None:
        like = f", as of a {assumed.machine}" if assumed.machine else ""
        bandwidth = f"{format_rate(assumed.rate)} assumed{like}"
    window = f", window {format_bytes(link.window)}" if link.window else ""
    loss = f", loss {link.loss:.2%}" if link.loss is not None else ""
    # Tenths of a millisecond are noise between hosts of one rack.
    format_rtt = short_time if link.rtt_s < 1e-4 else format_seconds
    rtt = format_rtt(link.rtt_s)
    return f"{rtt}, {bandwidth}{window}{loss} [{link.origin}]"
