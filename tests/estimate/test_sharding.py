"""Splits over a tensor axis: the tables against tensors that are really split, moved and
multiplied, rank by rank."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan import models
from farspan.estimate.stage_time import stage_time
from farspan.semantics.tensor_sharding import (
    COPY,
    PARTIAL,
    RESIDUAL,
    between,
    returns_to_residual,
    strategies,
    strategy,
    weight_share,
    work_share,
)
from tests.estimate.parts import TIED, cluster, costs, device, mesh, plain, stage

WAYS = 2
ROWS = 4
POSITIONS = 3
LLAMA = models.family("llama").shape(
    d_model=8, layers=1, heads=4, kv_heads=2, d_ff=6, vocab_size=10, context=8
)
GPT2 = models.family("gpt2").shape(
    d_model=8, layers=1, heads=2, d_ff=4, vocab_size=10, context=8, tied=False
)


def split(whole, dims, layout, rng):
    """The parts of each rank of a tensor in a layout; partial sums are any summands."""
    if layout == COPY:
        return [whole] * WAYS
    if layout == PARTIAL:
        first = rng.normal(size=whole.shape)
        return [first, whole - first]
    return np.split(whole, WAYS, axis=dims.index(layout))


def joined(parts, dims, layout):
    """The whole tensor that parts in a layout stand for; copies must agree."""
    if layout == COPY:
        np.testing.assert_allclose(parts[0], parts[1])
        return parts[0]
    return sum(parts) if layout == PARTIAL else np.concatenate(parts, axis=dims.index(layout))


def moved(parts, dims, have, want, names):
    """Parts in layout `want`, by these collectives alone and whatever a rank can do by itself."""
    for name in names:
        if name == "all_reduce":
            assert have == PARTIAL
            parts = [sum(parts)] * WAYS
            have = COPY
        elif name == "reduce_scatter":
            assert have == PARTIAL
            parts = np.split(sum(parts), WAYS, axis=dims.index(want))
            have = want
        elif name == "all_gather":
            parts = [np.concatenate(parts, axis=dims.index(have))] * WAYS
            have = COPY
        else:
            assert name == "all_to_all"
            whole = np.concatenate(parts, axis=dims.index(have))
            parts = np.split(whole, WAYS, axis=dims.index(want))
            have = want
    if have == COPY and want not in (COPY, PARTIAL):
        parts = [
            np.split(part, WAYS, axis=dims.index(want))[rank] for rank, part in enumerate(parts)
        ]
        have = want
    assert have == want
    return parts


@pytest.mark.parametrize("writes", [COPY, PARTIAL, "b", "f"])
@pytest.mark.parametrize(
    ("reads", "gradient"), [(COPY, COPY), (COPY, PARTIAL), ("b", "b"), ("f", "f"), ("s", "s")]
)
def test_collectives_between_two_layouts_move_values_there_and_gradients_back(
    writes, reads, gradient
):
    rng = np.random.default_rng(0)
    dims = "bsf"
    value = rng.normal(size=(4, 2, 6))
    slope = rng.normal(size=(4, 2, 6))
    forward, backward = between(writes, reads, gradient)
    parts = moved(split(value, dims, writes, rng), dims, writes, reads, forward)
    np.testing.assert_allclose(joined(parts, dims, reads), value)
    # A producer of summands needs the whole gradient, as one of copies does.
    needed = COPY if writes == PARTIAL else writes
    back = moved(split(slope, dims, gradient, rng), dims, gradient, needed, backward)
    np.testing.assert_allclose(joined(back, dims, needed), slope)


def test_collectives_are_there_only_where_ranks_lack_something():
    rng = np.random.default_rng(0)
    dims = "bf"
    needing = 0
    value = rng.normal(size=(4, 6))
    for writes in (COPY, PARTIAL, "b", "f"):
        for reads, gradient in ((COPY, COPY), (COPY, PARTIAL), ("b", "b"), ("f", "f")):
            forward, backward = between(writes, reads, gradient)
            needed = COPY if writes == PARTIAL else writes
            for have, want, names in ((writes, reads, forward), (gradient, needed, backward)):
                if names:
                    needing += 1
                    with pytest.raises(AssertionError):
                        moved(split(value, dims, have, rng), dims, have, want, ())
    assert needing == 20


class Linear:
    """An operator as a linear map of the same dims: what is not an einsum drops columns or sums
    them, which splits alike."""

    def __init__(self, op, graph, rng):
        self.op = op
        self.graph = graph
        self.dims = op.inputs[0] + ("v" if op.kind == "lookup" else "")
        self.weight = rng.normal(size=self.shape(op.weights[0].dims)) if op.weights else None
        out = op.output
        weight = op.inputs[-1]
        self.forward_sum = f"{self.dims},{weight}->{out}"
        self.input_sum = f"{out},{weight}->{self.dims}"
        self.weight_sum = f"{self.dims},{out}->{weight}"

    def shape(self, dims):
        return tuple(self.graph.size(dim, b=ROWS, s=POSITIONS) for dim in dims)

    def forward(self, x, weight):
        if weight is not None:
            return np.einsum(self.forward_sum, x, weight)
        return x[..., : self.graph.sizes["r"]] if self.op.kind == "attention" else x.sum(-1)

    def backward(self, x, weight, slope):
        if weight is not None:
            return np.einsum(self.input_sum, slope, weight), np.einsum(self.weight_sum, x, slope)
        if self.op.kind == "attention":
            return np.pad(
                slope, [(0, 0)] * (slope.ndim - 1) + [(0, x.shape[-1] - slope.shape[-1])]
            ), None
        return np.broadcast_to(slope[..., None], x.shape), None


def chain(graph, residual, splits):
    """The operators in order with the layouts around them: (operator, strategy, layout written to
    it, and of what it writes to)."""
    found = []
    writes = residual
    for op in (*graph.embedding, *graph.block, *graph.head):
        plan = strategy(op, splits[op.name])
        found.append((op, plan, writes))
        writes = residual if returns_to_residual(op) else plan.writes
    return found


@given(st.data(), st.sampled_from([LLAMA, GPT2]))
def test_a_model_whose_operators_are_split_anyhow_computes_what_the_whole_one_does(data, spec):
    graph = models.graph(spec)
    rng = np.random.default_rng(0)
    residual = data.draw(st.sampled_from([COPY, "b"]))
    splits = {
        op.name: data.draw(
            st.sampled_from([s.split for s in strategies(op, graph.sizes, WAYS, ROWS)])
        )
        for op in (*graph.embedding, *graph.block, *graph.head)
    }
    todo = [
        (Linear(op, graph, rng), plan, writes)
        for op, plan, writes in chain(graph, residual, splits)
    ]
    tokens = rng.integers(0, spec.vocab_size, size=(ROWS, POSITIONS))
    whole = np.eye(spec.vocab_size)[tokens]
    parts = None
    tape = []
    for linear, plan, writes in todo:
        op = linear.op
        dims = linear.dims
        if op.kind == "lookup":
            # Each rank knows the tokens and looks up what it holds.
            reads = plan.split if plan.split in ("b", "v") else COPY
            parts = split(whole, dims, reads, rng)
        else:
            parts = moved(
                parts, dims, writes, plan.reads, between(writes, plan.reads, plan.gradient)[0]
            )
        weights = [None] * WAYS
        if linear.weight is not None:
            weights = split(
                linear.weight,
                op.inputs[-1],
                plan.split if plan.split in op.inputs[-1] else COPY,
                rng,
            )
        tape.append((linear, plan, writes, whole, parts, weights))
        whole = linear.forward(whole, linear.weight)
        parts = [linear.forward(x, w) for x, w in zip(parts, weights, strict=True)]
        np.testing.assert_allclose(joined(parts, op.output, plan.writes), whole)
        if returns_to_residual(op):
            parts = moved(
                parts, op.output, plan.writes, residual, between(plan.writes, residual, residual)[0]
            )
    slope = rng.normal(size=whole.shape)
    last = tape[-1][1].writes
    backward_agrees(
        tape, residual, slope, split(slope, "bs", COPY if last == PARTIAL else last, rng)
    )


def backward_agrees(tape, residual, slope, slopes):
    for linear, plan, writes, x, xs, weights in reversed(tape):
        op = linear.op
        dims = linear.dims
        if returns_to_residual(op):
            needed = COPY if plan.writes == PARTIAL else plan.writes
            slopes = moved(
                slopes, op.output, residual, needed, between(plan.writes, residual, residual)[1]
            )
        found = [linear.backward(*rank) for rank in zip(xs, weights, slopes, strict=True)]
        into, of_weight = linear.backward(x, linear.weight, slope)
        if of_weight is not None:
            # Rows divided among ranks leave the weights' gradients partial; else each rank has its
            # own part's.
            held = op.inputs[-1]
            layout = PARTIAL if plan.split == "b" else plan.split if plan.split in held else COPY
            np.testing.assert_allclose(
                joined([rank[1] for rank in found], held, layout), of_weight, atol=1e-9
            )
        if op.kind == "lookup":
            return
        slope = into
        slopes = [rank[0] for rank in found]
        np.testing.assert_allclose(joined(slopes, dims, plan.gradient), slope, atol=1e-9)
        needed = COPY if writes == PARTIAL else writes
        slopes = moved(
            slopes, dims, plan.gradient, needed, between(writes, plan.reads, plan.gradient)[1]
        )


def test_strategies_are_copies_rows_and_dims_that_divide_evenly():
    graph = models.graph(LLAMA)
    ops = {op.name: op for op in (*graph.embedding, *graph.block, *graph.head)}
    assert [s.split for s in strategies(ops["mlp.up"], graph.sizes, 2, 4)] == ["", "b", "f"]
    assert [s.split for s in strategies(ops["mlp.up"], graph.sizes, 4, 6)] == [""]
    assert [s.split for s in strategies(ops["attn.qkv"], graph.sizes, 2, 3)] == ["", "n"]
    with pytest.raises(ValueError, match="mlp_norm cannot be split over 'f'"):
        strategy(ops["mlp_norm"], "f")


def test_shares():
    graph = models.graph(TIED)
    up = next(op for op in graph.block if op.name == "mlp.up")
    assert weight_share(up, "wfd", "f", 4) == 0.25
    assert weight_share(up, "wfd", "b", 4) == 1.0
    assert (work_share("", 4), work_share("b", 4)) == (1.0, 0.25)


def test_megatron_block_pays_two_sums_each_way():
    """arXiv 1909.08053, figure 3: one all-reduce after attention and one after the MLP, and as many
    backward."""
    there = cluster([[device()] * 2])
    using = costs(there, plain(local_rate=1e6))
    splits = {
        "attn.qkv": "n",
        "attn": "n",
        "attn.out": "n",
        "mlp.up": "f",
        "mlp.act": "f",
        "mlp.down": "f",
    }
    one = using.network.all_reduce_s((0, 1), 4 * 2 * 16 * 64)
    assert using.unit_wait((0, 1), using.graph.block, 2, splits, 1) == pytest.approx(
        (2 * one, 2 * one)
    )
    # Over rows each sum becomes a scatter and a gather, which cost the same together.
    sequence = using.unit_wait(
        (0, 1), using.graph.block, 2, splits | {RESIDUAL: "b", "attn_norm": "b", "mlp_norm": "b"}, 1
    )
    assert sequence == pytest.approx((2 * one, 2 * one))
    # Tokens are each rank's own: a split table pays for the sum of its output alone.
    assert using.unit_wait((0, 1), using.graph.embedding, 2, {"tok": "v"}, 1) == pytest.approx(
        (one, 0.0)
    )
    # Each of a sum's two steps goes there and is answered, and both ways the slower worker's turn
    # must come: that of a share, or of one of three on a core for which the two others go on
    # before.
    held = costs(cluster([[device(), device(turn_s=0.25)]]), plain(local_rate=1e6))
    assert held.unit_wait((0, 1), using.graph.block, 2, splits, 1)[0] == pytest.approx(
        2 * (one + 4 * 0.25)
    )
    crowd = cluster([[device(backend="cpu")] * 3])
    crowd = crowd.with_hosts(lambda host: msgspec.structs.replace(host, cpus=1, local_rate=1e6))
    crowded = costs(crowd, plain(turn_s=0.5))
    assert crowded.unit_wait((0, 1), using.graph.block, 2, splits, 1)[0] == pytest.approx(
        2 * (one + 4 * 2 * 0.5)
    )
    # Beside two others each byte that a ring of two brings by, a whole sum's bytes, takes longer as
    # well.
    spun = costs(crowd, plain(turn_s=0.5, turn_byte_s=1e-3))
    assert spun.waited_s("all_reduce", (0, 1), 100.0, 1) - crowded.waited_s(
        "all_reduce", (0, 1), 100.0, 1
    ) == (pytest.approx(2 * 1e-3 * 100))
    # Who sends to everyone sends each a part of its own part.
    for name, share in (("all_gather", 2 / 3), ("all_to_all", 2 / 9)):
        three = [using.waited_s(name, (0, 1, 2), 900.0, 1) for using in (spun, crowded)]
        assert three[0] - three[1] == pytest.approx(2 * 1e-3 * 900 * share)
    # Rows divided over the axis leave norms' gradients to be summed after the step.
    halves = stage(
        mesh(0, 1, tensor=2),
        (4,),
        splits=dict.fromkeys([op.name for op in using.graph.block], "b"),
        units=(1, 2),
    )
    whole = stage(mesh(0, 1, tensor=2), (4,), units=(1, 2))
    summed = using.network.all_reduce_s((0, 1), 4 * using.graph.parameters(1, 2))
    assert stage_time(using, halves, [4], 1).exposed - stage_time(
        using, whole, [4], 1
    ).exposed == pytest.approx(summed)
