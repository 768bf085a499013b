"""Qwen3: Llama's decoder with RMSNorm over each head of q and k, and heads of any size (arXiv
2505.09388)."""

from __future__ import annotations

import functools

from farspan.domain.model import ModelSpec
from farspan.models import _llama_like
from farspan.models._decoder import graph as graph
from farspan.models._family import Config, Preset, require_value
from farspan.models._llama_like import BUFFERS as BUFFERS
from farspan.models._llama_like import HEAD as HEAD
from farspan.models._llama_like import PREFIX as PREFIX
from farspan.models._llama_like import map_tensors

TITLE = "Qwen3"
ARCHITECTURES = ("Qwen3ForCausalLM",)
TOKENIZER_CLASS = "AutoTokenizer"
GGUF = "qwen3"
#: Where config.json gives none (transformers' `Qwen3Config`).
DEFAULT_HEAD_SIZE = 128


shape = functools.partial(
    _llama_like.build_spec,
    "qwen3",
    rope_theta=1_000_000.0,
    norm_eps=1e-6,
    qk_norm=True,
)

_SOURCE = "arXiv 2505.09388; counts of the Qwen/Qwen3 checkpoints"

PRESETS = (
    Preset(
        name="qwen3-0.6b",
        spec=shape(
            d_model=1024,
            layers=28,
            heads=16,
            kv_heads=8,
            d_ff=3072,
            vocab_size=151_936,
            context=40_960,
            head_size=128,
        ),
        published=596_049_920,
        source=_SOURCE,
    ),
    Preset(
        name="qwen3-1.7b",
        spec=shape(
            d_model=2048,
            layers=28,
            heads=16,
            kv_heads=8,
            d_ff=6144,
            vocab_size=151_936,
            context=40_960,
        ),
        published=1_720_574_976,
        source=_SOURCE,
    ),
)


def to_config(spec: ModelSpec) -> Config:
    """Write a spec of this family as a config.json."""
    config = _llama_like.write_config(spec, "Qwen3ForCausalLM", "qwen3")
    return config | {"attention_bias": False, "use_sliding_window": False}


def from_config(config: Config) -> ModelSpec:
    """Read the spec of a config.json; a Refusal names what farspan does not compute."""
    require_value(config, "attention_bias", (False,))
    if config.get("use_sliding_window"):
        _llama_like.require_full_attention(config, config.get("sliding_window"))
    return _llama_like.read_spec(
        config, "qwen3", default_head_size=DEFAULT_HEAD_SIZE, bias=False, qk_norm=True
    )


tensors = map_tensors
