"""LoRA adapters of a model (arXiv 2106.09685): the projections that have them, and what they change
of its operators."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from farspan.domain.graph import Operator, OpGraph, Weight
from farspan.domain.model import Lora, ModelSpec
from farspan.domain.problems import Refusal
from farspan.models._family import TensorMap

#: Parameters of a block that are adapted: all its matrices, as "LoRA Without Regret" (Schulman et
#: al. 2025) found best.
PROJECTIONS = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
#: The dims of adapters: their rank, and the matrices that lie in one parameter.
RANK_DIM = "i"
MATRIX_DIMS = {"attn.qkv": "j", "mlp.up": "k"}

#: Of each adapted parameter the rows of the matrices in it, each with an adapter of its own: q, k
#: and v where Hugging Face has three modules of them.
Projections = dict[str, tuple[int, ...]]


def list_projections(block: Iterable[TensorMap], spec: ModelSpec) -> Projections:
    """Return the adapted parameters of block 0, from the map of its tensors. Raises Refusal
    (model-unsupported) for a family that names no module for one."""
    projections: Projections = {}
    for entry in block:
        name = entry.ours.removeprefix("blocks.0.").removesuffix(".weight")
        if name in PROJECTIONS:
            projections[name] = entry.rows
    missing = [name for name in PROJECTIONS if name not in projections]
    if missing:
        raise Refusal(
            "model-unsupported",
            what=f"LoRA needs named projections, which family {spec.family} lacks",
            where="run.yaml, key train.lora",
            fact=f"its tensors name no matrix for {', '.join(missing)}",
            remedy="remove train.lora",
            key="train.lora",
        )
    return projections


def projection_inputs(spec: ModelSpec) -> dict[str, int]:
    """Return the columns of each projection."""
    return {
        "attn.qkv": spec.d_model,
        "attn.out": spec.heads * spec.head_dim,
        "mlp.up": spec.d_model,
        "mlp.down": spec.d_ff,
    }


def max_rank(spec: ModelSpec, projections: Projections) -> int:
    """Return the smallest dimension of all projections: adapters of more have no use."""
    columns = projection_inputs(spec)
    return min(min(columns[name], *rows) for name, rows in projections.items())


def adapt_graph(graph: OpGraph, lora: Lora, projections: Projections) -> OpGraph:
    """Return a graph whose weights are frozen, with the operators of adapters after their
    projections.

    A frozen product keeps no input, as its weight has no gradient; the adapter's does. All blocks
    are taken to be equal, though the first one's input has no gradient.
    """
    sizes = graph.sizes | {RANK_DIM: lora.rank}
    for name, dim in MATRIX_DIMS.items():
        sizes[dim] = len(projections[name])
    others = graph.others
    if others:
        others = msgspec.structs.replace(others, block=_adapt_block(others.block, projections))
    return msgspec.structs.replace(
        graph,
        sizes=sizes,
        embedding=tuple(map(_freeze, graph.embedding)),
        block=_adapt_block(graph.block, projections),
        others=others,
        head=tuple(map(_freeze, graph.head)),
    )


def _adapt_block(block: tuple[Operator, ...], projections: Projections) -> tuple[Operator, ...]:
    adapted = list[Operator]()
    for op in block:
        adapted.append(_freeze(op))
        if op.name in projections:
            adapted += _make_adapter(op)
    return tuple(adapted)


def _freeze(op: Operator) -> Operator:
    """Return an operator without gradients of its weights. What it keeps for these alone is left
    out: the inputs of products, and what the gains of RMSNorm multiply, the last half of what it
    keeps. The head's loss keeps the gradient of its input in the place of that."""
    weights = tuple(msgspec.structs.replace(weight, frozen=True) for weight in op.weights)
    keeps = op.keeps
    if op.kind == "matmul" and op.output != "bsv":
        keeps = ()
    elif op.upcasts:
        keeps = keeps[: len(keeps) // 2]
    return msgspec.structs.replace(op, weights=weights, keeps=keeps)


def _make_adapter(op: Operator) -> tuple[Operator, Operator]:
    """Return the two products of a projection's adapters."""
    read = op.inputs[0]
    narrow = MATRIX_DIMS.get(op.name, "") + RANK_DIM
    down = f"{narrow}{read[2:]}"
    up = f"{op.output[2:]}{RANK_DIM}"
    first = Operator(
        name=f"{op.name}.lora_a",
        kind="matmul",
        einsum=f"{read},{down}->bs{narrow}",
        weights=(Weight(name=f"{op.name}.lora_a", dims=down),),
        keeps=(read,),
    )
    # Each row of B is multiplied with the part of its own matrix's adapter.
    weight = Weight(name=f"{op.name}.lora_b", dims=up)
    second = Operator(
        name=f"{op.name}.lora_b",
        kind="matmul",
        einsum=f"bs{RANK_DIM},{up}->{op.output}",
        weights=(weight,),
        keeps=(f"bs{narrow}",),
        adds_to_residual=op.adds_to_residual,
    )
    return first, second
