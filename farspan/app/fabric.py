"""Slices of the FABRIC testbed: what could be requested, a slice of a cluster file, a cluster file
of a slice, its lease and its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from farspan.app.clusters import find_cluster
from farspan.app.preflight_checks import refuse_file, unused_file
from farspan.app.updates import Note, Progress, ignore_update
from farspan.domain.cluster import Cluster
from farspan.domain.clusterfile import save_cluster
from farspan.domain.engine import load_engine
from farspan.domain.fabric import (
    LEASE_HOURS,
    MAX_LEASE_HOURS,
    Resources,
    SliceCheck,
    SliceLayout,
    SliceRecord,
)
from farspan.domain.problems import Refusal, command
from farspan.domain.run import make_cache_folder
from farspan.domain.struct_files import write_atomically
from farspan.domain.units import format_seconds
from farspan.launch.fabric_client import FabricProcess
from farspan.launch.fabric_cluster import cluster_of_slice, find_addresses, ssh_config
from farspan.planning.fabric_layout import lay_out_slice
from farspan.planning.fabric_offers import (
    FabricOffer,
    estimate_rtt,
    list_gpu_hosts,
    parse_time,
    rank_offers,
    site_locations,
)

if TYPE_CHECKING:
    from farspan.app.predictions import PlanQuery

#: Slices are up within some minutes, or within half an hour where the testbed is busy.
SLICE_READY_S = 2700.0
SLICE_POLL_S = 20.0
MAX_UNANSWERED_POLLS = 9
#: States of a slice (fablib's Constants): what is waited for, and what never becomes that.
READY_STATES = ("StableOK", "ModifyOK")
FAILED_STATES = ("StableError", "ModifyError", "AllocatedError", "Closing", "Dead")
#: Of the ssh configuration next to a slice's cluster file.
SSH_CONFIG_SUFFIX = ".ssh_config"
#: fablib's form of a time.
TIME_FORMAT = "%Y-%m-%d %H:%M:%S %z"


class Offers(msgspec.Struct, frozen=True, kw_only=True):
    """What could be requested for a run, the fastest first; `no_calendar` is why nothing is known
    of later days."""

    offers: tuple[FabricOffer, ...]
    no_calendar: str | None


class PlannedSlice(msgspec.Struct, frozen=True, kw_only=True):
    """A slice that may be requested, and the cluster that it will be."""

    layout: SliceLayout
    cluster: Cluster
    hours: int


class ImportedSlice(msgspec.Struct, frozen=True, kw_only=True):
    """A slice as a cluster file."""

    record: SliceRecord
    cluster: Cluster
    path: Path
    ssh_config: Path


def list_offers(query: PlanQuery, recorded: Path | None = None) -> Offers:
    """Rank what FABRIC's free GPUs, and those free later, would do for a run; `recorded` is a file
    with a summary of its resources."""
    from farspan.planning.plan_question import model_of

    query.check()
    model = model_of(query.question.model)
    with FabricProcess(recorded) as process:
        resources = process.ask("list_resources", Resources)
    hosts = list_gpu_hosts(resources.summary, resources.calendar, time.time())
    places = site_locations(resources.summary)
    offers = rank_offers(hosts, places, model, query.train, load_engine("farspan"), query.allow)
    reason = None if resources.no_calendar is None else resources.no_calendar["fact"]
    return Offers(offers=tuple(offers), no_calendar=reason)


def write_offer(offer: FabricOffer, path: Path) -> None:
    """Write an offer as a cluster file, for `make_slice`."""
    refuse_file(path, command("fabric", "offers", "-o", unused_file(path)))
    save_cluster(
        offer.cluster,
        path,
        "What farspan fabric offers found on FABRIC; round trips are estimated from distances.",
    )


def check_hours(hours: int) -> None:
    """Refuse a lease that the testbed does not grant."""
    if not 1 <= hours <= MAX_LEASE_HOURS:
        raise Refusal(
            "out-of-range",
            what=f"a lease of {hours} hours is out of range",
            where="--hours",
            fact=f"FABRIC grants 1 to {MAX_LEASE_HOURS} hours",
            remedy=f"--hours {LEASE_HOURS}",
        )


def plan_slice(
    process: FabricProcess, name: str, slice_name: str | None = None, hours: int = LEASE_HOURS
) -> PlannedSlice:
    """Lay out the slice of a cluster file and have fablib validate it. Raises Refusal with when,
    and where else, where GPUs are not free."""
    check_hours(hours)
    cluster = find_cluster(name, as_written=True)
    resources = process.ask("list_resources", Resources)
    sites = [site["name"] for site in resources.summary["sites"]]
    layout = lay_out_slice(cluster, slice_name or Path(name).stem, sites)
    check = process.ask("check_slice", SliceCheck, layout=layout, hours=hours)
    if check.taken:
        raise Refusal(
            "run-exists",
            what=f"you have a slice {layout.name} already",
            where="FABRIC",
            fact="two slices of one name cannot be distinguished",
            remedy=command("fabric", "import", layout.name),
        )
    if check.errors:
        raise _no_room(layout, check, resources, name)
    return PlannedSlice(layout=layout, cluster=cluster, hours=hours)


def _no_room(layout: SliceLayout, check: SliceCheck, resources: Resources, name: str) -> Refusal:
    """Return the refusal of a slice that there is no room for: when there is, and where else."""
    now = time.time()
    facts = [f"{vm}: {error.rstrip('.')}" for vm, error in check.errors.items()]
    if check.slot is not None:
        facts.append(f"free in {format_seconds(max(0.0, parse_time(check.slot) - now))}")
    refused = [vm for vm in layout.vms if vm.name in check.errors and vm.gpus]
    free = list_gpu_hosts(resources.summary, resources.calendar, now)
    elsewhere = []
    later = []
    for host in free:
        wanted = any(len(vm.gpus) <= host.gpus for vm in refused)
        where = f"{host.gpus} {host.kind} at {host.site}"
        if wanted and host.free_in_s:
            later.append(f"{where} in {format_seconds(host.free_in_s)}")
        elif wanted:
            elsewhere.append(where)
    if elsewhere:
        facts.append(f"free now: {', '.join(dict.fromkeys(elsewhere))}")
    elif later:
        facts.append(f"free later: {', '.join(dict.fromkeys(later))}")
    elif resources.no_calendar is not None and check.slot is None:
        facts.append(f"when is unknown: {resources.no_calendar['fact']}")
    return Refusal(
        "device-missing",
        what=f"FABRIC has no room for {', '.join(check.errors)} now",
        where=name,
        fact="; ".join(facts),
        remedy=command("fabric", "offers", "--model", "gpt2"),
    )


def make_slice(
    process: FabricProcess,
    planned: PlannedSlice,
    path: Path,
    progress: Progress = ignore_update,
    *,
    ready_s: float = SLICE_READY_S,
    keep: bool = False,
) -> ImportedSlice:
    """Request a slice, wait until its VMs are ready, and write its cluster file.

    Unless `keep`, whatever goes wrong, an interrupt too, deletes the slice. Raises Refusal
    (slice-failed, fabric-unusable).
    """
    from farspan.launch.fabric_setup import set_up_vms

    layout = planned.layout
    refuse_file(path, command("fabric", "new", "cluster.yaml", "-o", path.with_stem("other")))
    try:
        created = process.ask("create_slice", dict[str, str], layout=layout, hours=planned.hours)
        progress(Note(f"{layout.name}: requested, {created['id']}"))
        record = wait_for_slice(process, created["id"], ready_s, progress)
        imported = write_slice(record, path, {}, planned.cluster)
        set_up_vms(record, imported.cluster, lambda text: progress(Note(text)))
    except BaseException:
        path.unlink(missing_ok=True)
        path.absolute().with_suffix(SSH_CONFIG_SUFFIX).unlink(missing_ok=True)
        if not keep:
            _clean_up(process, layout.name, progress)
        raise
    return imported


def _clean_up(process: FabricProcess, name: str, progress: Progress) -> None:
    """Delete what was made of a slice; a request that was refused has made nothing."""
    try:
        answer = process.ask("delete_slice", dict[str, list[str]], wanted=name)
        if answer["deleted"]:
            progress(Note(f"{name}: did not become ready, and is deleted"))
    except Refusal as refusal:
        fix = command("fabric", "delete", name)
        progress(Note(f"{name} may be left: {refusal.problem.fact}; {fix}"))


def wait_for_slice(
    process: FabricProcess,
    wanted: str,
    ready_s: float,
    progress: Progress = ignore_update,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> SliceRecord:
    """Wait until the testbed has made a slice. Raises Refusal (slice-failed) where it fails, or is
    not done within `ready_s` seconds."""
    deadline = clock() + ready_s
    shown = None
    unanswered = 0
    while True:
        is_late = clock() > deadline
        errors: list[str] = []
        try:
            record = process.ask("read_slice", SliceRecord, wanted=wanted)
            state = record.state or "requested"
            if state in READY_STATES:
                return record
            unanswered = 0
            errors = [*record.errors, *(vm.error for vm in record.vms if vm.error)]
        except Refusal as refusal:
            # A service that does not answer may do so soon.
            unanswered += 1
            if unanswered > MAX_UNANSWERED_POLLS:
                raise
            state = f"unknown: {refusal.problem.fact}"
        if state != shown:
            shown = state
            progress(Note(f"slice: {state}"))
        if state in FAILED_STATES or is_late:
            late = f"still {state} after {format_seconds(ready_s)}" if is_late else state
            raise Refusal(
                "slice-failed",
                what=f"slice {wanted} did not become ready",
                where="FABRIC",
                fact="; ".join(dict.fromkeys([late, *errors]))[:600],
                remedy=command("fabric", "offers", "--model", "gpt2"),
            )
        sleep(SLICE_POLL_S)


def import_slice(name: str, path: Path) -> ImportedSlice:
    """Write the cluster file of a living slice, made by farspan or not."""
    refuse_file(path, command("fabric", "import", name, "-o", unused_file(path)))
    with FabricProcess() as process:
        record = process.ask("read_slice", SliceRecord, wanted=name)
        places = site_locations(process.ask("list_resources", Resources).summary)
    rtts = {}
    for a in places:
        for b in places:
            rtts[frozenset((a, b))] = estimate_rtt(places[a], places[b])
    return write_slice(record, path, rtts)


def write_slice(
    record: SliceRecord,
    path: Path,
    rtts: Mapping[frozenset[str], float],
    given: Cluster | None = None,
) -> ImportedSlice:
    """Write a slice's ssh configuration next to its cluster file, and then that. Raises Refusal
    (host-unreachable, not-running) for a slice that cannot be entered."""
    away = [vm.name for vm in record.vms if not vm.management_ip or not vm.user]
    if away or not record.vms:
        raise Refusal(
            "not-running",
            what=f"slice {record.name} has no VMs that can be entered",
            where="FABRIC",
            fact=f"it is {record.state}; without an address: {', '.join(away) or 'all'}",
            remedy=command("fabric", "delete", record.name),
        )
    find_addresses(record)
    lease_s = (
        max(1.0, parse_time(record.lease_end or "") - time.time()) if record.lease_end else 1.0
    )
    config = path.absolute().with_suffix(SSH_CONFIG_SUFFIX)
    known_hosts = make_cache_folder("fabric") / "known_hosts"
    write_atomically(config, ssh_config(record, known_hosts).encode())
    cluster = cluster_of_slice(record, config, lease_s, rtts, given)
    save_cluster(
        cluster,
        path,
        f"Slice {record.name} of FABRIC, leased until {record.lease_end}.\n"
        f"Its hosts by hand: ssh -F {config} {record.vms[0].name}",
    )
    return ImportedSlice(record=record, cluster=cluster, path=path, ssh_config=config)


def extend_slice(name: str, hours: int) -> str:
    """Have a slice's lease end in `hours`; return that time as the testbed writes it."""
    check_hours(hours)
    end = datetime.fromtimestamp(time.time() + 3600 * hours, UTC).strftime(TIME_FORMAT)
    with FabricProcess() as process:
        process.ask("renew_slice", dict[str, Any], wanted=name, end=end)
    return end


def delete_slice(name: str) -> int:
    """Delete the living slices of a name, or the one of an id; return how many there were."""
    with FabricProcess() as process:
        answer = process.ask("delete_slice", dict[str, list[str]], wanted=name)
    return len(answer["deleted"])
