"""Gemma 3's text model: norms around attention and MLP, GELU as gate, and five layers of six that
look back at a window alone (arXiv 2503.19786)."""

from __future__ import annotations

from typing import Any

import msgspec

from farspan.domain.model import ModelSpec, SlidingWindow
from farspan.models import _llama_like
from farspan.models._decoder import graph as graph
from farspan.models._family import (
    Config,
    Preset,
    check_layers,
    refuse_unsupported,
    require_key,
    require_value,
)
from farspan.models._llama_like import BUFFERS as BUFFERS
from farspan.models._llama_like import HEAD as HEAD
from farspan.models._llama_like import PREFIX as PREFIX
from farspan.models._llama_like import map_tensors

TITLE = "Gemma 3"
ARCHITECTURES = ("Gemma3ForCausalLM",)
TOKENIZER_CLASS = "AutoTokenizer"
GGUF = "gemma3"
#: Every layer of this number looks back at all positions.
INTERVAL = 6
WINDOW = 512
WINDOW_ROPE_THETA = 10_000.0
#: Where config.json gives none (transformers' `Gemma3TextConfig`).
DEFAULT_HEAD_SIZE = 256
DEFAULT_QUERY_SCALAR = 256
#: transformers' names of layers, by whether they have a window.
LAYER_TYPES = {True: "sliding_attention", False: "full_attention"}
#: What is the same in every model of the family.
KNOBS: dict[str, Any] = {
    "bias": False,
    "activation": "geglu_tanh",
    "qk_norm": True,
    "norm_place": "around",
    "offset_gains": True,
    "scaled_embedding": True,
}


def shape(*, layers: int, **sizes: Any) -> ModelSpec:
    """Build a Gemma 3 of any size, as `_llama_like.build_spec`."""
    knobs: dict[str, Any] = {"rope_theta": 1_000_000.0, "norm_eps": 1e-6}
    check_layers(layers)
    windowed = [bool((layer + 1) % INTERVAL) for layer in range(layers)]
    knobs["window"] = _make_window(windowed, WINDOW, WINDOW_ROPE_THETA)
    return _llama_like.build_spec("gemma3", layers=layers, **(KNOBS | knobs | sizes))


def _make_window(
    windowed: list[bool], size: int, rope_theta: float
) -> SlidingWindow | msgspec.UnsetType:
    """Return the windows of the layers that have one; unset where none has."""
    layers = tuple(layer for layer, has_window in enumerate(windowed) if has_window)
    if not layers:
        return msgspec.UNSET
    return SlidingWindow(size=size, layers=layers, rope_theta=rope_theta)


def _make_preset(name: str, layers: int, d_model: int, d_ff: int, published: int) -> Preset:
    spec = shape(
        d_model=d_model,
        layers=layers,
        heads=4,
        kv_heads=1,
        head_size=256,
        d_ff=d_ff,
        vocab_size=262_144,
        context=32_768,
    )
    source = "arXiv 2503.19786; counts of the google/gemma-3 checkpoints"
    return Preset(name=name, spec=spec, published=published, source=source)


PRESETS = (
    _make_preset("gemma-3-270m", 18, 640, 2048, 268_098_176),
    _make_preset("gemma-3-1b", 26, 1152, 6912, 999_885_952),
)


def to_config(spec: ModelSpec) -> Config:
    """Write a spec of this family as a config.json."""
    config = _llama_like.write_config(spec, "Gemma3ForCausalLM", "gemma3_text")
    del config["hidden_act"]
    del config["rope_theta"]
    window = spec.window or SlidingWindow(size=WINDOW, layers=(), rope_theta=WINDOW_ROPE_THETA)
    full = config["rope_parameters"]
    types = [LAYER_TYPES[layer in window.layers] for layer in range(spec.layers)]
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": window.rope_theta},
        },
        "sliding_window": window.size,
        "layer_types": types,
        "query_pre_attn_scalar": spec.query_scalar or spec.head_dim,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "attention_bias": False,
        "pad_token_id": None,
    }


def from_config(config: Config) -> ModelSpec:
    """Read the spec of a config.json; a Refusal names what farspan does not compute."""
    require_value(config, "hidden_activation", ("gelu_pytorch_tanh",))
    require_value(config, "attention_bias", (False,))
    require_value(config, "attn_logit_softcapping", (None,))
    require_value(config, "final_logit_softcapping", (None,))
    require_value(config, "use_bidirectional_attention", (False, None))
    ropes = config.get("rope_parameters") or {}
    full = ropes.get("full_attention") or {}
    local = ropes.get("sliding_attention") or {}
    require_value(local, "rope_type", ("default",))
    # As transformers 5 has them, or those before.
    full = {"rope_theta": config.get("rope_theta", 1_000_000.0)} | full
    scaling = config.get("rope_scaling") or {}
    own_theta = config.get("rope_local_base_freq", WINDOW_ROPE_THETA)
    local_theta: Any = local.get("rope_theta", own_theta)
    config = config | {
        "rope_parameters": full | scaling,
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
    }
    spec = _llama_like.read_spec(config, "gemma3", default_head_size=DEFAULT_HEAD_SIZE, **KNOBS)
    scalar = config.get("query_pre_attn_scalar", DEFAULT_QUERY_SCALAR)
    return msgspec.structs.replace(
        spec,
        query_scalar=msgspec.UNSET if scalar == spec.head_dim else scalar,
        window=_read_window(config, spec.layers, float(local_theta)),
    )


def _read_window(
    config: Config, layers: int, rope_theta: float
) -> SlidingWindow | msgspec.UnsetType:
    types = config.get("layer_types")
    if types is None:
        interval = config.get("sliding_window_pattern", INTERVAL)
        if not isinstance(interval, int) or interval < 1:
            raise refuse_unsupported("sliding_window_pattern", interval, "a number of layers")
        types = [LAYER_TYPES[bool((layer + 1) % interval)] for layer in range(layers)]
    known = set(LAYER_TYPES.values())
    if not isinstance(types, list) or len(types) != layers or not known.issuperset(types):
        raise refuse_unsupported("layer_types", types, f"{layers} of {sorted(known)}")
    windowed = [kind == LAYER_TYPES[True] for kind in types]
    size = require_key(config, "sliding_window") if any(windowed) else WINDOW
    return _make_window(windowed, size, rope_theta)


tensors = map_tensors
