"""The slice of the FABRIC testbed that a cluster file means: a VM for each host, a bridge in each
site of several, and a link between each two VMs of different sites."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

from farspan.domain.cluster import Cluster, Host
from farspan.domain.escapes import shell_word
from farspan.domain.fabric import (
    GPU_MODELS,
    MIN_DISK_GB,
    VM_CORES,
    VM_RAM_GB,
    NetworkLayout,
    SliceLayout,
    VmLayout,
)
from farspan.domain.problems import Refusal
from farspan.domain.suggest import advise

#: It has NVIDIA's driver as packages, and a Python that farspan runs with is a download away.
IMAGE = "default_ubuntu_22"
#: Addresses of VMs: a private network of the slice's own.
NETWORK = "192.168.77"
MAX_VMS = 250
#: A name in a slice (fim's base_sliver); those of networks are made of two.
VM_NAME = re.compile(r"[\w.-]{2,120}")


def lay_out_slice(cluster: Cluster, name: str, sites: Sequence[str]) -> SliceLayout:
    """Lay out a cluster's hosts as a slice at these sites of the testbed. Raises Refusal for a site
    or a device that the testbed does not have.

    L2STS joins two sites, and takes several shared cards of one machine only where each VM is bound
    to another. So each pair of VMs has a link of its own.
    """
    if len(cluster.hosts) > MAX_VMS:
        raise Refusal(
            "out-of-range",
            what="the slice would have too many VMs",
            where=name,
            fact=f"it has {len(cluster.hosts)}, its addresses are for {MAX_VMS}",
            remedy="make a smaller cluster file",
        )
    vms: list[VmLayout] = []
    networks = []
    for site in cluster.sites:
        testbed_site = match_site(site.name, sites)
        for host in site.hosts:
            address = f"{NETWORK}.{len(vms) + 1}"
            vms.append(_lay_out_vm(host, testbed_site, address))
        if len(site.hosts) > 1:
            members = tuple(host.name for host in site.hosts)
            lan = NetworkLayout(name=f"lan-{testbed_site.lower()}", kind="L2Bridge", vms=members)
            networks.append(lan)
    for a, b in itertools.combinations(vms, 2):
        if a.site != b.site:
            link = NetworkLayout(name=f"{a.name}-{b.name}", kind="L2STS", vms=(a.name, b.name))
            networks.append(link)
    return SliceLayout(name=name, image=IMAGE, vms=tuple(vms), networks=tuple(networks))


def match_site(name: str, sites: Sequence[str]) -> str:
    """Return the testbed's site of a name, or of the beginning of one: `utah`, `gat` for GATECH."""
    typed = name.upper()
    if typed in sites:
        return typed
    longer = [site for site in sites if site.startswith(typed)]
    if len(longer) == 1:
        return longer[0]
    raise Refusal(
        "cluster-invalid",
        what=f"FABRIC has no site {name!r}",
        where=f"sites.{name}",
        fact=f"its sites: {', '.join(sorted(sites))}",
        remedy=advise(typed, sites, verb=f"in place of {shell_word(name)} write", synonyms=()),
    )


def _lay_out_vm(host: Host, site: str, address: str) -> VmLayout:
    if not VM_NAME.fullmatch(host.name):
        raise Refusal(
            "cluster-invalid",
            what=f"FABRIC takes no VM of the name {host.name!r}",
            where=f"host {host.name}",
            fact="names have two characters or more: letters, digits, _, - and .",
            remedy=f"rename {shell_word(host.name)}, such as vm-1",
        )
    gpus = []
    for device in host.devices:
        if device.backend == "cpu":
            continue
        if device.kind not in GPU_MODELS:
            raise Refusal(
                "device-missing",
                what=f"FABRIC has no {device.kind}",
                where=f"host {host.name}",
                fact=f"its GPUs: {', '.join(GPU_MODELS)}",
                remedy=advise(device.kind, GPU_MODELS, verb="write", fix="write devices: [t4]"),
            )
        gpus.append(GPU_MODELS[device.kind])
    ram_gb = VM_RAM_GB if host.memory is None else math.ceil(host.memory / 1e9)
    return VmLayout(
        name=host.name,
        site=site,
        gpus=tuple(gpus),
        cores=host.cpus or VM_CORES,
        ram_gb=ram_gb,
        disk_gb=MIN_DISK_GB,
        address=address,
    )
