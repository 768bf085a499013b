"""Seconds of operators by hand: the roofline, measured rates, and what slows a device down."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from farspan import models
from farspan.domain.cluster import Host, MatmulRate
from farspan.domain.engine import Moves, load_engine
from farspan.domain.plan import GradSync
from farspan.estimate.compute import (
    ATTAINED,
    UNKNOWN_FLOPS,
    UNKNOWN_MEMORY_BANDWIDTH,
    DeviceSpeed,
    OperatorWork,
    best_product,
    work,
)
from farspan.estimate.stage_time import stage_time
from farspan.semantics.kernel_choice import activities, scored_keys
from farspan.semantics.tensor_sharding import divided
from tests.estimate.parts import TIED, UNTIED, cluster, costs, device, mesh, plain, stage, train

BIG = OperatorWork(flops=4e12, bytes=1e9, m=1, k=1, n=1)
RELU = msgspec.structs.replace(TIED, activation="relu")
STREAM = OperatorWork(flops=1e6, bytes=5e11, m=1, k=1, n=1)


def test_an_operator_takes_the_longer_of_arithmetic_and_memory():
    rates = DeviceSpeed(device(), "fp32", plain())  # 1e12 FLOP/s, 1e11 bytes a second.
    assert rates.kernels(BIG) == (pytest.approx(4.0), 0.0)
    assert rates.kernels(STREAM).computing == pytest.approx(5.0)
    shares = DeviceSpeed(
        device(), "fp32", plain(efficiency={"fp32": 0.5}, bandwidth=0.25, composed_bandwidth=0.125)
    )
    assert shares.kernels(BIG).computing == pytest.approx(8.0)
    assert shares.kernels(STREAM).computing == pytest.approx(20.0)
    assert shares.stream_s(1e11) == pytest.approx(4.0)
    moved = OperatorWork(0.0, 0.0, 1, 1, 1, unhidden=1e11, composed=1e11)
    assert shares.kernels(moved).computing == pytest.approx(4.0 + 8.0)


def test_kernel_launches_overlap_computation_on_gpus_but_not_on_cpus():
    three = BIG._replace(launches=3)
    gpu, cpu, half = (
        DeviceSpeed(one, "fp32", plain(launch_s=0.5))
        for one in (device(), device(backend="cpu"), device(share=0.5))
    )
    assert gpu.kernels(three) == (pytest.approx(4.0), 1.5)
    assert half.kernels(three).launching == pytest.approx(3.0), (
        "a device held to a share of its time launches slower"
    )
    assert (gpu.together(4.0, 1.5), gpu.together(1.0, 1.5), cpu.together(4.0, 1.5)) == (
        4.0,
        1.5,
        5.5,
    )
    # Of a unit's operators whose kernels are short launches decide, however long the others take
    # alone.
    using = costs(cluster([[device()]]), plain(launch_s=1e3, launches=(1, 2)))
    unit = using.graph.block
    products = sum(op.kind in ("matmul", "attention") for op in unit)
    assert using.unit_s(0, unit, 1, {}, 1) == (products * 1e3, 2 * products * 1e3)


def test_power_holds_arithmetic_down():
    hot = plain(flops_per_watt=2e9)
    for watts, seconds in ((100, 20.0), (1000, 4.0), (None, 4.0)):
        assert DeviceSpeed(device(watts=watts), "fp32", hot).kernels(
            BIG
        ).computing == pytest.approx(seconds)


def test_fp32_products_use_tf32_if_plan_or_engine_asks_and_device_supports_it():
    ampere = device(flops={"fp32": 1e12, "tf32": 4e12})
    usual = plain()
    allowing = plain(tf32=True)
    for one, dtype, using, seconds in (
        (ampere, "fp32", usual, 4.0),
        (ampere, "tf32", usual, 1.0),
        (ampere, "fp32", allowing, 1.0),
        (device(), "tf32", usual, 4.0),
        (device(), "fp32", allowing, 4.0),
    ):
        assert DeviceSpeed(one, dtype, using).kernels(BIG).computing == pytest.approx(seconds)


def test_rows_that_begin_elsewhere_than_at_16_bytes_are_multiplied_more_slowly():
    rates = DeviceSpeed(
        device(flops={"bf16": 1e12}), "bf16", plain(aligned={8: 0.75, 4: 0.6, 2: 0.5})
    )
    shares = {64: 1.0, 2332: 0.75, 2330: 0.6, 4147: 0.5}
    assert {n: rates.flops(8, 64, n) / 1e12 for n in shares} == pytest.approx(shares)
    assert DeviceSpeed(device(), "fp32", plain()).flops(8, 64, 3) == 1e12


def test_the_best_published_product_goes_before_the_data_sheet():
    sheet = device(flops={"bf16": 1e12}, measured={})
    assert best_product(sheet, "bf16") == 0.8e12
    assert best_product(device(flops={"bf16": 1e12}, measured={"bf16": 0.9e12}), "bf16") == 0.9e12


def test_measured_products_go_before_the_data_sheet_and_the_nearest_shape_counts():
    measured = (
        MatmulRate(m=1024, k=64, n=64, flops={"fp32": 2e11}),
        MatmulRate(m=1024, k=4096, n=4096, flops={"fp32": 8e11}),
    )
    rates = DeviceSpeed(device(rates=measured), "fp32", plain())
    assert rates.flops(1024, 100, 100) == 2e11
    assert rates.flops(1024, 2048, 1024) == 8e11
    assert (
        DeviceSpeed(device(rates=measured), "bf16", plain()).flops(1, 1, 1)
        == 0.8 * UNKNOWN_FLOPS["cuda"]
    )


def test_unknown_devices_are_taken_for_slow_ones():
    unknown = device(flops={}, bandwidth=None)
    took = {
        dtype: DeviceSpeed(unknown, dtype, plain()).kernels(BIG).computing
        for dtype in ("bf16", "fp32")
    }
    shares = ATTAINED["cuda"]
    assert took == pytest.approx(
        {"bf16": 4e12 / 65e12 / shares["bf16"], "fp32": 8 * 4e12 / 65e12 / shares["fp32"]}
    )
    assert DeviceSpeed(unknown, "fp32", plain()).stream_s(
        UNKNOWN_MEMORY_BANDWIDTH["cuda"]
    ) == pytest.approx(1.0)


def test_measured_slowdown_and_core_sharing_multiply_every_time():
    rates = DeviceSpeed(device(pace=3.0), "fp32", plain(launch_s=0.5), slowdown=2.0)
    assert rates.kernels(BIG) == pytest.approx((6 * 4.0, 6 * 0.5))
    # Four workers of two threads on a host of four cores: every core does the work of two.
    cpu = device(backend="cpu", threads=2)
    there = cluster([[cpu] * 4])
    host = Host(name="a0", devices=(cpu,) * 4, cpus=4)
    there = msgspec.structs.replace(
        there, sites=(msgspec.structs.replace(there.sites[0], hosts=(host,)),)
    )
    roomy = msgspec.structs.replace(
        there,
        sites=(
            msgspec.structs.replace(there.sites[0], hosts=(msgspec.structs.replace(host, cpus=8),)),
        ),
    )
    graph = models.graph(TIED)
    crowded, alone = (costs(c, plain()).unit_s(0, graph.block, 1, {}, 1) for c in (there, roomy))
    assert crowded == pytest.approx(tuple(2 * seconds for seconds in alone))


KERNELS = {
    "weight": {"full": (0, 3), "casts": (1, 1)},
    "table": {"full": (0, 4)},
    "lookup": {"working": (2, 3)},
    "bias": {"working": (0, 1)},
    "layernorm": {"full": (2, 5)},
    "residual": {"working": (3, 3)},
    "rmsnorm": {"full": (7, 21), "composed": True},
    "rotary": {"working": (10, 11)},
    "heads": {"working": (8, 8)},
    "scores": {"working": (4, 6), "full": (2, 3), "casts": (2, 2)},
    "score_blocks": {"working": (4, 8)},
    "gelu": {"working": (2, 3), "launches": (1, 2)},
    "swiglu": {"working": (5, 9)},
    "loss": {"full": (2, 4)},
}
COUNTED = plain(kernels={name: Moves(**moves) for name, moves in KERNELS.items()})


def worked(
    spec, name, *, keys=None, split="", ways=1, residual="", width=4, engine=COUNTED, rows=3
):
    graph = models.graph(spec)
    ops = {op.name: op for op in (*graph.embedding, *graph.block, *graph.head)}
    part = divided(ops[name], split, ways, residual)
    return work(graph, ops[name], rows, 16, width, keys, engine, part)


def test_products_and_attention_of_a_block_by_hand():
    rows = 3
    s = 16
    d = 64
    f = 256
    forward, backward = worked(TIED, "mlp.up", engine=plain())
    assert forward == OperatorWork(
        2 * rows * s * d * f, 4 * (rows * s * (d + f) + d * f + f), rows * s, d, f
    )
    assert backward == OperatorWork(2 * forward.flops, 2 * forward.bytes, rows * s, d, f)
    assert worked(TIED, "mlp.down")[0][2:5] == (rows * s, f, d)
    assert worked(TIED, "attn.out")[0][2:5] == (rows * s, d, d)
    assert worked(TIED, "mlp.up", split="f", ways=2)[0].flops == forward.flops / 2
    # Scores and their product with v: 2 x 2 s s d a row; q, k, v in, o out.
    attention, back = worked(TIED, "attn")
    assert attention.flops == 4 * rows * s * s * d
    assert (attention.bytes, attention.unhidden) == (4 * rows * s * 4 * d, 0)
    assert back.flops == 2.5 * attention.flops
    # Blocks of queries leave out what is in the future of all of them.
    blocks, back = worked(TIED, "attn", keys=10)
    assert (blocks.flops, back.flops) == (4 * rows * s * 10 * d, 8 * rows * s * 10 * d)
    assert worked(TIED, "mlp.act")[0].flops == 0


@pytest.mark.parametrize("width", [4, 2])
def test_bytes_moved_by_memory_bound_kernels_equal_those_counted_by_hand(width):
    rows = 3
    s = 16
    d = 64
    f = 256
    v = 96
    heads = 4
    tokens = rows * s
    cast = 0 if width == 4 else 4 + width

    def moved(name, spec=TIED, **given):
        return tuple(
            one.unhidden + one.composed for one in worked(spec, name, width=width, **given)
        )

    weights = d * f + f
    up = (cast * weights, 3 * 4 * weights + cast * weights + width * tokens * f)
    assert moved("mlp.up") == pytest.approx(up)
    # What returns to the residual stream is added to it.
    back = moved("mlp.down")
    assert back[0] == pytest.approx(cast * (d * f + d) + 3 * width * tokens * d)
    assert moved("mlp.act") == (2 * width * tokens * f, 3 * width * tokens * f)
    assert moved("attn_norm") == (2 * 4 * tokens * d, 5 * 4 * tokens * d)
    scores = rows * heads * s * s
    q = tokens * d
    vanilla = moved("attn", keys=16)
    assert vanilla[0] == pytest.approx((4 * width + 2 * 4 + 2 * cast) * scores + 8 * width * q)
    assert vanilla[1] == pytest.approx((6 * width + 3 * 4 + 2 * cast) * scores + 8 * width * q)
    blocks = moved("attn", keys=10)
    assert blocks[0] == pytest.approx(4 * width * rows * heads * s * 10 + 8 * width * q)
    # A table's gradient is as large as the table: zeros are written first.
    assert moved("tok") == (2 * width * tokens * d, 3 * width * tokens * d + 4 * 4 * (v + 32) * d)
    assert moved("loss") == (2 * 4 * tokens * v, 4 * 4 * tokens * v)
    # Rotary positions turn q and k, of which there are half as many heads; gates leave half of what
    # they read.
    assert moved("attn", UNTIED)[0] == 10 * width * tokens * (d + d / 2)
    gated = models.graph(UNTIED).sizes["f"]
    assert moved("mlp.act", UNTIED) == (5 * width * tokens * gated, 9 * width * tokens * gated)
    norm = worked(UNTIED, "attn_norm", width=width)
    assert (norm[0].composed, norm[1].composed, norm[0].unhidden) == (
        7 * 4 * tokens * d,
        21 * 4 * tokens * d,
        0,
    )
    assert [one.launches for one in worked(TIED, "mlp.act")] == [1, 2]
    # A device of a tensor axis does its share.
    assert moved("mlp.act", split="f", ways=4) == (
        2 * width * tokens * f / 4,
        3 * width * tokens * f / 4,
    )


def test_a_device_of_a_tensor_axis_reads_and_writes_whole_what_its_split_does_not_divide():
    """By hand, over two devices: 48 tokens, 64 wide, 256 in the MLP, 4-byte numbers."""
    tokens = 48
    d = 64
    f = 256
    weights = d * f
    stream = tokens * d
    inner = tokens * f
    products = plain()
    # A column split reads all of its input, and writes half of the output.
    up = worked(TIED, "mlp.up", split="f", ways=2, engine=products)[0]
    assert up.bytes == 4 * (stream + inner / 2 + (weights + f) / 2)
    assert up[2:5] == (tokens, d, f / 2)
    # A contracted dim leaves a summand as large as the whole output.
    down = worked(TIED, "mlp.down", split="f", ways=2, engine=products)
    assert down[0].bytes == 4 * (inner / 2 + stream + (weights + d) / 2)
    assert down[0][2:5] == (tokens, f / 2, d)


def test_residuals_norms_and_launches_are_not_divided_by_a_tensor_axis():
    launched = plain(
        kernels={
            name: Moves(working=(2, 3), launches=(1, 2))
            for name in ("residual", "layernorm", "rmsnorm", "bias", "lookup")
        }
    )
    alone = worked(TIED, "attn_norm", engine=launched)
    both = worked(TIED, "attn_norm", ways=4, engine=launched)
    assert alone == both
    for spec, name, split in ((TIED, "mlp.down", "f"), (TIED, "attn.out", "n"), (TIED, "tok", "v")):
        alone = worked(spec, name, engine=launched)
        both = worked(spec, name, split=split, ways=4, engine=launched)
        assert [one.unhidden for one in both] == [one.unhidden for one in alone]
        assert [one.launches for one in both] == [one.launches for one in alone]
    # A residual stream that is divided by rows is summed in parts.
    summed = plain(kernels={"residual": Moves(working=(2, 3))})
    alone = worked(TIED, "mlp.down", engine=summed)
    rows = worked(TIED, "mlp.down", split="f", ways=4, residual="b", engine=summed)
    assert [one.unhidden for one in rows] == [one.unhidden / 4 for one in alone]


def test_every_activity_of_every_family_is_counted_by_eager_pytorch():
    """What the engine of eager PyTorch leaves out would take no time."""
    counted = load_engine("torch2024").kernels
    for spec, keys in itertools.product((TIED, UNTIED, RELU), (None, 16, 10)):
        graph = models.graph(spec)
        for op in (*graph.embedding, *graph.block, *graph.head):
            found = set(activities(graph, op, 2, 16, keys))
            assert found <= {*counted, "score_blocks"}, op.name
            assert all(size > 0 for size in activities(graph, op, 2, 16, keys).values())


def test_scores_are_computed_for_the_keys_up_to_the_end_of_a_block():
    (plain_attention,) = (op for op in models.graph(TIED).block if op.kind == "attention")

    def keys(seq_len, precision="fp32", backend="cpu", attention="sdpa", **changes):
        asked = train(seq_len=seq_len, precision=precision, attention=attention)
        return scored_keys(asked, backend, msgspec.structs.replace(plain_attention, **changes))

    assert keys(256) == (64 + 128 + 192 + 256) / 4
    assert keys(256, "bf16") == (128 + 256) / 2
    assert keys(100) == (64 * 64 + 36 * 100) / 100
    assert (
        keys(100, "bf16")
        == keys(100, attention="vanilla")
        == keys(100, backend="cuda", attention="vanilla")
        == 100
    )
    assert keys(2048) is None and keys(256, backend="cuda") is None
    # From the first key that a block's first query sees.
    assert keys(128, window=10) == (64 + 73) / 2
    assert keys(128, window=10, attention="vanilla") == 128
    assert keys(128, window=128) == keys(128)
    assert keys(64) is None and keys(64, "bf16") == keys(64, attention="vanilla") == 64


def test_blocks_of_two_kinds_have_times_of_their_own():
    spec = models.family("gemma3").shape(d_model=64, layers=6, vocab_size=300, context=1024)
    spec = msgspec.structs.replace(spec, window=msgspec.structs.replace(spec.window, size=64))
    using = costs(cluster([[device()]]), plain(), spec, seq_len=1024)
    assert using.graph.others
    # The first layer has a window, the last one sees all.
    windowed = using.unit_s(0, using.graph.block, 2, {}, 1)
    full = using.unit_s(0, using.graph.others.block, 2, {}, 1)
    assert windowed[0] < full[0] and windowed[1] < full[1]
    assert using.unit_s(0, using.graph.block, 2, {}, 1) == windowed
    whole = stage(mesh(0), (2,), units=(0, 8))
    ends = sum(
        sum(using.unit_s(0, unit, 2, {}, 1)) for unit in (using.graph.embedding, using.graph.head)
    )
    found = using.passes(whole, [2])
    assert found.forward + found.backward == pytest.approx(ends + 5 * sum(windowed) + sum(full))


def test_recomputing_a_block_runs_all_but_its_last_product_again():
    there = cluster([[device()]])
    using = costs(there, plain())
    one, again = (stage(mesh(0), (8,), recompute=recompute) for recompute in (False, True))
    usual = using.passes(one, [2])
    replay = using.passes(again, [2])
    block = [using.op_s(0, op, 2, "", 1)[0] for op in using.graph.block]
    assert replay.forward == usual.forward
    assert replay.backward - usual.backward == pytest.approx(4 * sum(block[:-1]))


def test_a_stage_takes_as_long_as_its_slowest_coordinate():
    there = cluster([[device(), device(flops={"fp32": 1e11}, bandwidth=1e10)]])
    using = costs(there, plain())
    one = stage(mesh(0, 1), (5, 1))
    alone = [using.passes(stage(mesh(rank), (rows,)), [rows]) for rank, rows in ((0, 5), (1, 1))]
    assert using.passes(one, [5, 1]) == max(alone, key=lambda found: found.forward)
    assert using.passes(stage(mesh(0, 1), (6, 0)), [6, 0]) == using.passes(
        stage(mesh(0), (6,)), [6]
    )


def test_updates_stream_the_state():
    there = cluster([[device(bandwidth=1e3)]])
    using = costs(there, plain(), UNTIED)
    parameters = using.graph.parameters()
    # Moments (8 bytes) are read and written, gradients (4) read and cleared, weights (4) written.
    took = stage_time(using, stage(mesh(0), (8,)), [8], 1).update
    assert took == pytest.approx(parameters * (2 * 8 + 2 * 4 + 4) / 1e3)
    divided = cluster([[device(bandwidth=1e3)] * 2])
    zero = stage(mesh(0, 1), (4, 4), zero=1, grad_sync=GradSync(bucket_bytes=None))
    assert stage_time(costs(divided, plain(), UNTIED), zero, [4, 4], 1).update == pytest.approx(
        took / 2
    )
