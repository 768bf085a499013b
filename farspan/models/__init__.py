"""Model families, one file each: the file name is the registration. Listing the families imports
none of them."""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
from pathlib import Path
from typing import Protocol, cast

import msgspec

from farspan.domain.graph import OpGraph
from farspan.domain.model import ModelSpec, SlidingWindow, count_parameters
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import parse_json, read_bytes
from farspan.domain.suggest import advise, known_names
from farspan.models._adapters import Projections, adapt_graph, list_projections
from farspan.models._family import MAX_LAYERS, Config, Preset, TensorMap

__all__ = [
    "Config",
    "Family",
    "Preset",
    "TensorMap",
    "count_trained",
    "families",
    "family",
    "from_config",
    "graph",
    "preset",
    "presets",
    "projections",
    "read_config",
]

#: Bytes of a config.json: those of published models have a few kB.
MAX_CONFIG_BYTES = 1 << 20
#: Where config.json has facts that farspan alone writes and reads.
OWN_CONFIG_KEY = "farspan"
TRAINED_TOKENS = "trained_tokens"
#: Sizes of a model that is read from a folder, well above the largest that are published.
MAX_SIZES = {
    "layers": MAX_LAYERS,
    "d_model": 1 << 18,
    "heads": 1 << 16,
    "kv_heads": 1 << 16,
    "d_ff": 1 << 22,
    "vocab_size": 1_000_000,
    "context": 1 << 24,
    "head_size": 1 << 16,
    "rotary_dims": 1 << 16,
    "query_scalar": 1 << 16,
    "window": 1 << 24,
}
#: Sizes that not every model states.
OPTIONAL_SIZES = frozenset({"head_size", "rotary_dims", "query_scalar", "window"})


class Family(Protocol):
    """What a family file holds."""

    #: As people write the name.
    TITLE: str
    ARCHITECTURES: tuple[str, ...]
    #: The class of transformers that loads an exported tokenizer.
    TOKENIZER_CLASS: str
    #: llama.cpp's name of the architecture; None where it has none.
    GGUF: str | None
    PREFIX: str
    #: The module of an untied head.
    HEAD: str
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
    """Return the names of all families, sorted."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(name for name in modules if not name.startswith("_"))


def family(name: str, where: str = "run.yaml") -> Family:
    """Import the family file of that name, which `where` gives."""
    if name not in families():
        key = "model.family"
        raise _refuse_name("model family", key, name, families(), where, verb=f"set {key}:")
    return cast(Family, importlib.import_module(f"{__name__}.{name}"))


def presets() -> dict[str, Preset]:
    """Every preset of every family, by name."""
    by_name: dict[str, Preset] = {}
    for name in families():
        by_name |= {preset.name: preset for preset in family(name).PRESETS}
    return by_name


def preset(name: str) -> Preset:
    """Return the preset of that name; a Refusal offers the nearest one."""
    known = presets()
    if name not in known:
        raise _refuse_name("preset", "model.preset", name, tuple(known))
    return known[name]


def read_config(folder: Path) -> ModelSpec:
    """Read the spec of a Hugging Face folder from its config.json.

    Raises Refusal as `from_config`, and for a file that is missing, damaged or far too long.
    """
    file = folder / "config.json"
    content = read_bytes(file, most=MAX_CONFIG_BYTES)
    if len(content) > MAX_CONFIG_BYTES:
        raise _refuse_config(f"{file} is longer than {MAX_CONFIG_BYTES >> 20} MiB")
    return from_config(parse_json(content, dict, file))


def read_trained_tokens(folder: Path) -> int | None:
    """Return the tokens that a model was trained on, where farspan has exported it; None where its
    config.json, which `read_config` takes, records none."""
    own = parse_json(read_bytes(folder / "config.json"), dict, folder).get(OWN_CONFIG_KEY)
    tokens = own.get(TRAINED_TOKENS) if isinstance(own, dict) else None
    is_count = isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0
    return tokens if is_count else None


def from_config(config: Config) -> ModelSpec:
    """Read the spec of a Hugging Face config.json; a Refusal names what farspan cannot compute."""
    architectures = config.get("architectures") or ["none named"]
    if not isinstance(architectures, list):
        raise _refuse_config(f"architectures is {str(architectures)[:100]}, not a list")
    known: dict[str, str] = {}
    for name in families():
        known |= dict.fromkeys(family(name).ARCHITECTURES, name)
    texts = filter(lambda value: isinstance(value, str), architectures)
    match = next((known[name] for name in texts if name in known), None)
    if match is None:
        raise Refusal(
            "model-unsupported",
            what=f"the model's architecture is {str(architectures[0])[:100]}",
            where="config.json, key 'architectures'",
            fact=f"farspan reads {', '.join(known)}",
            remedy="choose a model folder of one of these architectures",
        )
    try:
        spec = family(match).from_config(config)
        _check_sizes(spec)
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise _refuse_config(str(error)[:300]) from None
    return spec


def _check_sizes(spec: ModelSpec) -> None:
    """Raise ValueError for a size that no model has: it would be built before it is missed."""
    for name, most in MAX_SIZES.items():
        size = getattr(spec, name)
        if isinstance(size, SlidingWindow):
            size = size.size
        if size is msgspec.UNSET and name in OPTIONAL_SIZES:
            continue
        if not isinstance(size, int) or isinstance(size, bool):
            raise ValueError(f"{name} is {str(size)[:100]}, not a whole number")
        if size > most:
            raise ValueError(f"{name} is {str(size)[:100]}; models have {most:,} at most")
    unrotated = spec.unrotated_layers or ()
    if any(isinstance(layer, bool) or not isinstance(layer, int) for layer in unrotated):
        raise ValueError(f"unrotated_layers is {str(unrotated)[:100]}, not numbers of layers")
    numbers = {"norm_eps": spec.norm_eps, "rope_theta": spec.rope_theta}
    if spec.window:
        numbers["rope_theta of windows"] = spec.window.rope_theta
    for name, value in numbers.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < math.inf
        ):
            raise ValueError(f"{name} is {str(value)[:100]}, not a number above 0")
    for name in ("bias", "tied", "parallel_residual"):
        value = getattr(spec, name)
        if value is msgspec.UNSET:
            continue
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {str(value)[:100]}, neither true nor false")


def _refuse_config(fact: str) -> Refusal:
    return Refusal(
        "model-unsupported",
        what="config.json describes a model that cannot be built",
        where="config.json",
        fact=fact,
        remedy="export the model again with transformers' save_pretrained",
    )


def graph(spec: ModelSpec) -> OpGraph:
    """Build the operators of a training step of this model, with its adapters where it has any."""
    base = family(spec.family).graph(spec)
    return adapt_graph(base, spec.lora, projections(spec)) if spec.lora else base


@functools.lru_cache(maxsize=8)
def projections(spec: ModelSpec) -> Projections:
    """Return the parameters of a block that adapters are made for (`_adapters.Projections`)."""
    # Blocks that differ do so in how attention computes, not in their matrices.
    one_block = msgspec.structs.replace(
        spec, layers=1, unrotated_layers=msgspec.UNSET, window=msgspec.UNSET
    )
    return list_projections(family(spec.family).tensors(one_block), spec)


def count_trained(spec: ModelSpec) -> int:
    """Return the parameters that a training changes: all, or those of adapters."""
    return graph(spec).trained_parameters() if spec.lora else count_parameters(spec)


def _refuse_name(
    kind: str,
    key: str,
    name: str,
    known: tuple[str, ...],
    where: str = "run.yaml",
    *,
    verb: str = "use",
) -> Refusal:
    return Refusal(
        "out-of-range",
        what=f"there is no {kind} {name!r}",
        where=f"{where}, key {key}",
        fact=known_names(name, known),
        remedy=advise(name, known, verb=verb),
        key=key,
    )
