"""Model families, one file each: the file name is the registration. Listing the families imports
none of them."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol, cast

from farspan.domain.escapes import shell_word
from farspan.domain.graph import OpGraph
from farspan.domain.model import ModelSpec
from farspan.domain.problems import Refusal, nearest
from farspan.models._family import Config, Preset, TensorMap

__all__ = [
    "Config",
    "Family",
    "Preset",
    "TensorMap",
    "families",
    "family",
    "from_config",
    "graph",
    "preset",
    "presets",
]


class Family(Protocol):
    """What a family file holds."""

    ARCHITECTURES: tuple[str, ...]
    PREFIX: str
    BUFFERS: tuple[str, ...]
    PRESETS: tuple[Preset, ...]

    @staticmethod
    def shape(
        *,
        d_model: int,
        layers: int,
        vocab_size: int,
        context: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        d_ff: int | None = None,
        tied: bool = True,
    ) -> ModelSpec: ...
    @staticmethod
    def graph(spec: ModelSpec) -> OpGraph: ...
    @staticmethod
    def to_config(spec: ModelSpec) -> Config: ...
    @staticmethod
    def from_config(config: Config) -> ModelSpec: ...
    @staticmethod
    def tensors(spec: ModelSpec) -> tuple[TensorMap, ...]: ...


def families() -> tuple[str, ...]:
    """The names of all families, sorted."""
    return tuple(
        sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    )


def family(name: str) -> Family:
    """The family file of that name."""
    if name not in families():
        raise _unknown("model family", "model.family", name, families())
    return cast(Family, importlib.import_module(f"{__name__}.{name}"))


def presets() -> dict[str, Preset]:
    """Every preset of every family, by name."""
    return {preset.name: preset for name in families() for preset in family(name).PRESETS}


def preset(name: str) -> Preset:
    """The preset of that name; a Refusal offers the nearest one."""
    known = presets()
    if name not in known:
        raise _unknown("preset", "model.preset", name, tuple(known))
    return known[name]


def from_config(config: Config) -> ModelSpec:
    """The spec of a Hugging Face config.json; a Refusal names what farspan cannot compute."""
    architectures = config.get("architectures") or ["none named"]
    known = {
        architecture: name for name in families() for architecture in family(name).ARCHITECTURES
    }
    match = next((known[a] for a in architectures if a in known), None)
    if match is None:
        raise Refusal(
            "model-unsupported",
            what=f"the model's architecture is {architectures[0]}",
            where="config.json, key 'architectures'",
            fact=f"farspan reads {', '.join(known)}",
            remedy="choose a model folder of one of these architectures",
        )
    try:
        return family(match).from_config(config)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise Refusal(
            "model-unsupported",
            what="config.json describes a model that cannot be built",
            where="config.json",
            fact=str(error),
            remedy="export the model again with transformers' save_pretrained",
        ) from None


def graph(spec: ModelSpec) -> OpGraph:
    """The operators of a training step of this model."""
    return family(spec.family).graph(spec)


def _unknown(kind: str, key: str, name: str, known: tuple[str, ...]) -> Refusal:
    match = nearest(name, known)
    return Refusal(
        "out-of-range",
        what=f"there is no {kind} {name!r}",
        where=f"run.yaml, key {key}",
        fact=f"known: {', '.join(known)}",
        remedy=f"use {shell_word(match)}"
        if match
        else f"use one of {', '.join(map(shell_word, known))}",
        key=key,
    )
