"""What a model family file declares: presets, and the map to and from Hugging Face as plain
data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from farspan.domain.model import ModelSpec
from farspan.domain.problems import Refusal

Config = dict[str, Any]
#: Layers of a model whose config.json is read, or that has a list of some of them.
MAX_LAYERS = 1024


def check_layers(layers: int) -> None:
    """Raise ValueError for more layers than can be listed."""
    if layers > MAX_LAYERS:
        raise ValueError(f"layers is {layers}; models of layers that differ have {MAX_LAYERS:,}")


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """A known shape. `published` is the exact parameter count its source states; None where it
    states none."""

    name: str
    spec: ModelSpec
    published: int | None
    source: str
    #: Too large for the machines farspan trains on: priced by `farspan plan` only.
    planning_only: bool = False


class TensorMap(msgspec.Struct, frozen=True, kw_only=True):
    """One of our parameters from Hugging Face tensors.

    `ours` is the concatenation along dim 0 of `theirs`, whose row counts are `rows`; with
    `transpose` theirs are stored as (in, out), as GPT-2's Conv1D does, and are turned first.
    `heads`: theirs has the rows of q, k and v head by head, for this number of heads.
    """

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...]
    transpose: bool = False
    heads: int | None = None


def map_linear(
    spec: ModelSpec,
    ours: str,
    theirs: tuple[str, ...],
    rows: tuple[int, ...],
    *,
    transpose: bool = False,
    heads: int | None = None,
) -> list[TensorMap]:
    """Map one linear layer: its weight, and its bias where the model has one there."""
    weights = tuple(f"{module}.weight" for module in theirs)
    matrix = TensorMap(
        ours=f"{ours}.weight", theirs=weights, rows=rows, transpose=transpose, heads=heads
    )
    maps = [matrix]
    if spec.bias or (spec.qkv_bias and ours.endswith("attn.qkv")):
        biases = tuple(f"{module}.bias" for module in theirs)
        maps.append(TensorMap(ours=f"{ours}.bias", theirs=biases, rows=rows, heads=heads))
    return maps


def map_norm(spec: ModelSpec, ours: str, theirs: str) -> list[TensorMap]:
    """Map one norm: its weight, and for LayerNorm its bias."""
    maps = [map_weight(ours, theirs, spec.d_model)]
    if spec.norm == "layernorm":
        rows = (spec.d_model,)
        maps.append(TensorMap(ours=f"{ours}.bias", theirs=(f"{theirs}.bias",), rows=rows))
    return maps


def map_weight(ours: str, theirs: str, rows: int) -> TensorMap:
    """Map one weight without bias: an embedding, a norm's gain, or the untied head."""
    weight = f"{theirs}.weight"
    return TensorMap(ours=f"{ours}.weight", theirs=(weight,), rows=(rows,))


def decoder_tensors(
    spec: ModelSpec,
    embeddings: Iterable[TensorMap],
    layers: str,
    modules: Mapping[str, tuple[str, ...]],
    final_norm: str,
    *,
    head: str,
    transpose: bool = False,
    by_head: bool = False,
) -> tuple[TensorMap, ...]:
    """Map every parameter of a decoder.

    `layers` is the Hugging Face list of blocks, and `modules` names the modules in each block that
    hold one of ours. Matrices of several modules are concatenated. `by_head`: the rows of q, k and
    v are stored head by head.
    """
    d = spec.d_model
    kv = spec.kv_heads * spec.head_dim
    qkv_rows: tuple[int, ...] = (spec.heads * spec.head_dim, kv, kv)
    if len(modules["attn.qkv"]) == 1:  # GPT-2 stores them as one matrix.
        qkv_rows = (sum(qkv_rows),)
    matrix_rows = {"attn.qkv": qkv_rows, "attn.out": (d,), "mlp.down": (d,)}
    matrix_rows["mlp.up"] = (spec.d_ff,) * len(modules["mlp.up"])
    # Gains of q and k: for each dim of a head, or of all heads.
    gains = {"attn.q_norm": spec.head_dim, "attn.k_norm": spec.head_dim}
    if spec.joint_qk_norm:
        gains = {"attn.q_norm": spec.heads * spec.head_dim, "attn.k_norm": kv}
    maps = list(embeddings)
    for i in range(spec.layers):
        for part, parts_theirs in modules.items():
            ours = f"blocks.{i}.{part}"
            theirs = tuple(f"{layers}.{i}.{module}" for module in parts_theirs)
            if part in matrix_rows:
                heads = spec.heads if by_head and part == "attn.qkv" else None
                rows = matrix_rows[part]
                maps += map_linear(spec, ours, theirs, rows, transpose=transpose, heads=heads)
            elif part in gains:
                maps.append(map_weight(ours, theirs[0], gains[part]))
            else:
                maps += map_norm(spec, ours, *theirs)
    maps += map_norm(spec, "norm", final_norm)
    if not spec.tied:
        maps.append(map_weight("head", head, spec.vocab_size))
    return tuple(maps)


def refuse_unsupported(key: str, value: object, fits: str) -> Refusal:
    """Build the refusal of a config.json whose model farspan cannot compute exactly."""
    return Refusal(
        "model-unsupported",
        what=f"the model uses {key} = {value!r}, which farspan does not compute",
        where=f"config.json, key {key!r}",
        fact=f"farspan computes {fits}",
        remedy="choose another model folder, or train one: farspan init FOLDER",
    )


def require_value(config: Config, key: str, allowed: tuple[object, ...]) -> None:
    """Refuse a config whose `key` is set to anything but the values allowed. `allowed[0]` is the
    default."""
    value = config.get(key, allowed[0])
    if value not in allowed:
        raise refuse_unsupported(key, value, f"{key} in {list(allowed)}")


def require_key(config: Config, key: str) -> Any:
    """Return the value of a key that config.json must hold."""
    if key not in config:
        raise Refusal(
            "model-unsupported",
            what=f"config.json lacks {key!r}",
            where="config.json",
            fact=f"it has {', '.join(sorted(config))}",
            remedy="export the model again with transformers' save_pretrained",
        )
    return config[key]
