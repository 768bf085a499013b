"""Cluster files: what they mean, what they are refused for, and links that nobody wrote down."""

import itertools
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.domain import catalog
from farspan.domain.cluster import (
    Cluster,
    DataSheet,
    Device,
    DeviceTimes,
    Host,
    Link,
    MatmulRate,
    Site,
    WorkerSlot,
)
from farspan.domain.cluster_json import load_cluster_json, save_cluster_json
from farspan.domain.clusterfile import load_cluster, save_cluster
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import content_hash
from farspan.launch import clusters

T4 = Device(kind="t4", backend="cuda", memory=2**30)
LEAST = (
    "sites: {utah: {hosts: {gpu1: {devices: [rtx6000, rtx6000]}}}, star: {hosts: {gpu2: "
    "{devices: [a30, t4]}}}}\n"
)


def read(tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return load_cluster(path)


def test_the_least_file_takes_the_rest_from_the_catalogue(tmp_path):
    cluster = read(tmp_path, LEAST)
    assert [device.kind for device in cluster.devices] == ["rtx6000", "rtx6000", "a30", "t4"]
    rtx, _, a30, t4 = cluster.devices
    assert (rtx.memory, t4.memory) == (24_000_000_000, 16_000_000_000)
    assert "bf16" in a30.sheet.dtypes
    assert "bf16" not in rtx.sheet.dtypes + t4.sheet.dtypes, "Turing has no bf16"
    assert rtx.origin == "catalogue"
    assert cluster.link("gpu1", "gpu2") is None, "nobody said anything about this link"


def test_prices_of_a_device_a_site_and_the_file_go_before_the_catalogue_in_that_order(tmp_path):
    cluster = read(
        tmp_path,
        "sites:\n  a: {price: 0.25, hosts: {x: {devices: [t4, {kind: t4, price: 0.1}]}}}\n"
        "  b: {hosts: {y: {devices: [t4, a40]}}}\nprices: {t4: 0.2}\n",
    )
    listed = catalog.load_devices()["a40"].price
    assert [device.usd_per_hour for device in cluster.devices] == [
        0.25,
        0.1,
        0.2,
        listed.usd_per_hour,
    ]


def test_gpus_come_before_the_other_devices_of_their_host(tmp_path):
    """Their places are what CUDA numbers them by."""
    least = "{kind: cpu-avx2, memory: 1GB}"
    more = "{kind: cpu-avx2, memory: 2GB}"
    cluster = read(
        tmp_path, f"sites: {{a: {{hosts: {{x: {{devices: [{least}, t4, {more}, a30]}}}}}}}}"
    )
    (host,) = cluster.hosts
    assert [device.kind for device in host.devices] == ["t4", "a30", "cpu-avx2", "cpu-avx2"]
    assert [device.memory for device in host.devices[2:]] == [10**9, 2 * 10**9]


def test_a_device_held_to_a_share_has_that_share_of_what_its_kind_reaches(tmp_path):
    held = "{kind: cpu-avx2, memory: 1GB, share: 25%}"
    given = "{kind: cpu-avx2, memory: 1GB, share: 25%, flops: {fp32: 3e9}, bandwidth: 1GB/s}"
    whole = "{kind: cpu-avx2, memory: 1GB}"
    cluster = read(
        tmp_path, f"sites: {{a: {{hosts: {{x: {{devices: [{whole}, {held}, {given}]}}}}}}}}"
    )
    free, quarter, said = cluster.devices
    assert quarter.sheet.flops == {dtype: rate / 4 for dtype, rate in free.sheet.flops.items()}
    assert quarter.sheet.bandwidth == free.sheet.bandwidth / 4
    assert (said.sheet.flops, said.sheet.bandwidth) == ({"fp32": 3e9}, 1e9)
    save_cluster(cluster, tmp_path / "again.yaml", "again")
    assert load_cluster(tmp_path / "again.yaml") == cluster


def test_comment_of_a_saved_cluster_stays_a_comment(tmp_path):
    cluster = read(tmp_path, "sites: {a: {hosts: {x: {devices: [a30]}}}}")
    for end in ("\n", "\r", "\x85", "\u2028", "\u2029"):
        save_cluster(cluster, tmp_path / "again.yaml", f"x failed:{end}sites: {{}}{end}kinds: 1")
        assert load_cluster(tmp_path / "again.yaml") == cluster


#: A file with one kind of its own, and a data sheet that is whole.
KIND = "kinds: {{mygpu: {{{}}}}}\nsites: {{a: {{hosts: {{x: {{devices: [mygpu]}}}}}}}}"
SHEET = "memory: 48GB, bandwidth: 900GB/s, flops: {bf16: 180e12, fp32: 40e12}, watts: 300"


def test_quantities_are_read_in_their_units(tmp_path):
    cluster = read(
        tmp_path,
        "sites:\n  a: {egress: 0.09, lease: 24h, hosts: {x: {devices: [t4], memory: 32GB}}}\n"
        "  b: {hosts: {y: {devices: [t4]}}}\n"
        "links: [{between: [a, b], rtt: 57ms, bandwidth: 1Gbit/s, window: 4MB, loss: 0.1%, jitter: "
        "2ms}]\n",
    )
    link = cluster.link("x", "y")
    found = (link.rtt_s, link.bandwidth, link.window, link.loss, link.jitter_s)
    assert found == pytest.approx((0.057, 125e6, 4e6, 0.001, 0.002))
    assert link.origin == "given"
    assert cluster.sites[0].lease_s == 86400
    assert cluster.sites[0].egress_usd_per_byte == pytest.approx(9e-11)
    assert cluster.hosts[0].memory == 32 * 10**9


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("sites: {a: {hosts: {x: {devices: [rtx600]}}}}", "cluster-invalid", ["rtx6000"]),
        ("sites: {a: {hosts: {x: {devices: []}}}}", "cluster-invalid", ["no devices"]),
        ("sites: {}", "cluster-invalid", ["no devices"]),
        (
            "sites: {a: {hosts: {x: {devices: [t4]}}}, b: {hosts: {x: {devices: [t4]}}}}",
            "cluster-invalid",
            ["'x'"],
        ),
        (LEAST + "links: [{between: [utah, mars], rtt: 1ms}]", "cluster-invalid", ["mars"]),
        (LEAST + "links: [{between: [utah, utah], rtt: 1ms}]", "cluster-invalid", ["itself"]),
        (
            LEAST + "links: [{between: [utah, star], rtt: 1ms}, {between: [star, utah], rtt: 2ms}]",
            "cluster-invalid",
            ["links[1]"],
        ),
        (LEAST + "links: [{between: [utah, star], rtt: -5ms}]", "out-of-range", ["links[0].rtt"]),
        (LEAST + "links: [{between: [utah, star], rtt: 0}]", "out-of-range", ["links[0].rtt"]),
        (LEAST + "links: [{between: [utah, star], rtt: 5 parsec}]", "out-of-range", ["parsec"]),
        (
            LEAST + "links: [{between: [utah, star], rtt: 57}]",
            "out-of-range",
            ["set links[0].rtt: 57ms or 57s"],
        ),
        (
            "sites: {a: {lease: 24, hosts: {x: {devices: [t4]}}}}",
            "out-of-range",
            ["set sites.a.lease: 24h or 24s"],
        ),
        (LEAST + "links: [{between: [utah, star], rtt: 2h}]", "out-of-range", ["links[0].rtt"]),
        (
            LEAST + "links: [{between: [utah, star], rtt: 1ms, bandwidth: 900Tbit/s}]",
            "out-of-range",
            ["bandwidth"],
        ),
        (
            LEAST + "links: [{between: [utah, star], rtt: 1ms, loss: 120%}]",
            "out-of-range",
            ["loss"],
        ),
        (LEAST + "prices: {t44: 1}", "cluster-invalid", ["t4"]),
        ("sites: {a: {price: -1, hosts: {x: {devices: [t4]}}}}", "out-of-range", ["sites.a.price"]),
        ("sites: {a: {hosts: {x: {devices: [{kind: t4, count: 0}]}}}}", "out-of-range", ["count"]),
        ("sites: {a: {hosts: {x: {devices: [t4], folder: data}}}}", "out-of-range", ["folder"]),
        ("sites: {a: {hosts: {x: {devices: [cpu-avx2]}}}}", "cluster-invalid", ["memory"]),
        ("sites: {a: {hosts: {x: {devises: [t4]}}}}", "unknown-key", ["devices"]),
        (
            "sites: {a: {hosts: {x: {devices: [{kind: t4, memory: -4GB}]}}}}",
            "out-of-range",
            ["memory"],
        ),
        (
            "sites: {a: {hosts: {x: {devices: [{kind: t4, memory: 1e400GB}]}}}}",
            "out-of-range",
            ["memory"],
        ),
        (
            "sites: {a: {hosts: {x: {devices: [{kind: t4, flops: {fp32: 0}}]}}}}",
            "out-of-range",
            ["flops"],
        ),
        ("sites: {a: {hosts: {x: {devices: [{kind: t4, price: -1}]}}}}", "out-of-range", ["price"]),
        (
            "sites: {a: {hosts: {x: {devices: [{kind: t4, threads: 0}]}}}}",
            "out-of-range",
            ["threads"],
        ),
        ("sites: {a: {hosts: {x: {cpus: 0, devices: [t4]}}}}", "out-of-range", ["cpus"]),
        (LEAST + "prices: {t4: -5}", "out-of-range", ["prices"]),
        (
            LEAST + "links: [{between: [utah, star], rtt: 1ms, bandwidth: 1Gb/s}]",
            "out-of-range",
            ["1Gbit/s"],
        ),
        (
            LEAST + "links: [{between: [utah, star], rtt: 1ms, in_flight: {1: 0}}]",
            "out-of-range",
            ["in_flight"],
        ),
        (
            LEAST + "links: [{between: [utah, gpu2], rtt: 57ms}]",
            "cluster-invalid",
            ["a site to a host"],
        ),
        (
            LEAST + "links: [{between: [utah, gpu1], rtt: 57ms}]",
            "cluster-invalid",
            ["a site to a host"],
        ),
        (
            "sites: {a: {lan: 900Tbit/s, hosts: {x: {devices: [t4]}}}}",
            "out-of-range",
            ["sites.a.lan"],
        ),
        (
            "sites: {a: {lan: 1Gb/s, hosts: {x: {devices: [t4]}}}}",
            "out-of-range",
            ["sites.a.lan", "1Gbit/s"],
        ),
        ("sites: {a: {lan: 0, hosts: {x: {devices: [t4]}}}}", "out-of-range", ["sites.a.lan"]),
        (
            "sites: {a: {lan_rtt: 2h, hosts: {x: {devices: [t4]}}}}",
            "out-of-range",
            ["sites.a.lan_rtt"],
        ),
        (
            "sites: {a: {hosts: {x: {nic: fast, devices: [t4]}}}}",
            "out-of-range",
            ["sites.a.hosts.x.nic"],
        ),
        ("sites: {a: {hosts: {x: {nik: 25Gbit/s, devices: [t4]}}}}", "unknown-key", ["nic"]),
        (
            KIND.format("bandwidth: 900GB/s, flops: {bf16: 1e14}"),
            "cluster-invalid",
            ["kinds.mygpu", "memory"],
        ),
        (
            KIND.format("memory: 48GB, flops: {bf16: 1e14}"),
            "cluster-invalid",
            ["kinds.mygpu", "bandwidth"],
        ),
        (
            KIND.format("memory: 48GB, bandwidth: 900GB/s"),
            "cluster-invalid",
            ["kinds.mygpu", "flops"],
        ),
        (
            KIND.format("memory: 48 parsec, bandwidth: 900GB/s"),
            "out-of-range",
            ["kinds.mygpu.memory"],
        ),
        (
            KIND.format("memory: 48GB, bandwidth: 900GB/s, flops: {fp8: 1}"),
            "out-of-range",
            ["flops", "fp16"],
        ),
        (KIND.format("memory: 48GB, bandwith: 900GB/s"), "unknown-key", ["bandwidth"]),
        (
            KIND.format(SHEET).replace("[mygpu]", "[mygpv]"),
            "cluster-invalid",
            ["sites.a.hosts.x.devices[0]", "mygpu"],
        ),
    ],
)
def test_cluster_file_with_a_bad_value_is_refused_by_key(tmp_path, text, code, words):
    with pytest.raises(Refusal) as refusal:
        read(tmp_path, text)
    assert refusal.value.problem.code == code
    assert all(word in str(refusal.value) for word in words)


def test_every_cluster_that_ships_reads_back_from_what_is_written(tmp_path):
    assert len(clusters.shipped_clusters()) == 8
    for name in clusters.shipped_clusters():
        cluster = clusters.find_cluster(name)
        path = tmp_path / "again.yaml"
        save_cluster(cluster, path, "again")
        assert load_cluster(path).named(name) == cluster


def test_measured_figures_survive_a_file(tmp_path):
    cpu = Device(
        kind="cpu-avx2",
        backend="cpu",
        memory=2**30,
        sheet=DataSheet(flops={"fp32": 64e9}, bandwidth=1.25e10, watts=9.0),
        slot=WorkerSlot(threads=2, share=0.4, turn_s=0.002),
        usd_per_hour=0.5,
        origin="measured",
        times=DeviceTimes(rates=(MatmulRate(m=8, k=4, n=2, flops={"fp32": 1.5e9}),)),
    )
    host = Host(
        name="x",
        devices=(cpu,),
        enter=("sh", "-c"),
        folder="/tmp/x",
        interface="eth7",
        cpus=2,
        memory=2**31,
    )
    link = Link(
        a="a",
        b="b",
        rtt_s=0.0574,
        bandwidth=1.2e8,
        jitter_s=1e-4,
        window=4 << 20,
        in_flight={1: 5, 16: 70},
        transfer_s={4096: 0.03},
        loss=0.001,
        busy_s=1.7e-9,
        origin="measured",
    )
    other = Host(name="y", devices=(cpu,), enter=())
    cluster = Cluster(
        sites=(Site(name="a", hosts=(host,)), Site(name="b", hosts=(other,), lease_s=60.0)),
        links=(link,),
        allreduce_s={8: 0.1, 4_000_000: 1.5},
    )
    path = tmp_path / "measured.yaml"
    save_cluster(cluster, path, "again")
    assert load_cluster(path) == cluster


def test_the_published_slices_have_the_published_round_trips():
    asked = {
        "tacc-tacc": 0.1,
        "utah-gpn": 20.2,
        "utah-mass": 57.4,
        "bris-star": 95.9,
        "gat-amst": 103.0,
    }
    for name, rtt_ms in asked.items():
        cluster = clusters.find_cluster(f"fabric/{name}")
        assert cluster.link("vm1", "vm2").rtt_s == pytest.approx(rtt_ms / 1000)
        assert len(cluster.devices) == 4


def test_the_first_devices_of_a_cluster():
    assert len(clusters.find_cluster("slm-cost/h100:12").devices) == 12
    assert [len(host.devices) for host in clusters.find_cluster("slm-cost/h100:12").hosts] == [8, 4]
    assert len(clusters.find_cluster("fabric/gat-amst:2").sites) == 1
    for name, code in (("fabric/gat-amst:5", "device-missing"), ("fabric/gat-ams", "path-missing")):
        with pytest.raises(Refusal) as refusal:
            clusters.find_cluster(name)
        assert refusal.value.problem.code == code
        assert "fabric/gat-amst" in refusal.value.problem.remedy


def test_a_way_over_a_site_that_goes_stays():
    sites = tuple(Site(name=f"s{i}", hosts=(Host(name=f"h{i}", devices=(T4,)),)) for i in range(4))
    links = tuple(
        Link(a=a, b=b, rtt_s=rtt)
        for a, b, rtt in (("s0", "s3", 0.01), ("s3", "s1", 0.02), ("s1", "s2", 0.5))
    )
    whole = Cluster(sites=sites, links=links)
    first = whole.only((0, 1, 2))
    for a, b in (("h0", "h1"), ("h1", "h2"), ("h0", "h2")):
        assert first.link(a, b).rtt_s == whole.link(a, b).rtt_s
    assert whole.only((0, 1, 3)).links == links[:2] and whole.only(range(4)) == whole


def test_hosts_of_one_site_have_a_derived_link():
    site = Site(name="a", hosts=tuple(Host(name=name, devices=()) for name in "xy"))
    link = Cluster(sites=(site,)).link("x", "y")
    assert (link.origin, link.rtt_s) == ("derived", 1e-4)


@given(
    st.dictionaries(
        st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(lambda pair: pair[0] < pair[1]),
        st.tuples(st.floats(1e-4, 1), st.floats(1e3, 1e9)),
        max_size=10,
    )
)
def test_a_derived_link_is_the_shortest_way(edges):
    sites = tuple(Site(name=f"s{i}", hosts=(Host(name=f"h{i}", devices=()),)) for i in range(5))
    links = tuple(
        Link(a=f"s{a}", b=f"s{b}", rtt_s=rtt, bandwidth=rate)
        for (a, b), (rtt, rate) in edges.items()
    )
    cluster = Cluster(sites=sites, links=links)
    by_pair = {frozenset(pair): value for pair, value in edges.items()}
    for a, b in itertools.combinations(range(5), 2):
        ways = [
            [by_pair[frozenset(step)] for step in itertools.pairwise((a, *middle, b))]
            for count in range(4)
            for middle in itertools.permutations(set(range(5)) - {a, b}, count)
            if all(frozenset(step) in by_pair for step in itertools.pairwise((a, *middle, b)))
        ]
        link = cluster.link(f"h{a}", f"h{b}")
        if not ways:
            assert link is None
        elif frozenset((a, b)) in by_pair:
            assert (link.rtt_s, link.origin) == (by_pair[frozenset((a, b))][0], "given")
        else:
            shortest = min(sum(rtt for rtt, _ in way) for way in ways)
            assert link.rtt_s == pytest.approx(shortest)
            as_short = [
                way for way in ways if sum(rtt for rtt, _ in way) == pytest.approx(shortest)
            ]
            assert link.bandwidth in [min(rate for _, rate in way) for way in as_short]
            assert link.origin == "derived"


@pytest.mark.parametrize("names", list(itertools.permutations("abcd")))
def test_of_ways_that_are_as_short_the_widest_is_taken_whatever_the_names(names):
    start, narrow, wide, goal = names
    sites = tuple(
        Site(name=name, hosts=(Host(name=f"h{name}", devices=()),)) for name in sorted(names)
    )
    links = tuple(
        Link(a=a, b=b, rtt_s=0.02, bandwidth=rate)
        for a, b, rate in (
            (start, narrow, 1e9),
            (start, wide, 1e9),
            (narrow, goal, 1e8),
            (wide, goal, 5e8),
        )
    )
    for order in (links, links[::-1]):
        assert Cluster(sites=sites, links=order).link(f"h{start}", f"h{goal}").bandwidth == 5e8


def test_every_catalogue_figure_has_a_source_and_a_date():
    for kind, device in catalog.load_devices().items():
        assert device.source, kind
        assert device.checked.startswith("202"), kind
        assert device.price is None or (
            device.price.source and device.price.checked.startswith("202")
        ), kind
        assert device.flops and all(1e9 < rate < 1e16 for rate in device.flops.values()), kind
        assert device.bandwidth and device.backend == (
            "cpu" if kind.startswith("cpu") else device.backend
        ), kind
        if device.backend == "cuda":
            assert device.memory and device.watts and device.interconnect and device.match, kind
        elif device.backend == "mps":
            assert device.memory is None and device.interconnect.kind == "unified", kind
    kinds = catalog.load_devices()
    assert {
        "rtx6000",
        "t4",
        "a30",
        "a40",
        "v100-16",
        "v100-32",
        "a10g",
        "l4",
        "rtx3090",
        "rtx4090",
        "a6000",
        "l40s",
        "a100-40",
        "a100-80",
        "h100",
        "h200",
        "b200",
    } <= set(kinds)
    assert all("bf16" not in kinds[kind].flops for kind in ("rtx6000", "t4", "v100-16", "v100-32"))


def test_tf32_is_slower_than_bf16_and_needs_the_matrix_units():
    kinds = catalog.load_devices()
    for kind, device in kinds.items():
        if "tf32" in device.flops:
            assert device.flops["fp32"] * 0.99 <= device.flops["tf32"] <= device.flops["bf16"], kind
            assert (
                "tf32" in device.device(kind).sheet.dtypes
                and "tf32" not in device.device(kind).sheet.precisions
            )
    assert all(
        "tf32" not in kinds[kind].flops
        for kind in ("rtx6000", "t4", "v100-32", "p100-16", "mi250x", "m4")
    )
    for kind, peak in (
        ("a100-40", 156e12),
        ("h100", 494.7e12),
        ("rtx3090", 35.6e12),
        ("rtx4090", 82.6e12),
    ):
        assert kinds[kind].flops["tf32"] == peak, kind


def test_a_measured_product_is_of_the_sheets_order_and_has_its_source():
    counted = 0
    for kind, device in catalog.load_devices().items():
        # GeForce cards clock higher than the sheet says, by a fifth at most.
        most = 1.25 if kind.startswith("rtx") else 1.0
        for dtype, best in device.measured.items():
            assert best.source and best.checked.startswith("202"), (kind, dtype)
            assert 0.5 < best.flops / device.flops[dtype] <= most, (kind, dtype)
            counted += 1
    assert counted > 40
    assert catalog.load_devices()["h100"].device("h100").sheet.measured["bf16"] == 794.5e12


def test_catalogue_interconnects_have_a_rate_and_a_ring_rate_below_it():
    for name, entry in catalog.load_interconnects().items():
        assert entry.source and entry.checked.startswith("202") and entry.shares, name
    for kind, device in catalog.load_devices().items():
        joined = device.device(kind, 2**34).sheet.interconnect
        if joined is None:
            assert device.backend == "cpu", kind
        elif joined.kind == "unified":
            assert catalog.ring_rate(joined, 2) is None, kind
        else:
            assert 1e9 < joined.rate < 2e12, kind
            assert all(
                0 < catalog.ring_rate(joined, count) <= joined.rate for count in (2, 4, 8, 16)
            ), kind
    kinds = catalog.load_devices()
    a100, rtx = (kinds[kind].device(kind).sheet.interconnect for kind in ("a100-80", "rtx4090"))
    assert catalog.ring_rate(a100, 8) == 0.77 * a100.rate > catalog.ring_rate(a100, 2)
    assert catalog.ring_rate(rtx, 2) < catalog.ring_rate(msgspec.structs.replace(rtx, p2p=True), 2)


def test_a_drivers_name_and_a_label_of_ray_stand_for_one_kind_only():
    entries = catalog.load_devices().items()
    for names in (
        [n for _, d in entries for n in d.match],
        [n for k, d in entries for n in (k, *d.labels)],
    ):
        assert len(names) == len(set(names)), names
    for kind, device in entries:
        assert all(catalog.find_kind(name) == kind for name in device.match), kind
        assert all(
            label == label.lower() and catalog.find_kind_of_label(label) == kind
            for label in (kind, *device.labels)
        )
    labels = ("A100-80G", "M1-Max", "Quadro-RTX-6000", "A100", "V100", "")
    assert [catalog.find_kind_of_label(label) for label in labels] == [
        "a100-80",
        "m1-max",
        "rtx6000",
        None,
        None,
        None,
    ]


def test_measured_products_and_interconnects_are_read_scaled_and_written_again(tmp_path):
    given = (
        "{kind: h100, measured: {bf16: 7.0e+14}, interconnect: {kind: pcie, rate: 64GB/s, p2p: "
        "false}}"
    )
    cluster = read(
        tmp_path,
        f"sites: {{a: {{hosts: {{h: {{devices: [h100, {given}, "
        "{kind: h100, share: 50%}, {kind: h100, flops: {tf32: 4.0e+14}}]}}}}\n",
    )
    plain, own, half, other = (device.sheet for device in cluster.devices)
    assert plain.measured["bf16"] == 794.5e12 and plain.interconnect.rate == 450e9
    assert own.measured == {"bf16": 7e14} and own.flops == plain.flops
    assert (own.interconnect.kind, own.interconnect.rate, own.interconnect.p2p) == (
        "pcie",
        64e9,
        False,
    )
    assert half.measured["bf16"] == 794.5e12 / 2 and half.flops["tf32"] == 494.7e12 / 2
    assert other.measured == {} and other.precisions == ("fp32",), (
        "another peak is of another device"
    )
    save_cluster(cluster, tmp_path / "c.yaml", "test")
    assert load_cluster(tmp_path / "c.yaml").devices == cluster.devices
    with pytest.raises(Refusal, match=r"interconnect\.rate"):
        read(
            tmp_path,
            "sites: {a: {hosts: {h: {devices: [{kind: h100, interconnect: {kind: pcie, rate: "
            "64}}]}}}}\n",
        )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Quadro RTX 6000", "rtx6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA TITAN RTX", "titan-rtx"),
        ("GeForce RTX 2080 Ti", "rtx2080ti"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Apple M4 Max", "m4-max"),
        ("NVIDIA GeForce RTX 4080 SUPER", None),
        ("NVIDIA A40", "a40"),
        ("NVIDIA A400", None),
        ("NVIDIA A40-48Q", None),
        ("Tesla T4", "t4"),
        ("Tesla T40 24GB", None),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_a_drivers_name_finds_its_kind_and_no_other(name, kind):
    assert catalog.find_kind(name) == kind


def test_a_measured_cluster_has_one_hash_whatever_the_order_of_its_tables():
    def measured(streams):
        link = Link(
            a="utah", b="star", rtt_s=0.1, in_flight={count: 100 * count for count in streams}
        )
        return Cluster(
            sites=(Site(name="utah", hosts=()),), links=(link,), allreduce_s={64: 1.0, 8: 0.1}
        )

    assert content_hash(measured((1, 16, 2))) == content_hash(measured((16, 2, 1)))
    assert content_hash(measured((1, 2))) != content_hash(measured((1, 4)))


def test_hosts_and_devices_change_each_in_its_place():
    here = clusters.find_cluster("fabric/utah-gpn")
    changed = here.with_devices(lambda host, i: host.devices[i].but(threads=i + len(host.name)))
    wanted = [i + len(host.name) for host in here.hosts for i in range(len(host.devices))]
    assert [device.slot.threads for device in changed.devices] == wanted and len(wanted) == 4
    assert changed.links == here.links and here.with_hosts(lambda host: host) == here
    odd = here.only({1, 2})
    assert odd.devices == here.devices[1:3] and odd.links == here.links


def test_cluster_json_has_all_figures_of_a_device_side_by_side_and_reads_back(tmp_path):
    cluster = read(tmp_path, LEAST).with_devices(
        lambda host, i: host.devices[i].but(pace=1.5, threads=i + 1, share=0.5)
    )
    save_cluster_json(cluster, path := tmp_path / "cluster.json")
    assert load_cluster_json(path) == cluster
    content = json.loads(path.read_text())
    device = content["sites"][0]["hosts"][0]["devices"][0]
    assert {"kind", "flops", "rates", "pace", "threads"} <= device.keys()
    device["wings"] = 2
    path.write_text(json.dumps(content))
    with pytest.raises(Refusal, match="wings"):
        load_cluster_json(path)
    path.write_text('{"sites": [7, {"hosts": {"devices": []}}]}')
    with pytest.raises(Refusal, match="out-of-range"):
        load_cluster_json(path)


def test_tf32_is_fp32_on_devices_that_lack_it_if_others_have_it():
    kinds = {name: catalog.load_devices()[name].device(name) for name in ("a100-40", "v100-16")}

    def lacking(precision, *names):
        host = Host(name="h", devices=tuple(kinds[name] for name in names))
        return Cluster(sites=(Site(name="s", hosts=(host,)),)).lacking(precision)

    assert lacking("tf32", "a100-40", "v100-16") == [] == lacking("tf32", "a100-40")
    assert lacking("tf32", "v100-16") == ["v100-16"] == lacking("bf16", "a100-40", "v100-16")


def test_cluster_is_the_same_whatever_the_user_calls_it():
    host = Host(name="gpu1", devices=(T4,))
    cluster = Cluster(sites=(Site(name="utah", hosts=(host,)),))
    assert cluster.named("mine.yaml") == cluster.named("runs/papers/cluster.json") == cluster
    assert cluster.named("mine.yaml").name == "mine.yaml"
    other = cluster.with_hosts(lambda host: msgspec.structs.replace(host, python="python3.12"))
    assert other.named("mine.yaml") != cluster.named("mine.yaml")
