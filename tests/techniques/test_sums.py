"""How fast gradients leave a site: by hand."""

from __future__ import annotations

import random

import pytest

from farspan.domain.plan import Mesh
from farspan.techniques._search.one_stage import plans, wan_bandwidth_share
from tests.techniques.worlds import cluster, random_model, task

LINE = 1e9 / 8


def flat(devices: int) -> Mesh:
    return Mesh(ranks=tuple(range(devices)), shape=(devices,), axes=("data",))


@pytest.mark.parametrize(
    ("sites", "bandwidth", "share"),
    # Those of a site that all send at once have 1.44 times the line together, and none more than
    # all of it.
    [((1, 1), LINE, 1.0), ((2, 2), LINE, 0.72), ((3, 1), LINE, 0.48), ((2, 2), None, None)],
)
def test_connections_between_sites_share_the_line(sites, bandwidth, share):
    world = cluster(*((("fast",) * count,) for count in sites), bandwidth=bandwidth)
    asked = task(random_model(random.Random(0)), world)
    found = wan_bandwidth_share(asked, flat(sum(sites)), "hierarchical")
    assert found == (None if share is None else pytest.approx(share * LINE))
    assert wan_bandwidth_share(asked, flat(sum(sites)), "flat") is None, (
        "a ring crosses a line once"
    )


def test_only_what_goes_straight_is_held_back():
    """A ring crosses the line once; sums of whole sites go over every worker's own connection."""
    world = cluster((("fast", "fast"),), (("fast", "fast"),))
    made = plans(task(random_model(random.Random(0)), world), "data", flat(4))
    rates = {
        sync.topology: sync.wan_rate
        for plan in made
        for sync in (plan.replicas[0].stages[0].grad_sync,)
    }
    assert rates == {"flat": None, "hierarchical": pytest.approx(0.72 * LINE)}
