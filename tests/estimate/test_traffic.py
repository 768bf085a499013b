"""Bytes and seconds of a step's exchanges, by hand and against the estimate that they are part
of."""

from __future__ import annotations

import pytest

from farspan.estimate.estimate_plan import step
from farspan.estimate.stage_time import stage_time
from farspan.estimate.traffic import between_sites, traffic
from farspan.planning.why import costs_of
from tests.planning.worlds import ranking


def planned(one, technique, where="all devices"):
    found = next(c for c in one.candidates if (c.technique, c.where) == (technique, where))
    return found, costs_of(found.plan, one.cluster)


def test_a_ring_of_four_sends_one_and_a_half_tensors_over_each_hop():
    one = ranking("FF", "SS")
    found, costs = planned(one, "data")
    (stage,) = found.plan.replicas[0].stages
    size = costs.graph.parameters() * stage.grad_sync.bits / 8
    (crossing,) = between_sites(traffic(found.plan, costs), costs.network).values()
    # Flat: 2 (n - 1) / n on each of two hops between the sites; by site: 2 (2 - 1) / 2 on each of
    # two.
    each = 1.5 if stage.grad_sync.topology == "flat" else 1.0
    assert crossing == pytest.approx({"gradients": 2 * each * size})


@pytest.mark.parametrize("technique", ["data", "zero2", "diloco", "pipeshard"])
def test_sites_send_what_the_estimate_charges_them_for(technique):
    one = ranking("FF", "SS", allow=("data", "zero2", "diloco", "pipeshard"))
    candidates = [c for c in one.candidates if c.technique == technique]
    for candidate in candidates:
        costs = costs_of(candidate.plan, one.cluster)
        found = traffic(candidate.plan, costs)
        assert all(e.seconds >= e.latency_s >= 0 for e in found)
        sites = {
            costs.network.sites[r]
            for s in candidate.plan.replicas
            for t in s.stages
            for r in t.mesh.ranks
        }
        crossing = between_sites(found, costs.network)
        assert bool(crossing) == (len(sites) > 1)


def test_exchanges_of_one_ring_take_what_the_stage_waits_for():
    one = ranking("FF", "SS")
    found, costs = planned(one, "data")
    (replica,) = found.plan.replicas
    (stage,) = replica.stages
    took = stage_time(costs, stage, stage.rows, replica.microbatches)
    (exchange,) = traffic(found.plan, costs)
    hidden = costs.engine.overlap * took.passes.backward
    assert took.exposed == pytest.approx(exchange.seconds - hidden, rel=0.01)
    assert step(replica, costs).communication == pytest.approx(took.exposed)
