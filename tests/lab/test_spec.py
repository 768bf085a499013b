"""lab.yaml: what it means, and what is refused before anything is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from farspan.domain.problems import EXIT_CODES, Refusal
from farspan_lab import spec
from farspan_lab.lab import Link
from tests.lab.conftest import parsed

TWO = "sites: {utah: {}, star: {}}\n"
BAD = [
    ("sites: {}", "out-of-range", "sites"),
    ("links: []", "out-of-range", "`sites`"),
    ("sites: {utah: {devices: 0}}", "out-of-range", "devices"),
    ("sites: {utah: {devices: []}}", "out-of-range", "devices"),
    ("sites: {utah: {devices: 1000}}", "out-of-range", "devices"),
    ("sites: {utah: {devices: [{speed: 0%}]}}", "out-of-range", "sites.utah.devices[0].speed"),
    ("sites: {utah: {devices: [{speed: 120%}]}}", "out-of-range", "sites.utah.devices[0].speed"),
    ("sites: {utah: {devices: [{memory: 10}]}}", "out-of-range", "sites.utah.devices[0].memory"),
    ("sites: {utah: {devices: [{memory: 2 elephants}]}}", "out-of-range", "2 elephants"),
    ("sites: {utah: {devices: [{cores: 0}]}}", "out-of-range", "cores"),
    ("sites: {utah: {device: 2}}", "unknown-key", "sites[...].devices"),
    ("sites: {localhost: {}}", "out-of-range", "'localhost'"),
    ("sites: {'../etc': {}}", "out-of-range", "'../etc'"),
    ("sites: {'a b': {}}", "out-of-range", "'a b'"),
    (TWO + "name: Lab/1", "out-of-range", "'Lab/1'"),
    (TWO + "name: ''", "out-of-range", "''"),
    (TWO + "links: [{between: [utah, stra], rtt: 1ms}]", "out-of-range", "write star"),
    (TWO + "links: [{between: [utah, utah], rtt: 1ms}]", "out-of-range", "itself"),
    (TWO + "links: [{between: [utah], rtt: 1ms}]", "out-of-range", "between"),
    (TWO + "links: [{between: [utah, star]}]", "out-of-range", "`rtt`"),
    (TWO + "links: [{between: [utah, star], rtt: -1ms}]", "out-of-range", "links[0].rtt"),
    (TWO + "links: [{between: [utah, star], rtt: 2h}]", "out-of-range", "links[0].rtt"),
    (TWO + "links: [{between: [utah, star], rtt: 57 parsecs}]", "out-of-range", "57 parsecs"),
    (TWO + "links: [{between: [utah, star], rtt: .nan}]", "out-of-range", "links[0].rtt"),
    (
        TWO + "links: [{between: [utah, star], rtt: 5ms, jitter: 6ms}]",
        "out-of-range",
        "links[0].jitter",
    ),
    (
        TWO + "links: [{between: [utah, star], rtt: 5ms, loss: 100%}]",
        "out-of-range",
        "links[0].loss",
    ),
    (
        TWO + "links: [{between: [utah, star], rtt: 5ms, bandwidth: 0}]",
        "out-of-range",
        "links[0].bandwidth",
    ),
    (
        TWO + "links: [{between: [utah, star], rtt: 5ms, bandwidth: 1e300}]",
        "out-of-range",
        "links[0].bandwidth",
    ),
    (
        TWO + "links: [{between: [utah, star], rtt: 5ms}, {between: [star, utah], rtt: 5ms}]",
        "out-of-range",
        "above",
    ),
    (TWO + "links: [{between: [utah, star], rtt: 5ms, lost: 1%}]", "unknown-key", "links[0].loss"),
    (TWO + "window: 1", "out-of-range", "window"),
    (TWO + "version: 2", "out-of-range", "version"),
]


@pytest.mark.parametrize(
    ("text", "code", "word"), BAD, ids=[text[-48:].strip() for text, _, _ in BAD]
)
def test_invalid_lab_file_is_refused_with_the_key(text, code, word):
    with pytest.raises(Refusal) as refusal:
        parsed(text)
    assert refusal.value.problem.code == code and code in EXIT_CODES
    assert word in str(refusal.value)


def test_links_go_both_ways_and_the_default_fills_the_gaps():
    lab = parsed(
        "sites: {a: {}, b: {}, c: {}}\n"
        "links: [{between: [b, a], rtt: 57ms, jitter: 2ms, bandwidth: 1Gbit/s, loss: 0.1%}]\n"
        "default_link: {rtt: 10ms}\n"
    )
    values = {"delay_s": 0.0285, "jitter_s": 0.001, "bandwidth": 125e6, "loss": 0.001}
    assert set(lab.links) == {
        Link(source="a", target="b", **values),
        Link(source="b", target="a", **values),
        *(Link(source=a, target=b, delay_s=0.005) for a, b in ("ac", "ca", "bc", "cb")),
    }
    assert lab.notes == ()


def test_a_window_fills_the_longest_link_unless_it_is_given():
    text = TWO + "links: [{between: [utah, star], rtt: 100ms, bandwidth: 1Gbit/s}]\n"
    assert parsed(text).window == 18_750_000
    assert parsed(text + "window: 3MB").window == 3_000_000


def test_labs_of_the_published_slices_have_their_round_trips_and_device_speeds():
    labs = {name: spec.load_lab(name) for name in spec.named()}
    assert {name: round(2000 * lab.links[0].delay_s, 1) for name, lab in labs.items()} == {
        "fabric/bris-star": 95.9,
        "fabric/gat-amst": 103.0,
        "fabric/tacc-tacc": 0.1,
        "fabric/utah-gpn": 20.2,
        "fabric/utah-mass": 57.4,
    }
    for lab in labs.values():
        assert [len(site.devices) for site in lab.sites] == [2, 2]
        assert all(sum(device.speed for device in site.devices) <= 0.9 for site in lab.sites)
    rtx, t4 = (site.devices[0].speed for site in labs["fabric/utah-gpn"].sites)
    assert abs(t4 / rtx - 5.6 / 15.7) < 0.005


def test_a_name_that_is_no_lab_brings_the_nearest(tmp_path: Path):
    with pytest.raises(Refusal, match="farspan lab up fabric/gat-amst"):
        spec.load_lab("fabric/gat-amts")
    with pytest.raises(Refusal, match="path-missing"):
        spec.load_lab(str(tmp_path / "lab.yaml"))
