"""A slice of FABRIC as a cluster: hosts entered through the testbed's bastion, addresses that they
all reach, and the lease."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from farspan.domain.cluster import Cluster, Host, Link, Site
from farspan.domain.clusterfile import REMOTE_FOLDER
from farspan.domain.fabric import GPU_MODELS, SliceRecord, SliceVm, fabric_device
from farspan.domain.problems import Refusal, command
from farspan.launch.hosts import ALIVE_S, CONNECT_S, MAX_UNANSWERED

#: Networks whose members all reach one another, across sites (fablib's L3 services).
ROUTED = ("FABNetv4", "FABNetv6")
KIND_OF_MODEL = {model: kind for kind, model in GPU_MODELS.items()}
#: The bastion in the ssh configuration of a slice.
BASTION = "fabric-bastion"


def ssh_config(record: SliceRecord, known_hosts: Path) -> str:
    """Return the ssh configuration that leads to a slice's VMs, as fablib's own does: through the
    bastion, with the user's keys.

    VMs are new, so their host keys are remembered at the first entry; a key that has changed is
    refused. The bastion's must be known.
    """
    lines = [
        f"# ssh to the VMs of FABRIC's slice {record.name}: ssh -F THIS_FILE VM",
        f"Host {BASTION}",
        f"  HostName {record.bastion}",
        f"  User {record.bastion_user}",
        f"  IdentityFile {_ssh_word(record.bastion_key)}",
        "  IdentitiesOnly yes",
    ]
    for vm in record.vms:
        lines += [
            f"Host {vm.name}",
            f"  HostName {vm.management_ip}",
            f"  User {vm.user}",
            f"  ProxyJump {BASTION}",
            f"  HostKeyAlias {record.id}-{vm.name}",
        ]
    lines += [
        f"Host * !{BASTION}",
        f"  IdentityFile {_ssh_word(record.slice_key)}",
        "  IdentitiesOnly yes",
        "  StrictHostKeyChecking accept-new",
        f"  UserKnownHostsFile {_ssh_word(str(known_hosts))}",
        "Host *",
        "  BatchMode yes",
        f"  ConnectTimeout {CONNECT_S}",
        f"  ServerAliveInterval {ALIVE_S}",
        f"  ServerAliveCountMax {MAX_UNANSWERED}",
    ]
    return "\n".join(lines) + "\n"


def _ssh_word(path: str) -> str:
    return f'"{path}"' if " " in path else path


def cluster_of_slice(
    record: SliceRecord,
    config: Path,
    lease_s: float,
    rtts: Mapping[frozenset[str], float],
    given: Cluster | None = None,
) -> Cluster:
    """Return a slice's VMs as a cluster, with the figures of the cluster file that it was made of,
    if there is one.

    `config` is its ssh configuration, `rtts` the seconds of round trips between two of its sites.
    Raises Refusal (host-unreachable) for VMs that do not reach each other.
    """
    addresses = find_addresses(record)
    enter = {vm.name: ("ssh", "-F", str(config), "--", vm.name) for vm in record.vms}
    if given is not None:

        def enter_vm(host: Host) -> Host:
            return replace(
                host,
                address=addresses[host.name],
                enter=enter[host.name],
                folder=host.folder or REMOTE_FOLDER,
            )

        entered = given.with_hosts(enter_vm)
        leased = tuple(replace(site, lease_s=lease_s) for site in entered.sites)
        return replace(entered, sites=leased)
    sites: dict[str, list[Host]] = {}
    for vm in record.vms:
        memory = None if vm.ram_gb is None else vm.ram_gb * 10**9
        devices = tuple(fabric_device(KIND_OF_MODEL[model]) for model in vm.gpus)
        host = Host(
            name=vm.name,
            devices=devices,
            cpus=vm.cores,
            memory=memory,
            address=addresses[vm.name],
            enter=enter[vm.name],
            folder=REMOTE_FOLDER,
        )
        sites.setdefault(vm.site, []).append(host)
    taken = {vm.name for vm in record.vms}
    site_names = {site: _site_name(site, taken) for site in sites}
    links = []
    for a, b in itertools.combinations(sites, 2):
        rtt_s = rtts.get(frozenset((a, b)))
        if rtt_s is not None:
            links.append(Link(a=site_names[a], b=site_names[b], rtt_s=rtt_s, origin="derived"))
    leased = tuple(
        Site(name=site_names[site], hosts=tuple(hosts), lease_s=lease_s)
        for site, hosts in sites.items()
    )
    return Cluster(sites=leased, links=tuple(links))


def _site_name(site: str, taken: set[str]) -> str:
    """Return a site's name in the cluster file: a host may not have the same."""
    name = site.lower()
    return f"{name}-site" if name in taken else name


def find_addresses(record: SliceRecord) -> dict[str, str]:
    """Return the address of each VM that all others reach: its own in a slice of farspan's, else
    that in a network of all VMs, else that in routed networks. Raises Refusal."""
    vms = record.vms
    own = {vm.name: vm.address for vm in vms if vm.address}
    if len(own) == len(vms):
        return own
    for network in record.networks:
        members = _addresses_in(record, (network,))
        if len(members) == len(vms):
            return members
    routed = tuple(name for name, kind in record.networks.items() if kind in ROUTED)
    members = _addresses_in(record, routed)
    if len(members) == len(vms):
        return members
    if len(vms) == 1:
        return {vms[0].name: str(vms[0].management_ip)}
    lacking = [vm.name for vm in vms if vm.name not in members]
    raise Refusal(
        "host-unreachable",
        what=f"VMs of {record.name} do not reach each other",
        where=f"slice {record.name}",
        fact=(
            f"{', '.join(lacking)}: no address in a network of all VMs; all are behind the bastion,"
            " which lets in ssh alone"
        ),
        remedy=f"{command('fabric', 'new', 'cluster.yaml')} makes a slice with networks",
    )


def _addresses_in(record: SliceRecord, networks: tuple[str, ...]) -> dict[str, str]:
    addresses: dict[str, str] = {}
    for vm in record.vms:
        for card in vm.cards:
            if card.network in networks and card.address:
                addresses.setdefault(vm.name, card.address)
    return addresses


def links_script(record: SliceRecord, vm: SliceVm) -> str:
    """Return a shell script, for root, that joins a VM to the networks of a slice of farspan's.

    Every card has the VM's one address, and a route to each VM behind it: so a VM is called the
    same from everywhere.
    """
    addresses = find_addresses(record)
    lines = ["#!/bin/sh", "# The links of a slice, by farspan; run at every start.", "set -e"]
    for card in vm.cards:
        if card.network is None:
            continue
        peers = [
            addresses[other.name]
            for other in record.vms
            if other.name != vm.name and card.network in _networks_of(other)
        ]
        lines += [
            f"for card in /sys/class/net/*; do  # {card.network}",
            f'  [ "$(cat "$card/address")" = {shlex.quote(card.mac.lower())} ] || continue',
            '  device="${card##*/}"',
            '  ip link set "$device" up',
            f'  ip address replace {addresses[vm.name]}/32 dev "$device"',
        ]
        for peer in peers:
            lines.append(f'  ip route replace {peer}/32 dev "$device" src {addresses[vm.name]}')
        lines.append("done")
    return "\n".join(lines) + "\n"


def _networks_of(vm: SliceVm) -> set[str | None]:
    return {card.network for card in vm.cards}
