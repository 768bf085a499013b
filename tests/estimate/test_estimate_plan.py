"""A step of any plan: sums of gradients, pipelines' edges and ties, replicas, money and energy by
hand; and what holds for random plans that no technique emits."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan import models
from farspan.domain import catalog
from farspan.domain.cluster import Cluster, Host, Link, MatmulRate, Site
from farspan.domain.cost import OVERHEAD_SHARE
from farspan.domain.engine import load_engine
from farspan.domain.model import train_flops_per_token
from farspan.domain.plan import Edge, GradSync, Plan, Replica, Sync
from farspan.domain.struct_files import convert
from farspan.estimate.between_stages import Tie, edges, tie
from farspan.estimate.devices import devices
from farspan.estimate.estimate_plan import estimate, sent_by, step, with_loss
from farspan.estimate.network import NoLink
from farspan.estimate.scaling_law import scaling_law_loss
from farspan.estimate.stage_time import stage_time
from farspan.estimate.token_efficiency import token_efficiency
from tests.estimate.parts import (
    ENGINES,
    TIED,
    UNTIED,
    cluster,
    costs,
    device,
    mesh,
    named,
    pipeline,
    plain,
    plan,
    plans,
    stage,
)

WIDE = Link(a="A", b="B", rtt_s=0.1, bandwidth=1e6)
HOP = 0.05 + 1e-3


def sites(a: int = 1, b: int = 1, **changes) -> Cluster:
    return cluster([[device()] * a], [[device()] * b], links=(WIDE,), **changes)


def single(on, rows, microbatches=1, **changes) -> Replica:
    return Replica(stages=(stage(on, rows, **changes),), microbatches=microbatches)


def test_prediction_interval_is_wider_for_devices_with_unknown_figures():
    def interval(**changes) -> tuple[float, float]:
        there = cluster([[device(**changes)]])
        engine = plain(interval=(0.7, 1.5))
        return estimate(
            plan(there, single(mesh(0), (8,))), models.graph(TIED), there, engine
        ).interval

    assert interval() == (0.7, 1.5)
    assert interval(flops={}) == interval(flops={"bf16": 1e12}) == (0.2, 2.0)
    assert interval(flops={}, pace=1.1) == (0.75, 1.3)
    assert interval(backend="cpu") == (0.4, 1.5)  # A kind of core whose clock is assumed.
    assert interval(backend="cpu", flops={}) == (0.2, 2.0)
    probed = (MatmulRate(m=1024, k=64, n=64, flops={"fp32": 1e11}),)
    assert interval(backend="cpu", rates=probed) == (0.82, 1.22)


def test_prediction_interval_is_narrower_for_measured_networks():
    def interval(origin, local_rate):
        link = msgspec.structs.replace(WIDE, origin=origin)
        there = cluster([[device()] * 2], [[device()] * 2], links=(link,))
        there = there.with_hosts(lambda host: msgspec.structs.replace(host, local_rate=local_rate))
        engine = plain(interval=(0.5, 2.0), network_interval=(0.1, 9.0), probed_interval=(0.9, 1.1))
        return estimate(
            plan(there, single(mesh(0, 1, 2, 3), (2,) * 4)), models.graph(TIED), there, engine
        ).interval

    # Nearly all of the step is communication over the long line.
    assert interval("measured", 1e10) == pytest.approx((0.9, 1.1), rel=0.01)
    for unknown in (("given", 1e10), ("measured", None)):
        assert interval(*unknown) == pytest.approx((0.1, 9.0), rel=0.02)


# -- sums of gradients
#   ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "devices", "said"),
    [
        ("a30", 2, "10 Gbit/s is assumed between hosts (such hosts have 1 Gbit/s to 100 Gbit/s)"),
        ("t4", 8, "10 Gbit/s is assumed between hosts (such hosts have 1 Gbit/s to 100 Gbit/s)"),
        ("a100-80", 1, "10 Gbit/s is assumed between hosts"),
        ("a100-80", 8, "1.6 Tbit/s is assumed between hosts, as of a DGX A100 (such hosts have"),
        ("v100-32", 8, "400 Gbit/s is assumed between hosts, as of a DGX-1"),
        ("h100", 8, "3.2 Tbit/s is assumed between hosts, as of a DGX H100"),
    ],
)
@pytest.mark.parametrize("name", ["farspan", "torch2024"])
def test_an_assumed_network_is_named_with_its_number_and_makes_the_interval_wider(
    kind, devices, said, name
):
    made = catalog.load_devices()[kind].device(kind)
    hosts = tuple(Host(name=f"h{i}", devices=(made,) * devices) for i in range(2))
    unknown = Cluster(sites=(Site(name="lab", hosts=hosts),))
    link = unknown.link("h0", "h1")
    site = msgspec.structs.replace(
        unknown.sites[0], lan_bandwidth=link.bandwidth, lan_rtt_s=link.rtt_s
    )
    stated = msgspec.structs.replace(unknown, sites=(site,))
    ranks = tuple(range(2 * devices))
    both = pipeline([stage(mesh(*ranks), (1,) * len(ranks))], 1, (1,))
    guess, known = (
        estimate(plan(there, both, batch=len(ranks)), models.graph(TIED), there, load_engine(name))
        for there in (unknown, stated)
    )
    assert guess.step_s == known.step_s
    assert guess.interval[0] < known.interval[0] and guess.interval[1] > known.interval[1]
    (sentence,) = [one for one in guess.assumptions if "assumed between hosts" in one]
    assert sentence.startswith(f"lab: {said}")
    assert sentence.endswith("; measure it: farspan probe --cluster CLUSTER -o measured.yaml")
    assert not [one for one in known.assumptions if "assumed between hosts" in one]
    # It stands among the first ones, which the table of plans shows.
    assert sentence in guess.assumptions[:3]


def test_a_plan_inside_one_host_assumes_no_network_between_hosts():
    made = catalog.load_devices()["a100-80"].device("a100-80")
    hosts = tuple(Host(name=f"h{i}", devices=(made,) * 8) for i in range(2))
    there = Cluster(sites=(Site(name="lab", hosts=hosts),))
    one = pipeline([stage(mesh(*range(8)), (1,) * 8)], 1, (1,))
    known = plan(there, one)
    inside = msgspec.structs.replace(known, devices=known.devices[:8])
    found = estimate(inside, models.graph(TIED), there, load_engine("farspan"))
    assert not [said for said in found.assumptions if "between hosts" in said]
    assert found.interval == pytest.approx(
        estimate(inside, models.graph(TIED), there.first(8), load_engine("farspan")).interval
    )


def test_every_sort_of_hosts_in_a_site_is_named():
    kinds = catalog.load_devices()
    eight, few = (kinds[kind].device(kind) for kind in ("a100-80", "t4"))
    hosts = [Host(name=f"h{i}", devices=(eight,) * 8) for i in range(3)]
    hosts += [Host(name=f"few{i}", devices=(few,)) for i in range(2)]
    there = Cluster(sites=(Site(name="lab", hosts=tuple(hosts)),))
    ranks = tuple(range(26))
    both = pipeline([stage(mesh(*ranks), (1,) * 26)], 1, (1,))
    found = estimate(
        plan(there, both, batch=26, precision="fp16"),
        models.graph(TIED),
        there,
        load_engine("farspan"),
    )
    rates = [said.split()[1:3] for said in found.assumptions if "assumed between hosts" in said]
    assert sorted(rates) == [["1.6", "Tbit/s"], ["10", "Gbit/s"]]


def test_data_parallel_step_by_hand():
    there = sites()
    using = costs(there, plain())
    found = step(single(mesh(0, 1), (4, 4), 2), using)
    passes = using.passes(stage(mesh(0), (4,)), [2])
    update = stage_time(using, stage(mesh(0), (4,)), [2], 1).update
    gradients = 4 * using.graph.parameters()
    messages = sum(
        len(op.weights)
        for unit, count in using.graph.kinds(0, 6)
        for _ in range(count)
        for op in unit
    )
    summed = messages * 2 * HOP + gradients / 1e6
    assert found.seconds == pytest.approx(2 * (passes.forward + passes.backward) + summed + update)
    assert (found.compute, found.communication) == pytest.approx(
        (2 * (passes.forward + passes.backward) + update, summed)
    )
    assert found.bubble == pytest.approx(0.0)
    # Each of two ring members sends half of the gradients, twice.
    assert sent_by(single(mesh(0, 1), (4, 4), 2), using) == {"A": gradients, "B": gradients}


def test_buckets_save_round_trips_and_bits_save_bytes():
    using = costs(sites(), plain())
    gradients = 4 * using.graph.parameters()

    def exposed(using=using, **changes):
        sync = GradSync(**{"bucket_bytes": 10**9} | changes)
        return stage_time(using, stage(mesh(0, 1), (4, 4), grad_sync=sync), [4, 4], 1).exposed

    assert exposed() == pytest.approx(2 * HOP + gradients / 1e6)
    assert exposed(bucket_bytes=gradients // 4) == pytest.approx(4 * 2 * HOP + gradients / 1e6)
    # Straight to the other, which is ready; or says so first, and then the message comes.
    ahead, late = (
        costs(sites(), plain(direct=True, receives_ahead=ready)) for ready in (True, False)
    )
    assert exposed(ahead, bits=8) == pytest.approx(HOP + gradients / 4e6)
    assert exposed(late, bits=8) == pytest.approx(
        2 * HOP - using.engine.message_s + gradients / 4e6
    )


def test_rows_that_divide_unevenly_take_the_time_of_all_of_them():
    """Ten sequences in four microbatches are two of three and two of two; whoever is half as fast
    reads five."""
    there = cluster([[device(), device(flops={"fp32": 5e11}, bandwidth=5e10)]])
    using = costs(there, plain(), UNTIED)
    uneven = single(mesh(0, 1), (10, 5), 4)
    one, other = (
        [using.passes(stage(mesh(rank), (rows,)), [rows]) for rows in sizes]
        for rank, sizes in ((0, (2, 3)), (1, (1, 2)))
    )
    fast = 2 * sum(found.forward + found.backward for found in one)
    slow = sum(n * (found.forward + found.backward) for n, found in zip((3, 1), other, strict=True))
    alone = devices(plan(there, uneven, spec=UNTIED), using)
    update = stage_time(using, stage(mesh(0, 1), (10, 5)), [10, 5], 4).update
    assert alone[0].compute_s == pytest.approx(fast + update)
    assert step(uneven, using).compute == pytest.approx(max(fast, slow) + update)
    # A worker without a sequence in a microbatch reads one.
    few = using.passes(stage(mesh(0), (2,)), [2], 4)
    assert few == using.passes(stage(mesh(0), (1,)), [1])


def test_overlap_hides_all_but_the_last_bucket():
    there = cluster([[device(flops={"fp32": 1e8})]], [[device(flops={"fp32": 1e8})]], links=(WIDE,))
    one = stage(mesh(0, 1), (4, 4), grad_sync=GradSync(bucket_bytes=100_000))
    plainly, hidden, slow = (
        costs(there, plain(overlap=share), seq_len=length)
        for share, length in ((0, 16), (0.5, 16), (0.5, 128))
    )
    summed = stage_time(plainly, one, [4, 4], 1).exposed
    cover = plainly.passes(one, [4, 4]).backward
    buckets = -(-4 * plainly.graph.parameters() // 100_000)
    assert summed - cover / 2 > summed / buckets
    assert stage_time(hidden, one, [4, 4], 1).exposed == pytest.approx(summed - cover / 2)
    assert summed - slow.passes(one, [4, 4]).backward / 2 < summed / buckets
    assert stage_time(slow, one, [4, 4], 1).exposed == pytest.approx(summed / buckets)


def test_zero_levels_exchange_when_and_what_they_must():
    using = costs(sites(), plain())
    gradients = weights = 4 * using.graph.parameters()
    scatter = HOP + gradients / 2e6
    gather = HOP + weights / 2e6
    usual = using.passes(stage(mesh(0, 1), (4, 4)), [2, 2])

    def times(zero, microbatches):
        sync = GradSync(bucket_bytes=10**9)
        found = stage_time(
            using,
            stage(mesh(0, 1), (4, 4), zero=zero, grad_sync=sync),
            [2 * microbatches] * 2,
            microbatches,
        )
        extra = (
            found.passes.forward - usual.forward,
            found.passes.backward - usual.backward,
            found.exposed,
        )
        return pytest.approx(extra), found.sent["A"]

    # One ring member of two sends half a tensor each time it is scattered or gathered.
    half = gradients / 2
    assert times(1, 2) == ((0, 0, scatter + gather), 2 * half)
    assert times(2, 1) == ((0, 0, scatter + gather), 2 * half)
    # Gradients of each microbatch are scattered at once; weights are gathered after the update.
    assert times(2, 2) == ((0, scatter, gather), 3 * half)
    # Full sharding gathers before both passes of each microbatch, unit by unit.
    units = gather + (using.graph.units - 1) * HOP
    assert times(3, 2) == ((units, units + scatter, 0), 6 * half)


def test_hybrid_sharding_sums_parts_between_sites():
    using = costs(sites(2, 2), plain())
    gradients = 4 * using.graph.parameters()
    one = stage(
        mesh(0, 1, 2, 3, site=2, data=2),
        (2, 2, 2, 2),
        zero=3,
        grad_sync=GradSync(bucket_bytes=10**9),
    )
    found = stage_time(using, one, [2] * 4, 1)
    # Two rings share the line, each with half of the gradients.
    assert found.exposed == pytest.approx(2 * HOP + gradients / 1e6)
    assert found.sent == pytest.approx({"A": gradients, "B": gradients})
    inside = using.network.all_gather_s((0, 1), gradients, messages=using.graph.units)
    assert found.passes.forward_wait == pytest.approx(inside)


def test_hierarchical_sums_cross_the_wide_area_once():
    using = costs(sites(3, 3), plain())
    gradients = 4 * using.graph.parameters()
    flat, tree = (
        stage_time(
            using,
            stage(
                mesh(*range(6)),
                (2, 2, 1, 1, 1, 1),
                grad_sync=GradSync(bucket_bytes=10**9, topology=topology),
            ),
            [2] * 6,
            1,
        )
        for topology in ("flat", "hierarchical")
    )
    assert flat.sent == pytest.approx({"A": 2 * 5 / 6 * gradients, "B": 2 * 5 / 6 * gradients})
    assert tree.sent == pytest.approx({"A": gradients, "B": gradients})
    assert tree.exposed < flat.exposed


# -- pipelines
#   ------------------------------------------------------------------------------------------------


def test_edges_carry_a_microbatch_once_between_as_many_hosts_as_both_stages_have():
    there = cluster([[device()], [device()]], [[device()], [device()]], links=(WIDE,))
    using = costs(there, plain())
    stages = [stage(mesh(0, 1), (4, 4), (0, 3)), stage(mesh(2, 3), (4, 4), (3, 6))]
    down, up = edges(pipeline(stages, 2, (2, 1), bits=16), using)
    size = 2 * 4 * 16 * 64
    # Two pairs of hosts send half each, over one line.
    assert down == up
    assert down[0] == pytest.approx((size / 1e6 + 1e-3, 0.05))
    alone = [stage(mesh(0, 1), (4, 4), (0, 3)), stage(mesh(2), (8,), (3, 6))]
    assert edges(pipeline(alone, 2, (2, 1), bits=16), using)[0][0] == pytest.approx(
        (size / 1e6 + 1e-3, 0.05)
    )
    # Windows are each pair's own: half the bytes in half the time.
    narrow = costs(there, plain(window=10**4))
    rate = 1e4 / 0.101
    assert edges(pipeline(stages, 2, (2, 1), bits=16), narrow)[0][0].busy == pytest.approx(
        size / 2 / rate + 1e-3
    )
    more = msgspec.structs.replace(
        pipeline(stages, 2, (2, 1), bits=16), edges=(Edge(bits=16, streams=2),)
    )
    assert edges(more, narrow)[0][0].busy == pytest.approx(size / 4 / rate + 1e-3)


def test_pipeline_step_by_hand():
    there = sites()
    using = costs(there, plain(), UNTIED)
    replica = pipeline([stage(mesh(0), (8,), (0, 3)), stage(mesh(1), (8,), (3, 6))], 1, (1, 1))
    a, b = (using.passes(one, [8]) for one in replica.stages)
    hop = 4 * 8 * 16 * 64 / 1e6 + 1e-3 + 0.05
    update = stage_time(using, replica.stages[0], [8], 1).update
    found = step(replica, using)
    # There and back; the first stage then knows the second one's gradient norm, sent long before.
    assert found.seconds == pytest.approx(
        a.forward + hop + b.forward + b.backward + hop + a.backward + update
    )
    assert found.compute + found.communication + found.bubble == pytest.approx(found.seconds)
    assert sent_by(replica, using) == {"A": 4 * 8 * 16 * 64, "B": 4 * 8 * 16 * 64}


def test_tied_embedding_sync_overlaps_with_the_work_of_other_stages():
    there = sites()
    replica = pipeline([stage(mesh(0), (8,), (0, 3)), stage(mesh(1), (8,), (3, 6))], 1, (1, 1))
    table = 4 * 96 * 64 / 1e6 + 1e-3 + 0.05

    def seconds(made=replica, *, tied=True, **changes):
        using = costs(there, plain(**changes))
        using.graph = msgspec.structs.replace(using.graph, tied=tied)
        return step(made, using).seconds

    # The head's part is on its way beside the activations' gradient, which takes longer; so are the
    # rows sent back.
    assert table < 4 * 8 * 16 * 64 / 1e6 + 1e-3 + 0.05
    assert seconds() == seconds(tied=False)
    # Where little else is sent, the first stage waits for the table, which left when the last
    # stage's passes were done.
    thin = pipeline([stage(mesh(0), (1,), (0, 3)), stage(mesh(1), (1,), (3, 6))], 1, (1, 1))
    using = costs(there, plain())
    first, last = (using.passes(one, [1]) for one in thin.stages)
    update = stage_time(using, thin.stages[0], [1], 1).update
    down = 4 * 16 * 64 / 1e6 + 1e-3 + 0.05
    assert seconds(thin) == pytest.approx(
        first.forward + down + last.forward + last.backward + table + update
    )
    # Activations and the rows of 16 tokens leave the first site, their gradients and the whole
    # table the second.
    assert sent_by(thin, using) == {"A": 2 * 4 * 16 * 64, "B": 4 * 16 * 64 + 4 * 96 * 64}
    # Its bytes, and those of the rows sent back, keep the first stage's processors from its passes.
    moved = costs(there, plain(move_cost=2.0, socket_s=1e-7))
    crossing = 4 * 96 * 64 + 4 * 16 * 64
    assert tie(thin, moved).taken == pytest.approx(2 * 1e-7 * crossing)
    assert Tie(across=1.0, taken=0.2).waits([5.0, 4.0], [4.5, 3.9]) == [0.2, 0.0]
    # Without receives posted ahead both ends wait for it there and back; as a collective, for its
    # sum.
    late = seconds(receives_ahead=False) - seconds(receives_ahead=False, tied=False)
    assert late == pytest.approx(2 * table)
    assert seconds(ties_collective=True) - seconds(tied=False) == pytest.approx(
        2 * HOP + 4 * 96 * 64 / 1e6
    )


def test_the_longest_round_of_waiting_decides_and_not_the_fill():
    """A last stage with a slow update begins its next step late, while the first one waits for
    nothing but it."""
    using = costs(cluster([[device(), device(bandwidth=1e6)]]), plain(), UNTIED)
    replica = pipeline([stage(mesh(0), (8,), (0, 5)), stage(mesh(1), (8,), (5, 6))], 4, (2, 1))
    times = [stage_time(using, one, [8], 4) for one in replica.stages]
    own = 4 * (times[1].passes.forward + times[1].passes.backward) + times[1].update
    # Its update alone takes longer than the rest of the step, so it never waits for passes of the
    # first stage; only for the gradient norm, which that one knows after the last backward pass has
    # come back.
    hop = 5e-6 + 1e-3 + 4 * 2 * 16 * 64 / 1e10
    norm = hop + times[0].passes.backward + 1e-3 + 5e-6
    assert times[1].update > 0.02 > norm
    found = step(replica, using)
    assert found.seconds == pytest.approx(own + norm)
    assert found.compute == pytest.approx(own)
    assert found.bubble == pytest.approx(norm)


# -- replicas, money, energy
#   -------------------------------------------------------------------------------------------


def test_replicas_exchange_their_changes_every_so_often():
    there = sites()
    graph = models.graph(TIED)
    replicas = [single(mesh(rank), (4,)) for rank in range(2)]

    def priced(**changes):
        return estimate(
            plan(there, *replicas, sync=Sync(**{"every": 10} | changes)), graph, there, plain()
        )

    alone = step(replicas[0], costs(there, plain())).seconds
    size = 4 * graph.parameters()
    took = 2 * HOP + size / 1e6
    assert priced().step_s == pytest.approx(alone + took / 10)
    assert priced(bits=8).step_s == pytest.approx(alone + (2 * HOP + size / 4e6) / 10)
    assert priced(every=5).communication_s == pytest.approx(took / 5)
    assert priced(overlap=True).communication_s == pytest.approx(max(0.0, took - 10 * alone) / 10)
    assert priced(every=1000, overlap=True).step_s <= alone + took / 1000
    found = priced(every=30)
    expected = token_efficiency(plan(there, *replicas, sync=Sync(every=30)), graph.parameters())
    assert (found.token_efficiency, found.token_efficiency_interval, found.evidence) == expected
    assert not found.evidence  # Nobody published so small a model.
    assert found.tokens_done == pytest.approx(100 * 8 * 16 * found.token_efficiency)


def test_loss_is_predicted_within_the_range_of_the_fit_alone():
    there = cluster([[device()]])
    graph = models.graph(TIED)
    tiny = estimate(plan(there, single(mesh(0), (8,))), graph, there, plain())
    assert tiny.loss is None
    assert (
        scaling_law_loss(graph.parameters(), tiny.tokens_done) > 70
    )  # Which no text is as hard as.
    for parameters, tokens, known in (
        (7e7, 5e9, True),
        (1.6e10, 5e11, True),
        (6.9e7, 1e10, False),
        (1.7e10, 1e10, False),
        (1e9, 4.9e9, False),
        (1e9, 5.1e11, False),
    ):
        work = msgspec.structs.replace(tiny.workload, steps=1, tokens_per_step=tokens)
        whole = with_loss(msgspec.structs.replace(tiny, workload=work), parameters)
        assert whole.loss == (
            pytest.approx(scaling_law_loss(parameters, tokens)) if known else None
        )


def test_money_is_devices_by_the_hour_and_bytes_that_leave_sites():
    priced = device(usd_per_hour=2.0, watts=300.0)
    there = cluster([[priced]], [[priced]], links=(WIDE,), egress_usd_per_byte=1e-6)
    graph = models.graph(TIED)
    found = estimate(plan(there, single(mesh(0, 1), (4, 4))), graph, there, plain())
    gradients = 4 * graph.parameters()
    hours = found.run_s / 3600
    assert found.run_s == pytest.approx(100 * found.step_s / (1 - OVERHEAD_SHARE))
    assert found.usd == pytest.approx(2 * 2.0 * hours + 100 * 2 * gradients * 1e-6)
    assert found.kwh == pytest.approx(2 * 0.3 * hours)
    # One device alone sends nothing, and pays for itself alone.
    alone = estimate(plan(there, single(mesh(0), (8,))), graph, there, plain())
    assert alone.usd == pytest.approx(2.0 * alone.run_s / 3600)
    # A deadline cuts time, bytes and tokens alike.
    half = estimate(
        plan(there, single(mesh(0, 1), (4, 4)), deadline_s=found.run_s / 2), graph, there, plain()
    )
    assert half.usd == pytest.approx(found.usd / 2)
    assert half.run_s == found.run_s / 2
    assert half.tokens_done == pytest.approx(50 * 8 * 16)
    unknown = cluster([[priced]], [[device()]], links=(WIDE,))
    some = estimate(plan(unknown, single(mesh(0, 1), (4, 4))), graph, unknown, plain())
    assert some.usd is None and some.kwh is None


def test_replicas_in_one_site_send_only_what_leaves_it():
    priced = device(usd_per_hour=0.0)
    there = cluster([[priced] * 2], [[priced]], links=(WIDE,), egress_usd_per_byte=1.0)
    graph = models.graph(TIED)
    replicas = [single(mesh(rank), (2,)) for rank in range(3)]
    found = estimate(plan(there, *replicas, sync=Sync(every=10), batch=6), graph, there, plain())
    # A ring of three with one hop out of each site; each hop carries two thirds of the parameters,
    # twice.
    assert found.usd == pytest.approx(100 / 10 * 2 * 2 * 2 / 3 * 4 * graph.parameters())


def test_speed_counts_the_models_arithmetic_over_the_data_sheets():
    there = cluster([[device(), device(flops={"fp32": 3e12})]])
    found = estimate(plan(there, single(mesh(0, 1), (4, 4))), models.graph(TIED), there, plain())
    flops = 8 * 16 * train_flops_per_token(TIED, 16) / found.step_s
    assert found.tokens_per_s == pytest.approx(8 * 16 / found.step_s)
    assert found.tflops_per_device == pytest.approx(flops / 2 / 1e12)
    assert found.mfu == pytest.approx(flops / 4e12)
    unknown = cluster([[device(flops={})]])
    assert (
        estimate(plan(unknown, single(mesh(0), (8,))), models.graph(TIED), unknown, plain()).mfu
        is None
    )


def test_plans_for_other_clusters_and_models_are_refused():
    there = sites()
    made = plan(there, single(mesh(0, 1), (4, 4)))
    graph = models.graph(TIED)
    with pytest.raises(KeyError):
        estimate(made, graph, cluster([[device()]]), plain())
    with pytest.raises(NoLink):
        estimate(made, graph, cluster([[device()]], [[device()]]), plain())
    wrong = single(mesh(0, 1, tensor=2), (8,), splits={"mlp.up": "n"})
    with pytest.raises(ValueError, match=r"mlp\.up cannot be split"):
        estimate(plan(there, wrong), graph, there, plain())


# -- any plan
#   ------------------------------------------------------------------------------------------------


@given(plans(), st.sampled_from(ENGINES))
def test_any_valid_plan_is_priced_and_its_step_is_all_accounted_for(case, engine):
    there, made = case
    found = estimate(made, models.graph(made.model), there, named(engine))
    parts = (found.compute_s, found.communication_s, found.bubble_s)
    assert found.step_s == pytest.approx(sum(parts), rel=1e-9)
    assert min(parts) >= 0 and found.compute_s > 0
    used = {rank for replica in made.replicas for one in replica.stages for rank in one.mesh.ranks}
    assert len(found.memory) == len(used)
    assert min(memory.total for memory in found.memory) > 0
    renamed = msgspec.structs.replace(made, technique="something else")
    assert estimate(renamed, models.graph(made.model), there, named(engine)) == found
    assert convert(msgspec.to_builtins(made), Plan, "plan.json") == made


def faster_link(link: Link, what: str, window: int) -> Link:
    times = {size: seconds / 3 for size, seconds in link.transfer_s.items()}
    under_way = {count: 2 * found for count, found in link.in_flight.items()}
    changes = {
        "trip": {
            "rtt_s": link.rtt_s / 3,
            "transfer_s": times,
            "bandwidth": link.bandwidth and 3 * link.bandwidth,
        },
        "line": {"bandwidth": 3 * (link.bandwidth or 1e9)},
        "window": {"window": 2 * (link.window or window), "in_flight": under_way},
        "loss": {"loss": None},
    }
    return msgspec.structs.replace(link, **changes[what])


def faster_host(there: Cluster, name: str, what: str) -> Cluster:
    def better(one):
        if what == "memory":
            return one.but(bandwidth=3 * one.sheet.bandwidth)
        return one.but(flops={dtype: 3 * flops for dtype, flops in one.sheet.flops.items()})

    def changed(host):
        return (
            msgspec.structs.replace(host, devices=tuple(map(better, host.devices)))
            if host.name == name
            else host
        )

    made = (
        msgspec.structs.replace(site, hosts=tuple(map(changed, site.hosts))) for site in there.sites
    )
    return msgspec.structs.replace(there, sites=tuple(made))


@given(plans(), st.sampled_from(ENGINES), st.data())
def test_no_faster_link_or_device_makes_a_plan_slower(case, name, data):
    there, made = case
    engine = named(name)
    graph = models.graph(made.model)
    if there.links and data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(there.links) - 1))
        link = faster_link(
            there.links[place],
            data.draw(st.sampled_from(["trip", "line", "window", "loss"])),
            engine.window,
        )
        better = msgspec.structs.replace(
            there, links=(*there.links[:place], link, *there.links[place + 1 :])
        )
    else:
        host = data.draw(st.sampled_from([host.name for host in there.hosts]))
        better = faster_host(there, host, data.draw(st.sampled_from(["arithmetic", "memory"])))
    before, after = (estimate(made, graph, known, engine).step_s for known in (there, better))
    assert after <= before * (1 + 1e-9)
