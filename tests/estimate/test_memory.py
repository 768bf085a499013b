"""Bytes of a worker by hand: state by ZeRO's level, activations in flight, recomputation, tied
tables, splits."""

from __future__ import annotations

import msgspec
import pytest

from farspan import models
from farspan.domain.cluster import Interconnect, Link
from farspan.domain.plan import GradSync, Sync
from farspan.estimate.estimate_plan import estimate
from farspan.estimate.memory import (
    activations_per_row,
    local_parameters,
    logits_bytes,
    recomputed_per_row,
    state_bytes,
)
from farspan.semantics.tensor_sharding import RESIDUAL
from tests.estimate.parts import (
    TIED,
    UNTIED,
    cluster,
    costs,
    device,
    mesh,
    pipeline,
    plain,
    plan,
    stage,
    train,
)

S = 16
D = 64
V = 96
H = 4
F = 256
#: What a GPT-2 block keeps of one sequence in fp32 beside scores: two norms' inputs, inputs of four
#: matrices (the last of F), q, k, v, and the activation's input.
GPT2_BLOCK = 4 * S * (2 * D + 3 * D + F + 3 * D + F)


def alone(**changes):
    there = cluster([[device()]])
    return costs(there, plain(), **changes), stage(mesh(0), (8,))


def test_state_by_zero_level():
    # Weights 2, gradients 4, optimizer 12 bytes a parameter in bf16 (arXiv 1910.02054 has 2, 2,
    # 12).
    bf16 = train(precision="bf16")
    assert state_bytes(100, bf16, plain(), 0, 4) == (200, 400, 1200)
    assert state_bytes(100, bf16, plain(), 1, 4) == (200, 400, 300)
    assert state_bytes(100, bf16, plain(), 2, 4) == (200, 100, 300)
    assert state_bytes(100, bf16, plain(), 3, 4) == (50, 100, 300)
    assert sum(state_bytes(100, train(), plain(), 0, 4)) == 1600


def test_activations_of_a_block_by_hand():
    graph = models.graph(TIED)
    assert activations_per_row(graph, (1, 2), train(), "cuda") == GPT2_BLOCK
    assert activations_per_row(graph, (1, 4), train(), "cuda") == 3 * GPT2_BLOCK
    assert activations_per_row(graph, (1, 2), train(precision="bf16"), "cuda") == GPT2_BLOCK / 2
    # Probabilities of 4 heads: on CPUs in bf16 or over many positions, and by the textbook, where
    # bf16 has an fp32 softmax beside its copy.
    scores = H * S * S
    assert activations_per_row(graph, (1, 2), train(), "cpu") == GPT2_BLOCK
    assert (
        activations_per_row(graph, (1, 2), train(precision="bf16"), "cpu")
        == GPT2_BLOCK / 2 + 2 * scores
    )
    assert (
        activations_per_row(graph, (1, 2), train(attention="vanilla"), "cuda")
        == GPT2_BLOCK + 4 * scores
    )
    textbook = train(attention="vanilla", precision="bf16")
    assert activations_per_row(graph, (1, 2), textbook, "cuda") == GPT2_BLOCK / 2 + 6 * scores
    # Final norm and head keep their inputs; the embedding nothing.
    assert activations_per_row(graph, (5, 6), train(), "cuda") == 4 * S * 2 * D
    assert activations_per_row(graph, (0, 1), train(), "cuda") == 0


def test_recomputed_blocks_keep_their_inputs():
    graph = models.graph(TIED)
    assert activations_per_row(graph, (1, 4), train(), "cuda", recompute=True) == 3 * 4 * S * D
    assert recomputed_per_row(graph, train(), "cuda") == GPT2_BLOCK
    using, one = alone()
    again = msgspec.structs.replace(one, recompute=True)
    head = 4 * S * 2 * D
    assert using.memory_of(again, 2, 3, 0, piped=False).activations == 2 * (
        3 * (4 * 4 * S * D + head) + GPT2_BLOCK
    )
    assert using.memory_of(one, 2, 3, 0, piped=False).activations == 2 * 3 * (4 * GPT2_BLOCK + head)
    # A stage without blocks has none to hold.
    ends = msgspec.structs.replace(again, units=(5, 6))
    assert using.memory_of(ends, 2, 1, 0).activations == 2 * head


def test_splits_divide_what_they_name():
    graph = models.graph(TIED)
    splits = {
        "attn.qkv": "n",
        "attn": "n",
        "attn.out": "n",
        "mlp.up": "f",
        "mlp.act": "f",
        "mlp.down": "f",
    }
    # Inputs of norms and of the column-split matrices stay whole.
    kept = 4 * S * (2 * D + 2 * D) + 4 * S * (3 * D + D + 2 * F) / 4
    assert activations_per_row(graph, (1, 2), train(), "cuda", splits=splits, ways=4) == kept
    rows = dict.fromkeys([op.name for op in graph.block], "b") | {RESIDUAL: "b"}
    assert (
        activations_per_row(graph, (1, 2), train(), "cuda", splits=rows, ways=4) == GPT2_BLOCK / 4
    )
    assert (
        activations_per_row(graph, (1, 2), train(), "cuda", splits=rows, ways=4, recompute=True)
        == S * D
    )
    # Biases of row-split matrices and norms stay whole: 2 x 2 D of norms, D of each.
    block = graph.parameters(1, 2)
    assert local_parameters(graph, (1, 2), splits, 4) == (block - 6 * D) / 4 + 6 * D


def test_a_tied_table_counts_once_on_one_stage_and_at_both_ends_of_a_pipeline():
    graph = models.graph(TIED)
    table = V * D
    positions = 32 * D
    assert local_parameters(graph, (0, 6), {}, 1) == graph.parameters()
    assert local_parameters(graph, (0, 1), {}, 1) == table + positions
    assert local_parameters(graph, (5, 6), {}, 1) == table + 2 * D
    assert (
        local_parameters(graph, (0, 3), {}, 1) + local_parameters(graph, (3, 6), {}, 1)
        == graph.parameters() + table
    )
    blocks = 4 * graph.parameters(1, 2) + positions + 2 * D
    # Where one end needs it whole the device holds it whole.
    assert local_parameters(graph, (0, 6), {"tok": "v", "head": "v"}, 2) == blocks + table / 2
    assert local_parameters(graph, (0, 6), {"tok": "v"}, 2) == blocks + table
    assert local_parameters(graph, (0, 6), {"head": "v"}, 2) == blocks + table
    assert (
        local_parameters(models.graph(UNTIED), (0, 6), {"head": "v"}, 2)
        == models.graph(UNTIED).parameters() - table / 2
    )


def test_logits_whole_and_in_chunks():
    graph = models.graph(TIED)
    # fp32 logits and their softmax; in bf16 the softmax is twice as wide.
    assert logits_bytes(graph, train(), 2, plain()) == 2 * S * V * (4 + 4)
    assert logits_bytes(graph, train(precision="bf16"), 2, plain()) == 2 * S * V * (2 + 4)
    assert logits_bytes(graph, train(), 2, plain(), share=0.5) == 2 * S * V * 4
    # In chunks the head's gradient and its fp32 sum are there beside them.
    chunked = plain(logits_chunk=1000)
    assert logits_bytes(graph, train(), 2, chunked) == 1000 * 2 + 2 * 4 * V * D
    assert logits_bytes(graph, train(), 0, chunked) == 2 * 4 * V * D


def test_logits_of_a_compiled_loss_on_a_gpu_are_larger_chunks_within_a_share_of_its_memory():
    graph = models.graph(TIED)
    given = (graph, train(precision="bf16"), 2000, plain(logits_chunk=1000), "cuda")
    # Multiplied in multiples of 64, of which there is a copy, and fp32 sums.
    padded = 128
    assert V == 96
    head = (2 * 4 + 2) * padded * D
    # 4,096 rows where they fit into 1/32 of the memory, in multiples of 256.
    assert logits_bytes(*given) == 4096 * padded * 2 + head
    assert logits_bytes(*given, memory=32 * 1000 * padded * 2) == 768 * padded * 2 + head
    # No more than there are, and not where the vocabulary is divided.
    few = (graph, train(precision="bf16"), 2, plain(logits_chunk=10), "cuda")
    assert logits_bytes(*few) == max(2 * S * padded * 2, 10 * 3) + head
    assert logits_bytes(*given, head_share=0.5) == 1000 * 3 + 2 * 4 * V * D / 2
    # Nothing is copied of a vocabulary of 64 x 128 tokens.
    even = msgspec.structs.replace(graph, sizes=graph.sizes | {"v": 8192})
    assert logits_bytes(even, *few[1:]) == 2 * S * 8192 * 2 + 2 * 4 * 8192 * D


def test_microbatches_in_flight_hold_activations_and_buffers():
    there = cluster([[device()] * 2])
    using = costs(there, plain(framework=7))
    stages = [stage(mesh(0), (8,), (0, 3)), stage(mesh(1), (8,), (3, 6))]
    replica = pipeline(stages, 4, (3, 9))  # No more than the stage before lets through.
    first, last = (using.memory(replica, i, 0) for i in range(2))
    message = 4 * 2 * S * D
    assert first.activations == 2 * 3 * 2 * GPT2_BLOCK
    assert last.activations == 2 * 3 * (2 * GPT2_BLOCK + 4 * S * 2 * D)
    assert first.buffers == last.buffers == 2 * 3 * message
    assert first.logits == 0 and last.logits == 2 * S * V * 8
    assert first.framework == 7
    assert first.weights == 4 * using.graph.parameters(0, 3)
    assert first.total == sum(msgspec.structs.astuple(first))


def test_a_heads_gradient_is_kept_for_every_microbatch_in_flight():
    """It is made in the forward pass, in the working precision, of what a device holds of the
    head."""
    there = cluster([[device()] * 2])
    whole, chunked = (
        costs(there, plain(logits_chunk=chunk), precision="bf16") for chunk in (None, 1000)
    )
    last = stage(mesh(0), (8,), (3, 6))
    more = [
        chunked.memory_of(last, 2, d, 0).activations - whole.memory_of(last, 2, d, 0).activations
        for d in (1, 4)
    ]
    assert more == [0, 3 * 2 * V * D]
    first = stage(mesh(0), (8,), (0, 3))
    assert chunked.memory_of(first, 2, 4, 0) == whole.memory_of(first, 2, 4, 0)


def test_buffers_of_sums_and_gathers():
    there = cluster([[device(framework=11)] * 2])
    using = costs(there, plain(), precision="bf16")
    bucketed = stage(mesh(0, 1), (4, 4), grad_sync=GradSync(bucket_bytes=1000))
    found = using.memory_of(bucketed, 4, 1, 0, piped=False)
    # Whole sums keep a bucket for every gradient, scattered ones reuse theirs.
    assert (found.buffers, found.framework) == (4 * using.graph.parameters(), 11)
    assert (
        using.memory_of(msgspec.structs.replace(bucketed, zero=2), 4, 1, 0, piped=False).buffers
        == 1000
    )
    # Full sharding holds two gathered units, of which the block is the largest here.
    gathered = using.memory_of(msgspec.structs.replace(bucketed, zero=3), 4, 1, 0, piped=False)
    assert gathered.buffers == 1000 + 2 * 2 * using.graph.parameters(1, 2)
    assert gathered.weights == 2 * using.graph.parameters() / 2
    alone = using.memory_of(
        stage(mesh(0), (8,), grad_sync=GradSync(bucket_bytes=1000)), 8, 1, 0, piped=False
    )
    assert alone.buffers == 0


def test_replicas_keep_what_they_last_agreed_on_and_the_outer_momentum():
    there = cluster([[device()] * 2])
    replicas = [pipeline([stage(mesh(rank), (4,))], 1, (1,)) for rank in range(2)]
    graph = models.graph(TIED)
    meeting = estimate(plan(there, *replicas, sync=Sync(every=30)), graph, there, plain())
    apart = estimate(plan(there, *replicas), graph, there, plain())
    for with_sync, without in zip(meeting.memory, apart.memory, strict=True):
        assert with_sync.optimizer - without.optimizer == 8 * graph.parameters()


def test_zero_divides_the_outer_optimizer_state_of_replicas():
    there = cluster(
        [[device()] * 2], [[device()] * 2], links=(Link(a="A", b="B", rtt_s=0.1, bandwidth=1e6),)
    )
    graph = models.graph(TIED)
    took = []
    for zero in (0, 1):
        replicas = [pipeline([stage(mesh(a, a + 1), (2, 2), zero=zero)], 1, (1,)) for a in (0, 2)]
        meeting = estimate(
            plan(there, *replicas, sync=Sync(every=30)), graph, there, plain(meeting_passes=300)
        )
        apart = estimate(plan(there, *replicas), graph, there, plain())
        added = meeting.memory[0].optimizer - apart.memory[0].optimizer
        assert added == pytest.approx(8 * graph.parameters() / (1 + zero))
        took.append(meeting.step_s - apart.step_s)
    assert took[1] < 0.999 * took[0], "who holds half of the state makes half of the outer step"


def test_the_heads_gradient_is_whole_where_rows_are_divided():
    there = cluster([[device()] * 2])
    using = costs(there, plain(logits_chunk=10**9))
    wide = mesh(0, 1, data=1, tensor=2)
    whole, rows, vocabulary = (
        using.memory_of(stage(wide, (8,), splits=splits), 8, 1, 0, piped=False).logits
        for splits in ({}, {"head": "b", "loss": "b"}, {"head": "v", "loss": "v"})
    )
    # Two sums and a copy of a head that is multiplied as one of 128 tokens.
    gradients = (8 + 4) * 128 * D
    assert rows - gradients == pytest.approx((whole - gradients) / 2)
    # A part of the vocabulary is multiplied as it is.
    logits = whole - gradients
    assert vocabulary == pytest.approx((logits + 8 * using.graph.size("vd")) / 2)


def test_coordinates_hold_their_own_rows():
    there = cluster([[device()] * 2])
    replica = pipeline([stage(mesh(0, 1), (7, 1))], 2, (1,))
    found = estimate(plan(there, replica), models.graph(TIED), there, plain())
    per_row = 4 * GPT2_BLOCK + 4 * S * 2 * D
    assert [memory.activations for memory in found.memory] == [4 * per_row, per_row]
    assert found.memory_bytes == found.memory[0].total


def test_non_tensor_memory_is_itemized_as_workspace_communicators_fragmentation():
    nvlink = Interconnect(kind="nvlink", rate=3e11)
    there = cluster([[device(interconnect=nvlink)] * 4, [device(interconnect=nvlink)] * 4])
    using = costs(there, plain(workspace=7, channel_bytes=10, slack=1.25, overhead=1.0))
    both = mesh(0, 1, 2, 3, data=2, tensor=2)
    one = using.memory_of(stage(both, (4, 4)), 4, 1, 0, piped=False)
    # An axis each, and all workers.
    assert (one.workspace, one.communicators) == (7, 3 * 24 * 10)
    assert using.memory_of(stage(both, (4, 4)), 4, 1, 0, piped=True).communicators == 4 * 24 * 10
    assert using.memory_of(stage(mesh(0), (4,)), 4, 1, 0, piped=False).communicators == 0
    buses = costs(cluster([[device()] * 2]), plain(channel_bytes=10))
    assert buses.memory_of(stage(mesh(0, 1), (4, 4)), 4, 1, 0, piped=False).communicators == 4 * 10
    # A quarter of what comes and goes is lost to holes; state stays.
    held = one.activations + one.logits
    assert one.fragmentation == pytest.approx(held / 4)
    assert one.total == round(sum(msgspec.structs.astuple(one))) == round(sum(one.shown.values()))
