"""SmolLM3: Llama's decoder whose every fourth layer has no positions (studied in arXiv 2501.18795;
the model is HuggingFaceTB/SmolLM3-3B)."""

from __future__ import annotations

from typing import Any

import msgspec

from farspan.domain.model import ModelSpec
from farspan.models import _llama_like
from farspan.models._decoder import graph as graph
from farspan.models._family import Config, Preset, check_layers, refuse_unsupported, require_value
from farspan.models._llama_like import BUFFERS as BUFFERS
from farspan.models._llama_like import HEAD as HEAD
from farspan.models._llama_like import PREFIX as PREFIX
from farspan.models._llama_like import map_tensors

TITLE = "SmolLM3"
ARCHITECTURES = ("SmolLM3ForCausalLM",)
TOKENIZER_CLASS = "AutoTokenizer"
GGUF = "smollm3"
#: Every layer of this number has no positions, unless config.json has other ones.
INTERVAL = 4


def shape(*, layers: int, **sizes: Any) -> ModelSpec:
    """Build a SmolLM3 of any size, as `_llama_like.build_spec`."""
    check_layers(layers)
    knobs: dict[str, Any] = {
        "rope_theta": 5_000_000.0,
        "norm_eps": 1e-6,
        "unrotated_layers": _every(INTERVAL, layers),
    }
    return _llama_like.build_spec("smollm3", layers=layers, **(knobs | sizes))


def _every(interval: int, layers: int) -> tuple[int, ...] | msgspec.UnsetType:
    """Return each layer of that number, from 0; unset where there is none."""
    return tuple(range(interval - 1, layers, interval)) or msgspec.UNSET


PRESETS = (
    Preset(
        name="smollm3-3b",
        spec=shape(
            d_model=2048,
            layers=36,
            heads=16,
            kv_heads=4,
            d_ff=11_008,
            vocab_size=128_256,
            context=65_536,
        ),
        published=3_075_098_624,
        source="count of the HuggingFaceTB/SmolLM3-3B checkpoint",
        planning_only=True,
    ),
)


def to_config(spec: ModelSpec) -> Config:
    """Write a spec of this family as a config.json."""
    config = _llama_like.write_config(spec, "SmolLM3ForCausalLM", "smollm3")
    unrotated = spec.unrotated_layers or ()
    rotates = [int(layer not in unrotated) for layer in range(spec.layers)]
    return config | {
        "no_rope_layers": rotates,
        "no_rope_layer_interval": INTERVAL,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * spec.layers,
        "attention_bias": False,
        "mlp_bias": False,
        # transformers' own is a token of the published vocabulary, which others may lack.
        "pad_token_id": None,
    }


def from_config(config: Config) -> ModelSpec:
    """Read the spec of a config.json; a Refusal names what farspan does not compute."""
    require_value(config, "attention_bias", (False,))
    require_value(config, "mlp_bias", (False,))
    if config.get("use_sliding_window"):
        _llama_like.require_full_attention(config, config.get("sliding_window"))
    # transformers ties this family's embeddings where config.json has no word of it.
    config = {"tie_word_embeddings": True} | config
    spec = _llama_like.read_spec(config, "smollm3", bias=False)
    return msgspec.structs.replace(spec, unrotated_layers=_read_unrotated(config, spec.layers))


def _read_unrotated(config: Config, layers: int) -> tuple[int, ...] | msgspec.UnsetType:
    rotates = config.get("no_rope_layers")
    if rotates is None:
        interval = config.get("no_rope_layer_interval", INTERVAL)
        if not isinstance(interval, int) or interval < 1:
            raise refuse_unsupported("no_rope_layer_interval", interval, "a number of layers")
        return _every(interval, layers)
    if not isinstance(rotates, list) or len(rotates) < layers:
        raise refuse_unsupported("no_rope_layers", rotates, f"a list of {layers} layers' 1 or 0")
    return tuple(layer for layer in range(layers) if not rotates[layer]) or msgspec.UNSET


tensors = map_tensors
