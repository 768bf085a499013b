"""What a model family file declares: presets, and the map to and from Hugging Face as plain
data."""

from __future__ import annotations

from typing import Any

import msgspec

from farspan.domain.model import ModelSpec
from farspan.domain.problems import Refusal

Config = dict[str, Any]


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
    """

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...]
    transpose: bool = False


def linear(
    spec: ModelSpec,
    ours: str,
    theirs: tuple[str, ...],
    rows: tuple[int, ...],
    *,
    transpose: bool = False,
) -> list[TensorMap]:
    """Map one linear layer: its weight, and its bias where the model has biases."""
    weight = TensorMap(
        ours=f"{ours}.weight",
        theirs=tuple(f"{t}.weight" for t in theirs),
        rows=rows,
        transpose=transpose,
    )
    if not spec.bias:
        return [weight]
    return [
        weight,
        TensorMap(ours=f"{ours}.bias", theirs=tuple(f"{t}.bias" for t in theirs), rows=rows),
    ]


def norm(spec: ModelSpec, ours: str, theirs: str) -> list[TensorMap]:
    """Map one norm: its weight, and for LayerNorm its bias."""
    parts = ("weight", "bias") if spec.norm == "layernorm" else ("weight",)
    return [
        TensorMap(ours=f"{ours}.{p}", theirs=(f"{theirs}.{p}",), rows=(spec.d_model,))
        for p in parts
    ]


def table(ours: str, theirs: str, rows: int) -> TensorMap:
    """Map one weight without bias: an embedding, or the untied head."""
    return TensorMap(ours=f"{ours}.weight", theirs=(f"{theirs}.weight",), rows=(rows,))


def unsupported(key: str, value: object, fits: str) -> Refusal:
    """Build the refusal of a config.json whose model farspan cannot compute exactly."""
    return Refusal(
        "model-unsupported",
        what=f"the model uses {key} = {value!r}, which farspan does not compute",
        where=f"config.json, key {key!r}",
        fact=f"farspan computes {fits}",
        remedy="choose another model folder, or train one: farspan init FOLDER",
    )


def demand(config: Config, key: str, allowed: tuple[object, ...]) -> None:
    """Refuses a config whose `key` is set to anything but the values allowed. `allowed[0]` is the
    default."""
    value = config.get(key, allowed[0])
    if value not in allowed:
        raise unsupported(key, value, f"{key} in {list(allowed)}")


def require(config: Config, key: str) -> Any:
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
