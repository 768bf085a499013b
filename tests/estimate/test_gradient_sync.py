"""What sums between sites take of processors that also compute, by hand."""

import math

import msgspec
import pytest

from farspan.domain.cluster import Link
from farspan.domain.plan import GradSync
from farspan.estimate.estimate_plan import timed_stage
from farspan.estimate.gradient_sync import gradient_sync_times
from farspan.estimate.stage_time import stage_time
from tests.estimate.parts import cluster, costs, device, mesh, pipeline, plain, stage

CPU = device(kind="cpu", backend="cpu", bandwidth=1e9, flops={"fp32": 1e9})
#: A byte keeps a host busy for 10 ns.
LINK = Link(a="A", b="B", rtt_s=0.1, bandwidth=1e7, busy_s=1e-8)
MOVE_COST = 1.5
PASSES = {32: 3.0, 8: 10.0}


def sites(*counts, **changes):
    there = cluster(
        *([[CPU] * count] for count in counts), links=(msgspec.structs.replace(LINK, **changes),)
    )
    return costs(
        there,
        plain(cpu={"move_cost": MOVE_COST}, coding_passes=PASSES, direct=True, local_rate=1e8),
    )


def summed(using, bits=32, bucket_bytes=10**4, **changes):
    by = GradSync(topology="hierarchical", bits=bits, bucket_bytes=bucket_bytes)
    return gradient_sync_times(
        using, stage(mesh(0, 1, 2, 3), (2, 2, 2, 2), grad_sync=by, **changes), 1
    )


@pytest.mark.parametrize("bits", [32, 8])
def test_a_core_adds_inside_encodes_its_share_and_carries_what_crosses(bits):
    using = sites(2, 2)
    whole = 4 * using.graph.parameters()
    inside = 2 * whole / 2 / 1e8  # Each of two sends half, twice.
    coding = PASSES[bits] * whole / 2 / 1e9  # Both workers of a site encode half of the buckets.
    carried = 2 * whole * bits / 32 * 1e-8  # As much comes as goes.
    found = summed(using, bits)
    assert found.busy == pytest.approx(MOVE_COST * (inside + coding + carried))
    assert found.sent == {
        "A": pytest.approx(whole * bits / 32),
        "B": pytest.approx(whole * bits / 32),
    }


def test_every_message_of_every_round_wakes_its_threads():
    there = cluster([[CPU] * 2])

    def woken(zero, bucket_bytes, microbatches, ranks=(0, 1)):
        rows = (8,) * len(ranks)
        made = stage(mesh(*ranks), rows, zero=zero, grad_sync=GradSync(bucket_bytes=bucket_bytes))
        asked = [
            costs(there, plain(cpu={"move_cost": 1.0, "message_busy_s": each}))
            for each in (0.0, 0.5)
        ]
        plainly, busy = (gradient_sync_times(using, made, microbatches).busy for using in asked)
        return busy - plainly

    whole = 4 * costs(there, plain()).graph.parameters()
    assert woken(0, 10**9, 4) == pytest.approx(0.5)
    assert woken(0, 10**4, 4) == woken(1, 10**4, 4) == pytest.approx(0.5 * math.ceil(whole / 10**4))
    assert woken(0, 10**4, 4, ranks=(0,)) == 0
    assert woken(2, 10**4, 4) == pytest.approx(4 * 0.5 * math.ceil(whole / 10**4))


def test_single_bucket_is_encoded_by_one_worker_per_site():
    using = sites(2, 2)
    whole = 4 * using.graph.parameters()
    more = summed(using, bucket_bytes=10**9).busy - summed(using).busy
    assert more == pytest.approx(MOVE_COST * PASSES[32] * whole / 2 / 1e9)


def test_gradient_sync_takes_no_compute_time_from_devices_other_than_cpus():
    there = cluster([[device()] * 2], [[device()] * 2], links=(LINK,))
    using = costs(there, plain(cpu={"move_cost": MOVE_COST}, coding_passes=PASSES, direct=True))
    assert summed(using).busy == 0


def test_link_without_a_measured_or_engine_cpu_cost_takes_no_cpu_time():
    assert summed(sites(2, 2, busy_s=None)).busy < summed(sites(2, 2)).busy


def test_unmeasured_link_takes_the_cpu_time_that_the_engine_assumes_per_core():
    def busy(share, cpus):
        slow = CPU.but(share=share)
        there = cluster(
            [[slow] * 2], [[CPU] * 2], links=(msgspec.structs.replace(LINK, busy_s=None),)
        )
        there = there.with_hosts(
            lambda host: msgspec.structs.replace(host, cpus=cpus, local_rate=1e8)
        )
        return summed(
            costs(there, plain(cpu={"move_cost": 1.0, "socket_s": 1e-8}, direct=True))
        ).busy

    whole = 4 * costs(cluster([[CPU]]), plain()).graph.parameters()
    inside = whole / 1e8
    carried = 2 * whole * 1e-8
    assert busy(0.25, 2) == pytest.approx(inside + carried / 0.5)
    assert busy(1.0, 1) == pytest.approx(inside + carried)
    assert busy(1.0, 2) == pytest.approx(inside + carried / 2)


@pytest.mark.parametrize(("share", "cpus", "part"), [(1.0, 2, 1.0), (0.25, 2, 0.25), (1.0, 1, 0.5)])
def test_inside_a_host_processors_move_bytes_as_fast_as_they_are(share, cpus, part):
    there = cluster([[CPU.but(share=share), CPU]])
    there = there.with_hosts(lambda host: msgspec.structs.replace(host, cpus=cpus))
    network = costs(there, plain(cpu={"local_rate": 1e8})).network
    assert network.inside_s((0, 1), 1e8, 2) == pytest.approx(1 / part)


@pytest.mark.parametrize(("zero", "microbatches", "copies"), [(1, 3, 1), (2, 3, 3)])
def test_a_rank_that_sums_its_own_part_copies_it_adds_the_others_and_puts_it_in_place(
    zero, microbatches, copies
):
    using = costs(cluster([[CPU] * 2]), plain(cpu={"move_cost": 1.0}, local_rate=1e30))
    by = GradSync(bucket_bytes=10**4)
    found = gradient_sync_times(
        using, stage(mesh(0, 1), (6, 6), grad_sync=by, zero=zero), microbatches
    )
    part = 4 * using.graph.parameters() / 2
    assert found.busy == pytest.approx(copies * (2 + 3 + 2) * part / 1e9)


def test_fewer_bits_fill_no_fewer_buckets():
    using = sites(2, 2)
    assert summed(using, 8).each == summed(using, 32).each


def test_latency_of_the_last_gradient_bucket_is_always_exposed():
    """Of what goes straight the last bucket still has a whole way before it, however long the
    passes are."""
    using = sites(2, 2)
    by = GradSync(topology="hierarchical", bucket_bytes=10**4)
    one = stage(mesh(0, 1, 2, 3), (2, 2, 2, 2), grad_sync=by)
    found = gradient_sync_times(using, one, 1)
    assert found.round_trip_s == LINK.rtt_s / 2
    assert found.exposed(found.reduce, 1e9) == pytest.approx(
        found.round_trip_s + (found.reduce - found.round_trip_s) * found.last
    )
    assert found.exposed(found.reduce, 0.0) == found.reduce
    assert stage_time(using, one, [2] * 4, 1).exposed == pytest.approx(found.reduce + found.busy), (
        "in `plain` nothing overlaps"
    )


def test_sending_activations_takes_cpu_time_of_both_stages_in_both_passes():
    using = sites(1, 1)
    replica = pipeline([stage(mesh(0), (8,), (0, 3)), stage(mesh(1), (8,), (3, 6))], 4, (2, 1))
    size = using.graph.size("bsd", b=2, s=using.train.seq_len) * 4
    for index in (0, 1):
        alone = stage_time(using, replica.stages[index], [8], 4).passes
        found = timed_stage(replica, index, using).passes
        carried = MOVE_COST * size * LINK.busy_s
        assert (found.forward - alone.forward, found.backward - alone.backward) == pytest.approx(
            (carried, carried)
        )
