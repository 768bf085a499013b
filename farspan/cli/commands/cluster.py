"""Clusters: the ones that ship with farspan, and what a cluster file holds."""

from __future__ import annotations

import argparse
from itertools import combinations

from farspan.app.clusters import find
from farspan.cli.cluster_text import say_cluster
from farspan.cli.console import Console
from farspan.domain.cluster import Cluster
from farspan.domain.cluster_json import as_json
from farspan.domain.problems import command
from farspan.domain.units import format_flops, format_rate

HELP = "show, list or check clusters"


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


def run(given: argparse.Namespace, console: Console) -> None:
    if given.action == "list":
        return _list(console)
    cluster = find(given.cluster)
    if given.action == "show":
        say_cluster(cluster, console)
        return console.answer(as_json(cluster))
    unknown = _unknown(cluster)
    console.say(f"{given.cluster}: {cluster.summary}; the file can be used")
    for line in unknown:
        console.say(f"unknown: {line}")
    if unknown:
        probe = command("probe", "--cluster", given.cluster, "-o", "measured.yaml")
        console.say(f"{probe} measures what is unknown")
    return console.answer(
        {"cluster": given.cluster, "devices": len(cluster.devices), "unknown": unknown}
    )


def _list(console: Console) -> None:
    from farspan.domain import catalog
    from farspan.launch import clusters

    names = clusters.named()
    kinds = catalog.devices()
    console.say("clusters")
    for name in names:
        console.say(f"  {name:20} {clusters.find(name).summary}")
    console.say("devices")
    for kind, device in kinds.items():
        rates = ", ".join(f"{dtype} {format_flops(flops)}" for dtype, flops in device.flops.items())
        price = (
            f"${device.price.usd_per_hour:g}/h ({device.price.checked})"
            if device.price
            else "no list price"
        )
        console.say(
            f"  {kind:12} {device.memory or 'any size':>8}  {rates}; {price}; {device.source}"
        )
    console.answer({"clusters": list(names), "devices": kinds})


def _unknown(cluster: Cluster) -> list[str]:
    """Return what the planner needs and the cluster file does not give."""
    unknown = []
    for a, b in combinations([host.name for host in cluster.hosts], 2):
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
        kinds = {device.kind for device in host.devices if not device.sheet.flops}
        unknown += [f"the speed of {kind} in {host.name}" for kind in sorted(kinds)]
    return unknown
