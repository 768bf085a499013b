"""Slices laid out from cluster files, offers of free GPUs, and cluster files of slices: all of it
without fablib."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from farspan.domain.cluster import Cluster
from farspan.domain.clusterfile import load_cluster
from farspan.domain.engine import load_engine
from farspan.domain.fabric import SliceRecord, SliceVm, VmCard
from farspan.domain.problems import Refusal
from farspan.launch.clusters import find_cluster
from farspan.launch.fabric_cluster import (
    cluster_of_slice,
    find_addresses,
    links_script,
    ssh_config,
)
from farspan.planning.fabric_layout import lay_out_slice, match_site
from farspan.planning.fabric_offers import (
    GpuHost,
    cluster_of_hosts,
    estimate_rtt,
    group_hosts,
    list_gpu_hosts,
    parse_time,
    rank_offers,
    site_locations,
)
from farspan.planning.plan_question import Question, model_of, train_of
from tests.fabric.resources import LOCATIONS, describe_machine, recorded_summary

SITES = list(LOCATIONS)
NOW = parse_time("2026-12-01 10:00:00 +0000")


def written(folder: Path, text: str) -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return load_cluster(path)


def test_slice_of_two_sites_is_two_vms_and_a_link():
    layout = lay_out_slice(find_cluster("fabric/gat-amst"), "gat-amst", SITES)
    first, second = layout.vms
    assert (first.name, first.site, first.gpus) == ("vm1", "GATECH", ("GPU_A30", "GPU_A30"))
    assert (first.cores, first.ram_gb, first.disk_gb) == (12, 32, 100)
    assert (second.site, second.address) == ("AMST", "192.168.77.2")
    (link,) = layout.networks
    assert (link.kind, link.vms) == ("L2STS", ("vm1", "vm2"))


def test_slice_of_one_site_is_bridged():
    layout = lay_out_slice(find_cluster("fabric/tacc-tacc"), "tacc", SITES)
    (bridge,) = layout.networks
    assert (bridge.kind, bridge.vms) == ("L2Bridge", ("vm1", "vm2"))


def test_each_two_vms_of_different_sites_have_a_link_of_their_own(tmp_path: Path):
    """L2STS takes several shared cards of one machine only where VMs are bound to machines."""
    cluster = written(
        tmp_path,
        "sites:\n"
        "  utah: {hosts: {vm1: {devices: [t4]}, vm2: {devices: [t4]}}}\n"
        "  mass: {hosts: {vm3: {devices: [rtx6000], memory: 64GB}}}\n",
    )
    layout = lay_out_slice(cluster, "three", SITES)
    kinds = {network.name: (network.kind, network.vms) for network in layout.networks}
    assert kinds == {
        "lan-utah": ("L2Bridge", ("vm1", "vm2")),
        "vm1-vm3": ("L2STS", ("vm1", "vm3")),
        "vm2-vm3": ("L2STS", ("vm2", "vm3")),
    }
    assert layout.vms[2].ram_gb == 64


def test_device_or_site_that_the_testbed_lacks_is_refused(tmp_path: Path):
    cluster = written(tmp_path, "sites: {utah: {hosts: {vm1: {devices: [h100]}}}}\n")
    with pytest.raises(Refusal, match="FABRIC has no h100") as refused:
        lay_out_slice(cluster, "x", SITES)
    assert refused.value.problem.code == "device-missing"
    cluster = written(tmp_path, "sites: {utrecht: {hosts: {vm1: {devices: [t4]}}}}\n")
    with pytest.raises(Refusal, match="FABRIC has no site 'utrecht'") as refused:
        lay_out_slice(cluster, "x", SITES)
    assert refused.value.problem.code == "cluster-invalid"
    assert match_site("bris", SITES) == "BRIST"
    cluster = written(tmp_path, "sites: {utah: {hosts: {a: {devices: [t4]}}}}\n")
    with pytest.raises(Refusal, match="FABRIC takes no VM of the name 'a'"):
        lay_out_slice(cluster, "x", SITES)


# -- offers
#   ------------------------------------------------------------------------------------------------


def test_free_gpus_are_those_that_nobody_has():
    hosts = list_gpu_hosts(recorded_summary(), None, NOW)
    free = {(host.site, host.kind): host.gpus for host in hosts}
    assert free == {
        ("UTAH", "rtx6000"): 2,
        ("UTAH", "t4"): 2,
        ("MASS", "rtx6000"): 2,
        ("TACC", "rtx6000"): 2,
        ("TACC", "t4"): 2,
        ("GATECH", "a30"): 2,
        ("AMST", "a30"): 2,
    }


def test_calendar_says_when_others_are_free():
    summary = recorded_summary()
    days = []
    for day, taken in ((2, 2), (3, 1), (4, 0)):
        machine = describe_machine("STAR", 1, "A40", 2, taken)
        days.append({"start": f"2026-12-0{day}T10:00:00+00:00", "hosts": [machine]})
    hosts = list_gpu_hosts(summary, {"interval": "day", "data": days}, NOW)
    (later,) = [host for host in hosts if host.free_in_s]
    assert (later.site, later.kind, later.gpus) == ("STAR", "a40", 1)
    assert later.free_in_s == 2 * 86400
    summary["sites"][4]["state"] = "Maint"
    assert len(list_gpu_hosts(summary, {"data": days}, NOW)) == len(hosts) - 1


@pytest.mark.parametrize(
    ("a", "b", "published_s"),
    [
        ("UTAH", "GPN", 0.0202),
        ("UTAH", "MASS", 0.0574),
        ("BRIST", "STAR", 0.0959),
        ("GATECH", "AMST", 0.103),
    ],
)
def test_round_trips_by_distance_are_near_those_that_were_published(
    a: str, b: str, published_s: float
):
    places = site_locations(recorded_summary())
    assert estimate_rtt(places[a], places[b]) == pytest.approx(published_s, rel=0.16)


def test_offers_are_ranked_by_plan_with_their_wait():
    places = site_locations(recorded_summary())
    hosts = [
        GpuHost(name="a", site="UTAH", kind="t4", gpus=2, cores=60, ram_gb=300),
        GpuHost(name="b", site="GATECH", kind="a30", gpus=2, cores=60, ram_gb=300),
        GpuHost(name="c", site="AMST", kind="a30", gpus=2, cores=8, ram_gb=16, free_in_s=86400),
    ]
    question = Question(model="gpt2m", tokens="16M")
    offers = rank_offers(
        hosts,
        places,
        model_of("gpt2m"),
        lambda model, cluster: train_of(question, model, cluster),
        load_engine("farspan"),
        ("data", "fsdp", "diloco"),
    )
    order = [tuple(site.name for site in offer.cluster.sites) for offer in offers]
    assert order[0] == ("gatech",) and order[-1] == ("amst",)
    assert ("gatech", "utah") in order
    assert offers[-1].time_s > 86400 > offers[-2].time_s
    assert offers[-1].time_s - 86400 == pytest.approx(offers[0].time_s)
    (vm,) = offers[-1].cluster.hosts
    assert (vm.cpus, vm.memory) == (8, 16 * 10**9)


def test_machines_that_differ_by_name_alone_are_offered_once():
    hosts = []
    for name in "abc":
        hosts.append(GpuHost(name=name, site="UTAH", kind="t4", gpus=2, cores=60, ram_gb=300))
    groups = group_hosts(hosts, {})
    assert sorted(map(len, groups)) == [1, 3]
    assert [host.name for host in cluster_of_hosts(hosts, {}).hosts] == ["utah1", "utah2", "utah3"]


# -- cluster files of slices
#   ------------------------------------------------------------------------------------------------


def recorded_slice(**changes: object) -> SliceRecord:
    """A slice of farspan's: two VMs in UTAH, one in MASS."""
    cards = {
        "a": (("lan-utah", 1), ("a-c", 2)),
        "b": (("lan-utah", 3), ("b-c", 4)),
        "c": (("a-c", 5), ("b-c", 6)),
    }
    vms = []
    for number, (name, joined) in enumerate(cards.items(), start=1):
        macs = [VmCard(network=network, mac=f"02:00:00:00:00:0{mac}") for network, mac in joined]
        vm = SliceVm(
            name=name,
            site="MASS" if name == "c" else "UTAH",
            user="ubuntu",
            management_ip=f"2001:db8::{number}",
            gpus=("GPU_TeslaT4",) * 2,
            cores=12,
            ram_gb=32,
            address=f"192.168.77.{number}",
            cards=tuple(macs),
        )
        vms.append(vm)
    fields: dict[str, object] = {
        "name": "three",
        "id": "1234",
        "state": "StableOK",
        "lease_end": "2026-12-02 10:00:00 +0000",
        "vms": tuple(vms),
        "networks": {"lan-utah": "L2Bridge", "a-c": "L2STS", "b-c": "L2STS"},
        "bastion": "bastion.fabric-testbed.net",
        "bastion_user": "ada_0001",
        "bastion_key": "/home/ada/work/bastion key",
        "slice_key": "/home/ada/work/slice_key",
    }
    return SliceRecord(**{**fields, **changes})


def test_hosts_of_a_slice_are_entered_through_the_bastion(tmp_path: Path):
    config = tmp_path / "three.ssh_config"
    config.write_text(ssh_config(recorded_slice(), tmp_path / "known"))
    rtts = {frozenset(("UTAH", "MASS")): 0.05}
    cluster = cluster_of_slice(recorded_slice(), config, 86400.0, rtts)
    assert cluster.summary == "6 t4 in 3 hosts at 2 sites"
    host = cluster.hosts[0]
    assert host.enter == ("ssh", "-F", str(config), "--", "a")
    assert (host.address, host.folder, host.memory) == ("192.168.77.1", "~/.cache/farspan", 32e9)
    assert [site.lease_s for site in cluster.sites] == [86400.0, 86400.0]
    assert cluster.links[0].rtt_s == 0.05
    # As OpenSSH reads it.
    asked = ["ssh", "-F", str(config), "-G", "c"]
    read = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    for line in (
        "hostname 2001:db8::3",
        "user ubuntu",
        "proxyjump fabric-bastion",
        "batchmode yes",
        "identityfile /home/ada/work/slice_key",
        "stricthostkeychecking accept-new",
    ):
        assert line in read
    asked[-1] = "fabric-bastion"
    read = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "hostname bastion.fabric-testbed.net" in read and "user ada_0001" in read
    assert "identityfile /home/ada/work/bastion key" in read
    assert "stricthostkeychecking accept-new" not in read


def test_slice_of_a_cluster_file_keeps_its_figures():
    given = find_cluster("fabric/gat-amst")
    vms = []
    for host, site in zip(given.hosts, ("GATECH", "AMST"), strict=True):
        vms.append(SliceVm(name=host.name, site=site, address=f"10.0.0.{len(vms)}"))
    record = recorded_slice(vms=tuple(vms))
    cluster = cluster_of_slice(record, Path("/x.ssh_config"), 3600.0, {}, given)
    assert cluster.links == given.links
    assert cluster.devices == given.devices
    assert [host.address for host in cluster.hosts] == ["10.0.0.0", "10.0.0.1"]


def test_foreign_slice_is_called_by_a_network_of_all_its_vms():
    vms = []
    for number, name in enumerate("ab"):
        card = VmCard(network="net", mac="02:00:00:00:00:00", address=f"192.168.1.{number}")
        vms.append(SliceVm(name=name, site="UTAH", cards=(card,)))
    record = recorded_slice(vms=tuple(vms), networks={"net": "L2Bridge"})
    assert find_addresses(record) == {"a": "192.168.1.0", "b": "192.168.1.1"}


def test_routed_networks_of_sites_reach_each_other():
    vms = []
    for number, name in enumerate("ab"):
        card = VmCard(network=f"net-{name}", address=f"10.128.{number}.2")
        vms.append(SliceVm(name=name, site=name, cards=(card,)))
    networks = {"net-a": "FABNetv4", "net-b": "FABNetv4"}
    record = recorded_slice(vms=tuple(vms), networks=networks)
    assert find_addresses(record) == {"a": "10.128.0.2", "b": "10.128.1.2"}


def test_vms_that_only_the_bastion_reaches_are_refused():
    vms = (SliceVm(name="a", site="UTAH"), SliceVm(name="b", site="MASS"))
    with pytest.raises(Refusal, match="do not reach each other") as refused:
        find_addresses(recorded_slice(vms=vms, networks={}))
    assert refused.value.problem.code == "host-unreachable"
    assert "behind the bastion" in refused.value.problem.fact


#: Three network namespaces joined as the slice is: a and b by a bridge's stead, each of them and c.
#: Arguments are the scripts of a, b and c; then each asks whether it reaches the others.
NAMESPACES = """
set -e
for vm in a b c; do unshare -n sleep 600 & eval "$vm=$!"; done
trap 'kill $a $b $c' EXIT
for pid in $a $b $c; do
  until [ "$(readlink /proc/$pid/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.05; done
done
join() {
  ip link add l$2 address 02:00:00:00:00:0$2 netns $1 type veth \\
    peer name l$4 address 02:00:00:00:00:0$4 netns $3
}
join $a 1 $b 3; join $a 2 $c 5; join $b 4 $c 6
for pid in $a $b $c; do nsenter -n -t $pid sh -c "$1"; shift; done
for pid in $a $b $c; do
  nsenter -n -t $pid "$PYTHON" -c "$ASK" 192.168.77.1 192.168.77.2 192.168.77.3
done
"""
#: A port that nobody listens to: who is there refuses, who is not is silent.
ASK = """
import socket, sys
for address in sys.argv[1:]:
    try:
        socket.create_connection((address, 9), timeout=60)
    except ConnectionRefusedError:
        print("reached", address)
"""


def test_links_reach_every_vm_by_its_one_address(tmp_path: Path):
    """The script that joins VMs, run on real network stacks."""
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode:
        pytest.skip("waits for a system that allows network namespaces")
    record = recorded_slice()
    # /sys shows the namespace of who mounted it.
    mount = "mount -t sysfs none /sys; ip link set lo up\n"
    scripts = [
        f"unshare -m sh -c {shlex.quote(mount + links_script(record, vm))}" for vm in record.vms
    ]
    done = subprocess.run(
        ["unshare", "-rnm", "bash", "-c", NAMESPACES, "bash", *scripts],
        capture_output=True,
        text=True,
        timeout=600,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHON": sys.executable, "ASK": ASK},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("reached") == 9, done.stdout + done.stderr
