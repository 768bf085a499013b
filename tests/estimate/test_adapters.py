"""Adapters priced: their state and that of frozen weights, the sums of their gradients, and passes
without gradients of frozen weights."""

from __future__ import annotations

import msgspec
import pytest

from farspan import models
from farspan.domain.graph import backward_flops, forward_flops
from farspan.domain.model import Lora, count_parameters, train_flops_per_token
from farspan.domain.plan import find_flaw
from farspan.domain.train import Muon, Optimizer
from farspan.estimate.memory import logits_bytes
from farspan.techniques import ADAPTING, technique_names
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

RANK = 8
BASES = {"tied": TIED, "untied": UNTIED}


@pytest.fixture(params=BASES)
def spec(request):
    return msgspec.structs.replace(BASES[request.param], lora=Lora(rank=RANK))


@pytest.mark.parametrize(("precision", "widths"), [("fp32", (4, 4, 8)), ("bf16", (2, 4, 12))])
def test_state_is_that_of_adapters_beside_frozen_weights(spec, precision, widths):
    one = stage(mesh(0), (8,))
    using = costs(cluster([[device()]]), plain(), spec, precision=precision)
    memory = using.memory_of(one, 8, 1, 0, piped=False)
    trained = models.count_trained(spec)
    frozen = count_parameters(spec)
    weights, gradients, optimizer = widths
    assert memory.weights == weights * (frozen + trained)
    assert memory.gradients == gradients * trained
    assert memory.optimizer == optimizer * trained
    averaging = Optimizer(average=0.9)
    averaged = costs(
        cluster([[device()]]), plain(), spec, precision=precision, optimizer=averaging
    ).memory_of(one, 8, 1, 0, piped=False)
    assert averaged.optimizer == (optimizer + 4) * trained


def test_workers_sum_the_gradients_of_adapters_alone(spec):
    both = stage(mesh(0, 1), (4, 4))
    there = cluster([[device()] * 2])
    (sums,) = costs(there, plain(), spec).batch_axes(both, 1)
    assert sums.size == 4 * models.count_trained(spec)
    (whole,) = costs(there, plain(), spec.base).batch_axes(both, 1)
    assert whole.size == 4 * count_parameters(spec)


def test_frozen_products_have_no_weight_gradient(spec):
    graph = models.graph(spec)
    frozen = [op for op in graph.block if op.kind == "matmul" and op.is_frozen]
    adapters = [op for op in graph.block if "lora" in op.name]
    assert len(frozen) == 4 and len(adapters) == 8
    for op in (*frozen, graph.head[1]):
        forward = forward_flops(graph, op, 2, 16)
        assert backward_flops(graph, op, 2, 16, None) == forward
    for op in adapters:
        assert backward_flops(graph, op, 2, 16, None) == 2 * forward_flops(graph, op, 2, 16)
    # Each weight of an adapter multiplies every token.
    flops = sum(forward_flops(graph, op, 1, 1) for op in adapters)
    assert graph.layers * flops == 2 * models.count_trained(spec)
    there = cluster([[device()]])
    one = stage(mesh(0), (8,))
    adapted = costs(there, plain(), spec).passes(one, (8,))
    whole = costs(there, plain(), spec.base).passes(one, (8,))
    assert adapted.backward < whole.backward
    assert train_flops_per_token(spec, 16) < train_flops_per_token(spec.base, 16)


def test_loss_of_a_frozen_head_keeps_no_gradient_of_it(spec):
    engine = plain(logits_chunk=2**20)
    whole = logits_bytes(models.graph(spec.base), train(), 8, engine)
    adapted = logits_bytes(models.graph(spec), train(), 8, engine)
    # Nor is the softmax counted, which on CPUs takes the logits' place.
    assert whole - adapted == 8 * spec.vocab_size * spec.d_model + 4 * 8 * 16 * spec.vocab_size


def test_slack_is_its_own_where_weights_are_frozen(spec):
    there = cluster([[device()]])
    one = stage(mesh(0), (8,))
    engine = plain(slack=2.0, frozen_slack=1.5)
    memories = [
        costs(there, engine, model).memory_of(one, 8, 1, 0, piped=False)
        for model in (spec.base, spec)
    ]
    shares = [one.fragmentation / (one.activations + one.logits) for one in memories]
    assert shares == pytest.approx([1.0, 0.5])


def test_plan_that_divides_what_adapters_need_whole_has_a_flaw(spec):
    there = cluster([[device()] * 2])
    data = plan(there, pipeline([stage(mesh(0, 1), (4, 4))], 1, (1,)))
    data = msgspec.structs.replace(data, model=spec)
    assert find_flaw(data) == ""
    for changes in ({"zero": 2}, {"mesh": mesh(0, 1, tensor=2), "rows": (8,)}):
        one = msgspec.structs.replace(data.replicas[0].stages[0], **changes)
        divided = msgspec.structs.replace(data, replicas=(pipeline([one], 1, (1,)),))
        assert "adapters" in find_flaw(divided)
        assert not find_flaw(msgspec.structs.replace(divided, model=spec.base))
    muon = msgspec.structs.replace(data.train, optimizer=Optimizer(muon=Muon()))
    assert "Muon" in find_flaw(msgspec.structs.replace(data, train=muon))


def test_data_parallelism_alone_trains_adapters():
    assert set(technique_names()) > ADAPTING == {"data"}
