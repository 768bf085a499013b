"""Adapters in the graph: parameters, FLOPs and activations of the module, and what is refused."""

from __future__ import annotations

import msgspec
import pytest

from farspan import models
from farspan.domain.graph import backward_flops, forward_flops
from farspan.domain.model import Lora, ModelSpec, count_parameters
from farspan.domain.problems import Refusal
from farspan.domain.train import TrainSpec
from farspan.estimate.memory import activations_per_row
from farspan.models._adapters import list_projections, max_rank
from farspan.semantics.kernel_choice import scored_keys

torch = pytest.importorskip("torch")

from farspan.runtime.model.decoder import Decoder  # noqa: E402
from tests.models import test_graph  # noqa: E402
from tests.models.test_graph import (  # noqa: E402
    ATTENTION,
    FAMILIES,
    ROWS,
    counted,
    kept_by_autograd,
    shape,
)

RANK = 4
CASES = [
    (family, attention)
    for family, attention, recompute in test_graph.CASES
    if attention != "textbook" and not recompute
]


def adapted(family: str) -> ModelSpec:
    name, knobs = FAMILIES[family]
    return msgspec.structs.replace(shape(name, **knobs), lora=Lora(rank=RANK))


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_and_frozen_parameters_are_those_of_the_module(family):
    spec = adapted(family)
    with torch.device("meta"):
        parameters = list(Decoder(spec).parameters())
    trained = sum(one.numel() for one in parameters if one.requires_grad)
    graph = models.graph(spec)
    assert trained == graph.trained_parameters() == models.count_trained(spec)
    assert sum(one.numel() for one in parameters) == graph.parameters()
    assert graph.parameters() - trained == count_parameters(spec)
    assert models.graph(spec.base).trained_parameters() == count_parameters(spec)


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_flops_are_those_that_pytorch_counts(family, kind):
    """But for the first block's input, which has no gradient: a frozen product and one of an
    adapter less."""
    spec = adapted(family)
    attention, seq_len = ATTENTION[kind]
    graph = models.graph(spec)
    train = TrainSpec(steps=1, batch=ROWS, seq_len=seq_len, precision="fp32", attention=attention)
    ops = [op for number in range(graph.units) for op in graph.unit(number)]
    keys = {op: scored_keys(train, "cpu", op) for op in ops if op.kind == "attention"}
    forward = sum(forward_flops(graph, op, ROWS, seq_len, keys.get(op)) for op in ops)
    backward = sum(backward_flops(graph, op, ROWS, seq_len, keys.get(op)) for op in ops)
    head = backward_flops(graph, graph.head[1], ROWS, seq_len, None)
    assert head == forward_flops(graph, graph.head[1], ROWS, seq_len)
    by_name = {op.name: op for op in graph.block}
    unneeded = ["attn.qkv", "attn.qkv.lora_a"]
    if spec.parallel_residual:
        unneeded += ["mlp.up", "mlp.up.lora_a"]
    first = sum(forward_flops(graph, by_name[name], ROWS, seq_len) for name in unneeded)
    measured = counted(spec, seq_len, attention, False)
    assert measured == pytest.approx((forward + head, backward - head - first), rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("family", "kind"), [case for case in CASES if case[0] != "gpt2-untied"])
def test_activations_are_those_that_autograd_keeps(family, kind, precision):
    """But for the input of the first block, where its norm needs none, and of the embedding."""
    spec = adapted(family)
    attention, seq_len = ATTENTION[kind]
    graph = models.graph(spec)
    train = TrainSpec(
        steps=1, batch=ROWS, seq_len=seq_len, precision=precision, attention=attention
    )
    predicted = ROWS * activations_per_row(graph, (0, graph.units), train, "cpu")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    kept = kept_by_autograd(spec, seq_len, attention, False, dtype)
    width = 4 if precision == "fp32" or spec.norm == "rmsnorm" else 2
    first = 0 if spec.norm_place == "after" else width * ROWS * seq_len * spec.d_model
    assert kept == pytest.approx(predicted - first, rel=0.04)


def test_family_without_a_named_projection_is_refused():
    spec = shape("llama")
    entries = [
        entry for entry in models.family("llama").tensors(spec) if "mlp.down" not in entry.ours
    ]
    with pytest.raises(Refusal, match="family llama lacks"):
        list_projections(entries, spec)


def test_rank_is_at_most_the_smallest_dimension_of_a_projection():
    spec = shape("llama", d_model=64, heads=4, kv_heads=1)
    assert max_rank(spec, models.projections(spec)) == 16
