"""Clusters and a plan on each, as a page of results draws them: what runs where, and what crosses
between sites."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import msgspec

from farspan.domain.cluster import Cluster, Host
from farspan.domain.units import format_bytes, format_rate, short_time
from farspan.report.plan_page import Drawing, describe_plan, layout
from farspan.report.plan_picture import Picture, rows_line, stage_line
from farspan_studies.pages.results import Table


class Drawn(msgspec.Struct, frozen=True):
    """A cluster by its name in the results; `told` says which plan the picture is of, where there
    is one."""

    cluster: str
    sites: Cluster
    told: str = ""
    picture: Picture | None = None

    @property
    def name(self) -> str:
        """Of the file that it is saved as."""
        return "plan-" + "".join(mark if mark.isalnum() else "-" for mark in self.cluster.lower())

    @property
    def drawing(self) -> Drawing:
        assert self.picture is not None
        return layout(self.picture)

    @property
    def text(self) -> str:
        return describe_plan(self.picture)

    @property
    def csv(self) -> str:
        """A line for every group of devices, and for every link that a step crosses."""
        assert self.picture is not None
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("what", "where", "does", "bytes", "round trip, s", "bytes/s"))
        for box in self.picture.boxes:
            does = f"{stage_line(self.picture, box)}, {rows_line(box)}"
            writer.writerow((box.name, box.host, does, round(box.memory.total), "", ""))
        for flow in self.picture.flows:
            writer.writerow(
                (
                    "link",
                    f"{flow.a} - {flow.b}",
                    flow.what,
                    round(flow.total),
                    flow.rtt_s,
                    f"{flow.rate:.6g}",
                )
            )
        return file.getvalue()


def clusters(drawings: Sequence[Drawn]) -> Table | None:
    """Return what each cluster is: devices by site, and the links between them; the FABRIC paper's
    table I."""
    lines = []
    for drawing in drawings:
        sites = [f"{site.name}: {_devices(site.hosts)}" for site in drawing.sites.sites]
        trips = dict.fromkeys(short_time(link.rtt_s) for link in drawing.sites.links)
        rates = dict.fromkeys(
            format_rate(link.bandwidth) for link in drawing.sites.links if link.bandwidth
        )
        lines.append((drawing.cluster, "; ".join(sites), ", ".join(trips), ", ".join(rates)))
    heads = ("", "devices", "round trip", "line rate")
    # What is known of none is not told.
    kept = [place for place in range(len(heads)) if any(line[place] for line in lines)]
    rows = tuple(tuple(line[place] for place in kept) for line in lines)
    return (
        Table("Clusters", tuple(heads[place] for place in kept), rows, (None,) * len(rows))
        if rows
        else None
    )


def _devices(hosts: Sequence[Host]) -> str:
    """`2 a30 of 24 GB`."""
    kinds = [
        f"{device.kind} of {format_bytes(device.memory)}"
        for host in hosts
        for device in host.devices
    ]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
