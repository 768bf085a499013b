"""Clusters: the ones that ship with farspan, and what a cluster file says."""

from __future__ import annotations

import argparse
from itertools import combinations

from farspan.cli.clusters import find
from farspan.cli.console import Console
from farspan.domain.cluster import Cluster, Device, Link
from farspan.domain.units import format_bytes, format_flops, format_rate, format_seconds

HELP = "show, list or check clusters"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="what a cluster has, each figure with its origin")
    check = actions.add_parser("check", help="read a cluster file and say what is wrong or unknown in it")
    for action in (show, check):
        action.add_argument("cluster", metavar="CLUSTER", help="a cluster file, or a name of `farspan cluster list`")
    actions.add_parser("list", help="the clusters and device kinds that ship with farspan")


def run(given: argparse.Namespace, console: Console) -> None:
    if given.action == "list":
        return _list(console)
    cluster = find(given.cluster)
    if given.action == "show":
        show(cluster, console)
        return console.answer(cluster)
    unknown = _unknown(cluster)
    console.say(f"{given.cluster}: {_count(cluster)}; the file can be used")
    for line in unknown:
        console.say(f"unknown: {line}")
    if unknown:
        console.say(f"farspan probe --cluster {given.cluster} -o measured.yaml measures what is unknown")
    return console.answer({"cluster": given.cluster, "devices": len(cluster.devices), "unknown": unknown})


def _list(console: Console) -> None:
    from farspan.domain import catalog
    from farspan.launch import clusters

    names, kinds = clusters.named(), catalog.devices()
    console.say("clusters")
    for name in names:
        console.say(f"  {name:20} {_count(clusters.find(name))}")
    console.say("devices")
    for kind, device in kinds.items():
        rates = ", ".join(f"{dtype} {format_flops(flops)}" for dtype, flops in device.flops.items())
        price = f"${device.price.usd_per_hour:g}/h ({device.price.checked})" if device.price else "no list price"
        console.say(f"  {kind:12} {device.memory or 'any size':>8}  {rates}; {price}; {device.source}")
    console.answer({"clusters": list(names), "devices": kinds})


def show(cluster: Cluster, console: Console) -> None:
    """Sites, hosts, devices and links, each with its origin."""
    console.say(_count(cluster))
    for site in cluster.sites:
        lease = f", lease {format_seconds(site.lease_s)}" if site.lease_s else ""
        egress = f", egress ${site.egress_usd_per_byte * 1e9:g}/GB" if site.egress_usd_per_byte else ""
        console.say(f"site {site.name}{lease}{egress}")
        for host in site.hosts:
            console.say(f"  host {host.name}")
            lines = [_device(device) for device in host.devices]
            for line in dict.fromkeys(lines):
                console.say(f"    {lines.count(line)} x {line}")
    for a, b in combinations([host.name for host in cluster.hosts], 2):
        link = cluster.link(a, b)
        console.say(f"link {a} - {b}: {_link(link) if link else 'unknown'}")


def _count(cluster: Cluster) -> str:
    kinds = [device.kind for device in cluster.devices]
    parts = " + ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    sites, hosts = len(cluster.sites), len(cluster.hosts)
    return f"{parts} in {hosts} host{'s' * (hosts > 1)} at {sites} site{'s' * (sites > 1)}"


def _device(device: Device) -> str:
    rates = ", ".join(f"{dtype} {format_flops(flops)}" for dtype, flops in device.flops.items())
    price = f"${device.usd_per_hour:g}/h" if device.usd_per_hour is not None else "price unknown"
    bandwidth = f", {format_bytes(device.bandwidth)}/s" if device.bandwidth else ""
    watts = f", {device.watts:g} W" if device.watts else ""
    measured = f", {len(device.rates)} rates measured" if device.rates else ""
    measured += f", {len(device.units)} passes timed" if device.units else ""
    return (
        f"{device.kind}: {format_bytes(device.memory)}{bandwidth}, {rates}{watts}, {price}{measured} [{device.origin}]"
    )


def _link(link: Link) -> str:
    bandwidth = format_rate(link.bandwidth) if link.bandwidth else "bandwidth unknown"
    window = f", window {format_bytes(link.window)}" if link.window else ""
    loss = f", loss {link.loss:.2%}" if link.loss is not None else ""
    return f"{format_seconds(link.rtt_s)}, {bandwidth}{window}{loss} [{link.origin}]"


def _unknown(cluster: Cluster) -> list[str]:
    """What the planner would like to know and the cluster does not say."""
    found = []
    for a, b in combinations([host.name for host in cluster.hosts], 2):
        link = cluster.link(a, b)
        if link is None:
            found.append(f"the link {a} - {b}")
        elif link.bandwidth is None:
            found.append(f"the bandwidth of {a} - {b}")
    for host in cluster.hosts:
        kinds = {device.kind for device in host.devices if not device.flops}
        found += [f"the speed of {kind} in {host.name}" for kind in sorted(kinds)]
    return found
