"""Train on the FABRIC testbed: what it could give now or later, a slice of a cluster file, the
cluster file of a slice, and the slice's lease and end.

Needs an account and a project of FABRIC, and fablib, which the extra `fabric` brings.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from farspan.cli.console import Console
from farspan.cli.plan_flags import plan_query, takes_question
from farspan.domain.fabric import LEASE_HOURS
from farspan.domain.problems import Refusal, command
from farspan.domain.units import counted, format_seconds

if TYPE_CHECKING:
    from farspan.app.fabric import ImportedSlice, Offers, PlannedSlice

HELP = "slices of the FABRIC testbed: offers, new, import, extend, delete"
#: Offers that are shown; `--json` has all.
OFFERS_SHOWN = 12


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    offers = actions.add_parser("offers", help="what could be requested for a run, ranked by plan")
    takes_question(offers, "the training", needs_model=True)
    offers.add_argument("--pick", type=int, default=1, metavar="N", help="the offer (default: 1)")
    new = actions.add_parser("new", help="make the slice of a cluster file, and wait for it")
    new.add_argument("cluster", metavar="CLUSTER", help="a file, or a name such as fabric/gat-amst")
    new.add_argument("--name", help="of the slice (default: that of the cluster file)")
    new.add_argument("--print", dest="only_print", action="store_true", help="request nothing")
    new.add_argument("--keep", action="store_true", help="keep a slice that does not become ready")
    for action in (offers, new):
        action.add_argument(
            "--resources", metavar="FILE", type=Path, help="a recorded summary; asks nobody"
        )
    brought = actions.add_parser("import", help="write the cluster file of a slice that is there")
    extend = actions.add_parser("extend", help="move the end of a slice's lease")
    delete = actions.add_parser("delete", help="delete a slice")
    for action in (brought, extend, delete):
        action.add_argument("slice", metavar="SLICE", help="its name or id")
    for action in (offers, new, brought):
        action.add_argument(
            "-o",
            dest="out",
            metavar="FILE",
            type=Path,
            help="the cluster file to write (default: SLICE-slice.yaml; of offers none)",
        )
    for action in (new, extend):
        action.add_argument(
            "--hours",
            type=int,
            default=LEASE_HOURS,
            help=f"of the lease from now (default: {LEASE_HOURS})",
        )


def run(given: argparse.Namespace, console: Console) -> None:
    actions = {
        "offers": run_offers,
        "new": run_new,
        "import": run_import,
        "extend": run_extend,
        "delete": run_delete,
    }
    actions[given.action](given, console)


def run_offers(given: argparse.Namespace, console: Console) -> None:
    from farspan.app import fabric
    from farspan.app.predictions import candidate_as_json

    listed = fabric.list_offers(plan_query(given), given.resources)
    _print_offers(listed, console)
    if given.out is not None:
        if not 1 <= given.pick <= len(listed.offers):
            raise Refusal(
                "out-of-range",
                what=f"there is no offer {given.pick}",
                where="--pick",
                fact=f"there are {len(listed.offers)}",
                remedy="--pick 1",
            )
        fabric.write_offer(listed.offers[given.pick - 1], given.out)
        console.write_line(f"{given.out}; next: {command('fabric', 'new', given.out)}")
    rows = []
    for offer in listed.offers:
        row = {
            **candidate_as_json(offer.best, offer.cluster),
            "cluster": offer.cluster.summary,
            "sites": [site.name for site in offer.cluster.sites],
            "free_in_s": offer.free_in_s,
        }
        rows.append(row)
    console.answer({"offers": rows, "no_calendar": listed.no_calendar})


def _print_offers(listed: Offers, console: Console) -> None:
    from farspan.cli.paint import text_width
    from farspan.planning.candidate import Candidate
    from farspan.planning.ranking import devices_line
    from farspan.report.tables import table_lines

    rows = []
    for number, offer in enumerate(listed.offers[:OFFERS_SHOWN], start=1):
        cluster = offer.cluster
        sites = ", ".join(site.name.upper() for site in cluster.sites)
        gpus = devices_line(cluster, range(len(cluster.devices)))
        free = f"in {format_seconds(offer.free_in_s)}" if offer.free_in_s else "now"
        technique = "does not fit"
        done_in = ""
        if isinstance(offer.best, Candidate):
            technique = offer.best.technique
            done_in = format_seconds(offer.time_s)
        rows.append((str(number), gpus, sites, free, technique, done_in))
    heads = ("#", "GPUs", "at", "free", "technique", "done in")
    if not rows:
        console.write_line("no GPU of FABRIC is free")
    else:
        for line in table_lines(heads, rows, right={0, 5}, width=text_width()):
            console.write_line(line)
    if len(listed.offers) > OFFERS_SHOWN:
        console.write_line(f"and {len(listed.offers) - OFFERS_SHOWN} more: --json")
    if listed.no_calendar is not None:
        console.write_facts(f"what is free later is unknown: {listed.no_calendar}")


def run_new(given: argparse.Namespace, console: Console) -> None:
    from farspan.app import fabric
    from farspan.cli.show_updates import Show
    from farspan.launch.fabric_client import FabricProcess

    if given.resources is not None and not given.only_print:
        raise Refusal(
            "usage",
            what="a slice is requested of the testbed itself",
            where="--resources",
            fact="a recorded summary may be out of date: it serves to look, with --print",
            remedy=command("fabric", "new", given.cluster),
        )
    with FabricProcess(given.resources) as process, Show(console) as show:
        planned = fabric.plan_slice(process, given.cluster, given.name, given.hours)
        for line in _describe_layout(planned):
            console.write_line(line)
        if given.only_print:
            console.answer({"layout": planned.layout})
            return
        path = given.out or Path(f"{planned.layout.name}-slice.yaml")
        made = fabric.make_slice(process, planned, path, show, keep=given.keep)
    _finish(made, console)


def _describe_layout(planned: PlannedSlice) -> list[str]:
    """Describe the VMs and networks that would be requested, a line each."""
    layout = planned.layout
    lines = [f"slice {layout.name}, {layout.image}, for {counted(planned.hours, 'hour')}"]
    for vm in layout.vms:
        gpus = " + ".join(f"{vm.gpus.count(model)} x {model}" for model in dict.fromkeys(vm.gpus))
        size = f"{vm.cores} cores, {vm.ram_gb} GB, disk of {vm.disk_gb} GB"
        lines.append(f"  {vm.name} at {vm.site}: {gpus or 'no GPU'}; {size}; {vm.address}")
    for network in layout.networks:
        lines.append(f"  {network.name}, {network.kind}: {', '.join(network.vms)}")
    return lines


def run_import(given: argparse.Namespace, console: Console) -> None:
    from farspan.app import fabric

    path = given.out or Path(f"{given.slice}-slice.yaml")
    _finish(fabric.import_slice(given.slice, path), console)


def _finish(made: ImportedSlice, console: Console) -> None:
    record = made.record
    console.write_line(f"{made.path}: {made.cluster.summary}, leased until {record.lease_end}")
    console.write_line(f"by hand: ssh -F {made.ssh_config} {record.vms[0].name}")
    up = command("train", "run.yaml", "--cluster", made.path, "--up")
    console.write_line(f"next: {up}")
    console.write_line(f"at the end: {command('fabric', 'delete', record.name)}")
    console.answer(
        {
            "slice": record.name,
            "id": record.id,
            "lease_end": record.lease_end,
            "cluster": str(made.path),
            "ssh_config": str(made.ssh_config),
        }
    )


def run_extend(given: argparse.Namespace, console: Console) -> None:
    from farspan.app.fabric import extend_slice

    end = extend_slice(given.slice, given.hours)
    console.write_line(f"{given.slice}: leased until {end}")
    console.write_line(f"its cluster file: {command('fabric', 'import', given.slice)}")
    console.answer({"slice": given.slice, "lease_end": end})


def run_delete(given: argparse.Namespace, console: Console) -> None:
    from farspan.app.fabric import delete_slice

    deleted = delete_slice(given.slice)
    what = "deleted" if deleted else "no living slice of yours has this name or id"
    console.write_line(f"{given.slice}: {what}")
    console.answer({"slice": given.slice, "deleted": deleted})
