"""The operators of a decoder block as `runtime.model` computes them, from the knobs of a
ModelSpec."""

from __future__ import annotations

import msgspec

from farspan.domain.graph import Operator, OpGraph, OtherBlocks, Weight
from farspan.domain.model import ModelSpec


def graph(spec: ModelSpec) -> OpGraph:
    """Build a decoder's training step: embedding, blocks, final norm and head."""
    width = spec.heads // spec.kv_heads * spec.head_dim
    up_matrices = 2 if spec.is_gated else 1
    sizes = {
        "d": spec.d_model,
        "v": spec.vocab_size,
        "p": spec.context + spec.extra_positions,
        "n": spec.kv_heads,
        "c": width + 2 * spec.head_dim,
        "r": width,
        "e": spec.head_dim,
        "f": spec.d_ff,
        "w": up_matrices,
    }
    positions = (Weight(name="pos.weight", dims="pd"),) if spec.positions == "learned" else ()
    embedding = Operator(
        name="tok",
        kind="lookup",
        einsum="bs,vd->bsd",
        weights=(Weight(name="tok.weight", dims="vd"), *positions),
        divisible="v",
    )
    head_weight = Weight(name="tok.weight" if spec.tied else "head.weight", dims="vd")
    head = Operator(
        name="head",
        kind="matmul",
        einsum="bsd,vd->bsv",
        keeps=("bsd",),
        divisible="v",
        weights=(head_weight,),
    )
    loss = Operator(name="loss", kind="loss", einsum="bsv->bs", divisible="v")
    final_norm = _norm(spec, "norm")
    other_layers: tuple[int, ...] = ()
    if spec.unrotated_layers or spec.window:
        kinds = [(spec.rotates(layer), spec.window_size(layer)) for layer in range(spec.layers)]
        other_layers = tuple(layer for layer, kind in enumerate(kinds) if kind != kinds[0])
    others: OtherBlocks | msgspec.UnsetType = msgspec.UNSET
    if other_layers:
        others = OtherBlocks(layers=other_layers, block=_block(spec, other_layers[0]))
    return OpGraph(
        sizes=sizes,
        layers=spec.layers,
        embedding=(embedding,),
        block=_block(spec, 0),
        head=(final_norm, head, loss),
        tied=spec.tied,
        others=others,
    )


def _block(spec: ModelSpec, layer: int) -> tuple[Operator, ...]:
    """Build the block of a layer, from 0: attention and MLP, each with its norms."""
    # Flash attention keeps the projection, which v is a view of, and q and k where rotation made
    # new ones of them.
    attended = ("bsnc", "bsnr", "bsne") if spec.rotates(layer) else ("bsnc",)
    # What ReLU keeps is its output, which the next matrix keeps anyway.
    kept = {
        "swiglu": ("bsfw", "bsf"),
        "geglu_tanh": ("bsfw", "bsf"),
        "gelu": ("bsfw",),
        "gelu_tanh": ("bsfw",),
        "relu": (),
    }[spec.activation]
    attention = Operator(
        name="attn",
        kind="attention",
        einsum="bsnc->bsnr",
        keeps=attended,
        divisible="n",
        window=spec.window_size(layer) or msgspec.UNSET,
    )
    activation = Operator(
        name="mlp.act", kind="pointwise", einsum="bsfw->bsf", divisible="f", keeps=kept
    )
    head_norms: tuple[Operator, ...] = ()
    if spec.qk_norm or spec.joint_qk_norm:
        head_norms = (_head_norm(is_joint=bool(spec.joint_qk_norm)),)
    attend = (
        _linear(spec, "attn.qkv", "bsd,ncd->bsnc", bias="nc", divisible="n"),
        *head_norms,
        attention,
        _linear(spec, "attn.out", "bsnr,dnr->bsd", bias="d", divisible="n"),
    )
    transform = (
        _linear(spec, "mlp.up", "bsd,wfd->bsfw", bias="wf", divisible="f"),
        activation,
        _linear(spec, "mlp.down", "bsf,df->bsd", bias="d", divisible="f"),
    )
    return _add_norms(spec, "attn", attend) + _add_norms(spec, "mlp", transform)


def _add_norms(spec: ModelSpec, part: str, operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Return the operators of attention or MLP with the norms before and after them."""
    if spec.norm_place != "after":
        # Norms of a parallel residual read the same stream.
        is_input_kept = part == "mlp" and bool(spec.parallel_residual)
        operators = (_norm(spec, f"{part}_norm", is_input_kept=is_input_kept), *operators)
    if spec.norm_place:
        *before, product = operators
        product = msgspec.structs.replace(product, adds_to_residual=False)
        norm = _norm(spec, f"{part}_post_norm")
        operators = (*before, product, msgspec.structs.replace(norm, adds_to_residual=True))
    return operators


def _linear(spec: ModelSpec, name: str, einsum: str, *, bias: str, divisible: str) -> Operator:
    inputs, weight = einsum.split("->")[0].split(",")
    weights = [Weight(name=f"{name}.weight", dims=weight)]
    if spec.bias or (spec.qkv_bias and name == "attn.qkv"):
        weights.append(Weight(name=f"{name}.bias", dims=bias))
    return Operator(
        name=name,
        kind="matmul",
        einsum=einsum,
        weights=tuple(weights),
        keeps=(inputs,),
        divisible=divisible,
    )


def _head_norm(*, is_joint: bool) -> Operator:
    """RMSNorm over each head of q and k, or over all of each, which are put together with v again.
    It keeps these, and what its gains multiply."""
    q_dims, k_dims = ("nr", "ne") if is_joint else ("e", "e")
    return Operator(
        name="attn.head_norm",
        kind="pointwise",
        einsum="bsnc->bsnc",
        keeps=("bsnr", "bsne", "bsnr", "bsne"),
        divisible="n",
        weights=(
            Weight(name="attn.q_norm.weight", dims=q_dims),
            Weight(name="attn.k_norm.weight", dims=k_dims),
        ),
        upcasts=True,
    )


def _norm(spec: ModelSpec, name: str, *, is_input_kept: bool = False) -> Operator:
    """RMSNorm keeps its input and what its gain multiplies; LayerNorm's kernel keeps its input
    alone. `is_input_kept`: another norm keeps the input anyway."""
    layernorm = spec.norm == "layernorm"
    parts = ["weight", "bias"] if layernorm else ["weight"]
    weights = [Weight(name=f"{name}.{part}", dims="d") for part in parts]
    return Operator(
        name=name,
        kind="pointwise",
        einsum="bsd,d->bsd",
        keeps=("bsd",) * (2 - layernorm - is_input_kept),
        weights=tuple(weights),
        upcasts=not layernorm,
    )
