"""Clusters: what a cluster file holds, and its hosts made ready for farspan (up), examined
(status), tuned for their links (tune), joined by a private network (secure) and cleared of farspan
(down)."""

from __future__ import annotations

import argparse
from itertools import combinations

from farspan.app.clusters import find_cluster, probe_command
from farspan.cli.cluster_hosts_text import (
    configure_hosts,
    run_down,
    run_export,
    run_secure,
    run_status,
    run_tune,
    run_up,
)
from farspan.cli.cluster_text import print_cluster
from farspan.cli.console import Console
from farspan.domain.cluster import Cluster
from farspan.domain.cluster_json import as_json
from farspan.domain.units import format_flops, format_rate

HELP = "show, list or check clusters; set up their hosts"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="what a cluster has, each figure with its origin")
    check = actions.add_parser(
        "check", help="read a cluster file and say what is wrong or unknown in it"
    )
    for action in (show, check):
        action.add_argument(
            "cluster", metavar="CLUSTER", help="a cluster file, or a name of `farspan cluster list`"
        )
    actions.add_parser("list", help="the clusters and device kinds that ship with farspan")
    configure_hosts(actions)


def run(given: argparse.Namespace, console: Console) -> int | None:
    on_hosts = {
        "up": run_up,
        "status": run_status,
        "tune": run_tune,
        "secure": run_secure,
        "export": run_export,
        "down": run_down,
    }
    if given.action in on_hosts:
        return on_hosts[given.action](given, console)
    if given.action == "list":
        _list_known(console)
    else:
        _show_cluster(given, console)
    return None


def _show_cluster(given: argparse.Namespace, console: Console) -> None:
    cluster = find_cluster(given.cluster)
    if given.action == "show":
        print_cluster(cluster, console)
        return console.answer(as_json(cluster))
    unknown = _list_unknown(cluster)
    console.write_line(f"{given.cluster}: {cluster.summary}; the file can be used")
    for line in unknown:
        console.write_line(f"unknown: {line}")
    if unknown:
        probe = probe_command(given.cluster, "measured.yaml")
        console.write_line(f"{probe} measures what is unknown")
    devices = len(cluster.devices)
    return console.answer({"cluster": given.cluster, "devices": devices, "unknown": unknown})


def _list_known(console: Console) -> None:
    from farspan.domain import catalog
    from farspan.launch import clusters

    known = clusters.shipped_clusters()
    kinds = catalog.load_devices()
    console.write_line("clusters")
    for name in known:
        summary = clusters.find_cluster(name).summary
        console.write_line(f"  {name:20} {summary}")
    console.write_line("devices")
    for kind, device in kinds.items():
        rates = [f"{dtype} {format_flops(flops)}" for dtype, flops in device.flops.items()]
        price = "no list price"
        if device.price:
            price = f"${device.price.usd_per_hour:g}/h ({device.price.checked})"
        memory = device.memory or "any size"
        console.write_line(f"  {kind:12} {memory:>8}  {', '.join(rates)}; {price}; {device.source}")
    console.answer({"clusters": list(known), "devices": kinds})


def _list_unknown(cluster: Cluster) -> list[str]:
    """Return the figures that the planner needs and the cluster file does not give."""
    unknown = []
    hosts = [host.name for host in cluster.hosts]
    for a, b in combinations(hosts, 2):
        assumed = cluster.assumed_network(a, b)
        if cluster.link(a, b) is None:
            unknown.append(f"the link {a} - {b}")
        elif assumed is not None:
            site = cluster.site_of(a).name
            inside = site == cluster.site_of(b).name
            which = f"between hosts of {site}" if inside else f"of {a} - {b}"
            unknown.append(f"the bandwidth {which}: {format_rate(assumed.rate)} is assumed")
    unknown = list(dict.fromkeys(unknown))
    for host in cluster.hosts:
        unrated = [device for device in host.devices if not device.sheet.flops]
        for kind in sorted({device.kind for device in unrated}):
            unknown.append(f"the speed of {kind} in {host.name}")
    return unknown
