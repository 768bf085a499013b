"""Kinds of devices that a cluster file declares, local networks of sites, and network cards of
hosts."""

import msgspec
import pytest

from farspan.domain.cluster import Cluster
from farspan.domain.cluster_json import load_cluster_json, save_cluster_json
from farspan.domain.clusterfile import load_cluster, save_cluster
from farspan.semantics.identity import cluster_hash
from tests.domain.test_cluster import KIND, LEAST, SHEET, read


def again(tmp_path, cluster: Cluster) -> Cluster:
    save_cluster(cluster, tmp_path / "again.yaml", "again")
    save_cluster_json(cluster, tmp_path / "again.json")
    assert load_cluster_json(tmp_path / "again.json") == cluster
    return load_cluster(tmp_path / "again.yaml")


def test_a_kind_of_the_file_is_used_as_one_of_the_catalogue(tmp_path):
    cluster = read(
        tmp_path,
        KIND.format(SHEET).replace(
            "[mygpu]", "[{kind: mygpu, count: 2}, {kind: mygpu, memory: 40GB}]"
        ),
    )
    one, _, small = cluster.devices
    assert (one.kind, one.backend, one.memory, one.sheet.bandwidth) == (
        "mygpu",
        "cuda",
        48 * 10**9,
        9e11,
    )
    assert (one.sheet.flops, one.sheet.dtypes, one.sheet.watts) == (
        {"bf16": 1.8e14, "fp32": 4e13},
        ("bf16", "fp32"),
        300,
    )
    assert small == one.but(memory=40 * 10**9)
    assert again(tmp_path, cluster) == cluster


@pytest.mark.parametrize("backend", ["cuda", "mps", "cpu"])
def test_a_kind_of_the_file_goes_before_the_catalogue_and_has_prices(tmp_path, backend):
    text = KIND.format(f"{SHEET}, price: 0.7, backend: {backend}") + "\nprices: {mygpu: 0.5}"
    for name in ("mygpu", "t4"):
        cluster = read(tmp_path, text.replace("mygpu", name))
        (device,) = cluster.devices
        assert (device.kind, device.backend, device.usd_per_hour) == (name, backend, 0.5)
        assert device.sheet.flops["bf16"] == 1.8e14
        assert again(tmp_path, cluster) == cluster


LAN = """
sites:
  a:
    lan: 100Gbit/s
    lan_rtt: 20us
    hosts:
      x: {nic: 25Gbit/s, devices: [t4]}
      y: {devices: [t4]}
      z: {devices: [t4]}
  b: {hosts: {u: {nic: 40Gbit/s, devices: [t4]}, v: {nic: 50Gbit/s, devices: [t4]}, w: {nic: 5Gbit/s, devices: [t4]}}}
  c: {hosts: {o: {devices: [t4]}, p: {devices: [t4]}}}
links:
  - {between: [a, b], rtt: 10ms, bandwidth: 30Gbit/s}
  - {between: [b, c], rtt: 10ms}
  - {between: [x, z], rtt: 5us, bandwidth: 200Gbit/s}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("a", "b", "gigabits", "rtt_s"),
    [
        ("x", "y", 25, 2e-5),
        ("y", "z", 100, 2e-5),
        ("x", "z", 200, 5e-6),  # The hosts' own link goes before cards and local network.
        ("u", "v", 40, 1e-4),  # Both cards are known, and the switch carries what they do.
        ("u", "w", 5, 1e-4),
        ("o", "p", 10, 1e-4),
        ("y", "v", 30, 0.01),
        ("x", "u", 25, 0.01),
        ("y", "w", 5, 0.01),
        ("x", "o", 25, 0.02),
        ("v", "o", None, 0.01),
    ],
)
def test_a_local_network_and_cards_decide_what_hosts_exchange(tmp_path, a, b, gigabits, rtt_s):
    cluster = read(tmp_path, LAN)
    for ends in ((a, b), (b, a)):
        link = cluster.link(*ends)
        assert (link.bandwidth and link.bandwidth * 8 / 1e9, link.rtt_s) == pytest.approx(
            (gigabits, rtt_s)
        )
    assert again(tmp_path, cluster) == cluster


def test_a_card_below_what_an_unknown_line_is_taken_to_carry_counts(tmp_path):
    cluster = read(tmp_path, LAN.replace("5Gbit/s", "0.5Gbit/s"))
    assert cluster.link("w", "o").bandwidth == pytest.approx(0.5e9 / 8)


def test_cluster_hash_covers_networks_cards_and_the_catalogues_figures(tmp_path):
    cluster = read(tmp_path, LEAST)
    variants = [
        cluster,
        read(tmp_path, LAN),
        cluster.with_hosts(lambda host: msgspec.structs.replace(host, nic=1e9)),
        cluster.with_devices(lambda host, i: host.devices[i].but(measured={"fp32": 1e9})),
        cluster.with_devices(lambda host, i: host.devices[i].but(dtypes=("tf32",))),
    ]
    assert len(set(map(cluster_hash, variants))) == len(variants)
    paced = cluster.with_devices(lambda host, i: host.devices[i].but(pace=1.5))
    assert cluster_hash(paced) == cluster_hash(cluster)
