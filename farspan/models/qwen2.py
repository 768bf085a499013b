"""Qwen2 and Qwen2.5: Llama's decoder with biases of q, k and v alone (arXiv 2407.10671)."""

from __future__ import annotations

import functools

from farspan.domain.model import ModelSpec
from farspan.models import _llama_like
from farspan.models._decoder import graph as graph
from farspan.models._family import Config, Preset
from farspan.models._llama_like import BUFFERS as BUFFERS
from farspan.models._llama_like import HEAD as HEAD
from farspan.models._llama_like import PREFIX as PREFIX
from farspan.models._llama_like import map_tensors

TITLE = "Qwen2"
ARCHITECTURES = ("Qwen2ForCausalLM",)
#: transformers' AutoTokenizer splits texts for every qwen2 by Qwen's own rule, whatever its
#: tokenizer.json says (`MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS`).
TOKENIZER_CLASS = "PreTrainedTokenizerFast"
GGUF = "qwen2"


shape = functools.partial(
    _llama_like.build_spec,
    "qwen2",
    rope_theta=1_000_000.0,
    norm_eps=1e-6,
    qkv_bias=True,
)

_SOURCE = "arXiv 2412.15115; counts of the Qwen/Qwen2.5 checkpoints"


def _make_preset(
    name: str, layers: int, d_model: int, heads: int, d_ff: int, published: int
) -> Preset:
    spec = shape(
        d_model=d_model,
        layers=layers,
        heads=heads,
        kv_heads=2,
        d_ff=d_ff,
        vocab_size=151_936,
        context=32_768,
    )
    return Preset(
        name=name, spec=spec, published=published, source=_SOURCE, planning_only=published > 2e9
    )


PRESETS = (
    _make_preset("qwen2.5-0.5b", 24, 896, 14, 4864, 494_032_768),
    _make_preset("qwen2.5-1.5b", 28, 1536, 12, 8960, 1_543_714_304),
    _make_preset("qwen2.5-3b", 36, 2048, 16, 11_008, 3_085_938_688),
)


def to_config(spec: ModelSpec) -> Config:
    """Write a spec of this family as a config.json."""
    config = _llama_like.write_config(spec, "Qwen2ForCausalLM", "qwen2")
    return config | {"use_sliding_window": False}


def from_config(config: Config) -> ModelSpec:
    """Read the spec of a config.json; a Refusal names what farspan does not compute."""
    if config.get("use_sliding_window"):
        _llama_like.require_full_attention(config, config.get("sliding_window"))
    return _llama_like.read_spec(config, "qwen2", bias=False, qkv_bias=True)


tensors = map_tensors
