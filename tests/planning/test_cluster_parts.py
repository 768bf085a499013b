"""Parts of a cluster that are tried: of those that are alike in all that a plan can meet, the
first."""

from __future__ import annotations

import pytest

from farspan.domain.cluster import Cluster, Host, Link, Site
from farspan.planning.cluster_parts import all_parts
from tests.planning.worlds import FAST


def one_site(*hosts: Host, links: tuple[Link, ...] = ()) -> Cluster:
    return Cluster(sites=(Site(name="s", hosts=hosts),), links=links)


def host(name: str, **figures) -> Host:
    return Host(name=name, devices=(FAST, FAST), **{"memory": 64 * 10**9, "cpus": 32, **figures})


def names(where: Cluster) -> set[str]:
    return {part.name for part in all_parts(where)}


def test_of_hosts_that_are_alike_the_first_is_tried():
    assert {"all devices", "a"} <= names(one_site(host("a"), host("b")))
    assert "b" not in names(one_site(host("a"), host("b")))


@pytest.mark.parametrize("figures", [{"memory": 7 * 10**9}, {"cpus": 2}, {"local_rate": 2.3e11}])
def test_hosts_that_differ_in_memory_cores_or_local_rate_are_both_tried(figures):
    assert {"a", "b"} <= names(one_site(host("a", **figures), host("b")))


def test_sites_with_links_of_their_hosts_own_are_tried():
    fast = Link(a="c", b="d", rtt_s=1e-5, bandwidth=1e11)
    sites = tuple(
        Site(name=name, hosts=tuple(map(host, hosts)))
        for name, hosts in (("one", "ab"), ("two", "cd"))
    )
    wan = Link(a="one", b="two", rtt_s=0.1)
    assert "two" in names(Cluster(sites=sites, links=(wan, fast)))
    assert "two" not in names(Cluster(sites=sites, links=(wan,)))
