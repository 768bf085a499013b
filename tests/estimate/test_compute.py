"""Seconds of operators by hand: the roofline, measured rates, and what slows a device down."""

from __future__ import annotations

import msgspec
import pytest

from farspan import models
from farspan.domain.cluster import Host, MatmulRate
from farspan.domain.plan import GradSync
from farspan.estimate.compute import UNKNOWN_BANDWIDTH, UNKNOWN_FLOPS, DeviceSpeed, OperatorWork, work
from farspan.estimate.stage_time import stage_time
from farspan.semantics.kernel_choice import scored_keys
from tests.estimate.parts import TIED, UNTIED, cluster, costs, device, mesh, plain, stage, train

BIG = OperatorWork(flops=4e12, bytes=1e9, m=1, k=1, n=1)
STREAM = OperatorWork(flops=1e6, bytes=5e11, m=1, k=1, n=1)


def test_an_operator_takes_the_longer_of_arithmetic_and_memory():
    rates = DeviceSpeed(device(), "fp32", plain())  # 1e12 FLOP/s, 1e11 bytes a second.
    assert rates.seconds(BIG) == pytest.approx(4.0)
    assert rates.seconds(STREAM) == pytest.approx(5.0)
    shares = DeviceSpeed(device(), "fp32", plain(efficiency={"fp32": 0.5}, bandwidth=0.25, operator_s=0.125))
    assert shares.seconds(BIG) == pytest.approx(8.125)
    assert shares.seconds(STREAM) == pytest.approx(20.125)
    assert shares.stream_s(1e11) == pytest.approx(4.0)


def test_a_share_of_the_cores_makes_launches_slower():
    half = DeviceSpeed(device(share=0.5), "fp32", plain(operator_s=0.125))
    assert half.seconds(BIG) == pytest.approx(4.25)


def test_power_holds_arithmetic_down():
    hot = plain(flops_per_watt=2e9)
    assert DeviceSpeed(device(watts=100), "fp32", hot).seconds(BIG) == pytest.approx(20.0)
    assert DeviceSpeed(device(watts=1000), "fp32", hot).seconds(BIG) == pytest.approx(4.0)
    assert DeviceSpeed(device(), "fp32", hot).seconds(BIG) == pytest.approx(4.0)


def test_measured_products_go_before_the_data_sheet_and_the_nearest_shape_counts():
    measured = (
        MatmulRate(m=1024, k=64, n=64, flops={"fp32": 2e11}),
        MatmulRate(m=1024, k=4096, n=4096, flops={"fp32": 8e11}),
    )
    rates = DeviceSpeed(device(rates=measured), "fp32", plain())
    assert rates.flops(1024, 100, 100) == 2e11
    assert rates.flops(1024, 2048, 1024) == 8e11
    assert DeviceSpeed(device(rates=measured), "bf16", plain()).flops(1, 1, 1) == UNKNOWN_FLOPS["cuda"]


def test_unknown_devices_are_taken_for_slow_ones():
    unknown = device(flops={}, bandwidth=None)
    assert DeviceSpeed(unknown, "bf16", plain()).seconds(BIG) == pytest.approx(4e12 / 65e12)
    assert DeviceSpeed(unknown, "fp32", plain()).seconds(BIG) == pytest.approx(8 * 4e12 / 65e12)
    assert DeviceSpeed(unknown, "fp32", plain()).stream_s(UNKNOWN_BANDWIDTH["cuda"]) == pytest.approx(1.0)


def test_pace_and_crowding_multiply_every_time():
    rates = DeviceSpeed(device(pace=3.0), "fp32", plain(operator_s=0.5), slowdown=2.0)
    assert rates.seconds(BIG) == pytest.approx(6 * 4.5)
    # Four workers of two threads on a host of four cores: every core does the work of two.
    cpu = device(backend="cpu", threads=2)
    there = cluster([[cpu] * 4])
    host = Host(name="a0", devices=(cpu,) * 4, cpus=4)
    there = msgspec.structs.replace(there, sites=(msgspec.structs.replace(there.sites[0], hosts=(host,)),))
    roomy = msgspec.structs.replace(
        there, sites=(msgspec.structs.replace(there.sites[0], hosts=(msgspec.structs.replace(host, cpus=8),)),)
    )
    graph = models.graph(TIED)
    crowded, alone = (costs(c, plain()).unit_s(0, graph.block, 1, {}, 1) for c in (there, roomy))
    assert crowded == pytest.approx(tuple(2 * seconds for seconds in alone))


def test_work_of_the_operators_of_a_block_by_hand():
    graph, (rows, s, d, f) = models.graph(TIED), (3, 16, 64, 256)
    ops = {op.name: op for op in graph.block}

    def of(name, keys=None, share=1.0):
        return work(graph, ops[name], rows, s, 4, share, share, keys)

    forward, backward = of("mlp.up")
    assert forward == OperatorWork(2 * rows * s * d * f, 4 * (rows * s * (d + f) + d * f + f), rows * s, d, f)
    assert backward == OperatorWork(2 * forward.flops, 2 * forward.bytes, rows * s, d, f)
    assert of("mlp.down")[0][2:5] == (rows * s, f, d)
    assert of("attn.out")[0][2:5] == (rows * s, d, d)
    assert of("mlp.up", share=0.5)[0].flops == forward.flops / 2
    # Scores and their product with v: 2 x 2 s s d a row; q, k, v in, o out.
    attention, back = of("attn")
    assert attention.flops == 4 * rows * s * s * d
    assert attention.bytes == 4 * rows * s * 4 * d
    assert back.flops == 2.5 * attention.flops
    # In memory, scores of 4 heads are written, read, written as probabilities and read.
    vanilla, back = of("attn", keys=s)
    assert vanilla.bytes == 4 * (rows * s * 4 * d + 4 * rows * 4 * s * s)
    assert back.flops == 2 * vanilla.flops
    # Blocks of queries leave out what is in the future of all of them.
    blocks, back = of("attn", keys=10)
    assert blocks.bytes == 4 * (rows * s * 4 * d + 4 * rows * 4 * s * 10)
    assert (blocks.flops, back.flops) == (4 * rows * s * 10 * d, 8 * rows * s * 10 * d)
    assert of("mlp.act")[0].flops == 0


def test_scores_are_computed_for_the_keys_up_to_the_end_of_a_block():
    def keys(seq_len, precision="fp32", backend="cpu", attention="sdpa"):
        asked = train(seq_len=seq_len, precision=precision, attention=attention)
        return scored_keys(asked, backend)

    assert keys(256) == (64 + 128 + 192 + 256) / 4
    assert keys(256, "bf16") == (128 + 256) / 2
    assert keys(100) == (64 * 64 + 36 * 100) / 100
    assert keys(100, "bf16") == keys(100, attention="vanilla") == keys(100, backend="cuda", attention="vanilla") == 100
    assert keys(2048) is None and keys(256, backend="cuda") is None
    assert keys(64) is None and keys(64, "bf16") == keys(64, attention="vanilla") == 64


def test_a_gradient_is_read_and_added_to_that_of_earlier_microbatches():
    graph, (d, f, v, s) = models.graph(TIED), (64, 256, 96, 32)
    ops = {op.name: op for op in (*graph.embedding, *graph.block)}

    def apart(name, **changes):
        return work(graph, ops[name], 3, 16, 4, 1.0, 1.0, None, **changes)[1].apart

    assert apart("mlp.up") == apart("tok") == 0
    assert apart("mlp.up", gradient_passes=3) == 3 * 4 * (d * f + f)
    # A table's is as large as the table: zeros are written first.
    assert apart("tok", gradient_passes=3) == (1 + 3) * 4 * (v + s) * d
    slow = DeviceSpeed(device(bandwidth=1e9), "fp32", plain())
    assert slow.seconds(OperatorWork(0.0, 1e9, 1, 1, 1, apart=2e9)) == pytest.approx(3.0)


def test_embedding_moves_rows_that_are_looked_up_and_not_the_table():
    graph = models.graph(TIED)
    forward, _ = work(graph, graph.embedding[0], 2, 16, 4, 1.0, 1.0, None)
    assert forward.flops == 0
    assert forward.bytes == 4 * 2 * 2 * 16 * 64
    # The loss reads and writes probabilities beside the logits.
    loss, _ = work(graph, graph.head[-1], 2, 16, 4, 1.0, 1.0, None)
    assert (loss.flops, loss.bytes) == (0, 4 * 3 * 2 * 16 * (96 + 1))


def test_recomputing_a_block_runs_all_but_its_last_product_again():
    there = cluster([[device()]])
    using = costs(there, plain())
    one, again = (stage(mesh(0), (8,), recompute=recompute) for recompute in (False, True))
    usual, replay = using.passes(one, [2]), using.passes(again, [2])
    block = [using.op_s(0, op, 2, "", 1)[0] for op in using.graph.block]
    assert replay.forward == usual.forward
    assert replay.backward - usual.backward == pytest.approx(4 * sum(block[:-1]))


def test_a_stage_takes_as_long_as_its_slowest_coordinate():
    there = cluster([[device(), device(flops={"fp32": 1e11}, bandwidth=1e10)]])
    using = costs(there, plain())
    one = stage(mesh(0, 1), (5, 1))
    alone = [using.passes(stage(mesh(rank), (rows,)), [rows]) for rank, rows in ((0, 5), (1, 1))]
    assert using.passes(one, [5, 1]) == max(alone, key=lambda found: found.forward)
    assert using.passes(stage(mesh(0, 1), (6, 0)), [6, 0]) == using.passes(stage(mesh(0), (6,)), [6])


def test_updates_stream_the_state():
    there = cluster([[device(bandwidth=1e3)]])
    using = costs(there, plain(), UNTIED)
    parameters = using.graph.parameters()
    # Moments (8 bytes) are read and written, gradients (4) read and cleared, weights (4) written.
    took = stage_time(using, stage(mesh(0), (8,)), [8], 1).update
    assert took == pytest.approx(parameters * (2 * 8 + 2 * 4 + 4) / 1e3)
    divided = cluster([[device(bandwidth=1e3)] * 2])
    zero = stage(mesh(0, 1), (4, 4), zero=1, grad_sync=GradSync(bucket_bytes=None))
    assert stage_time(costs(divided, plain(), UNTIED), zero, [4, 4], 1).update == pytest.approx(took / 2)
