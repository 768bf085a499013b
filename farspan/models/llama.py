"""Llama: rotary positions, RMSNorm, SwiGLU, no biases, grouped-query attention. Mistral and SmolLM2
are the same decoder; Llama 3.1 and later scale the rotary frequencies."""

from __future__ import annotations

import functools

from farspan.domain.model import ModelSpec, RopeScaling
from farspan.models import _llama_like
from farspan.models._decoder import graph as graph
from farspan.models._family import Config, Preset, refuse_unsupported
from farspan.models._llama_like import BUFFERS as BUFFERS
from farspan.models._llama_like import HEAD as HEAD
from farspan.models._llama_like import PREFIX as PREFIX
from farspan.models._llama_like import map_tensors

TITLE = "Llama"
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
TOKENIZER_CLASS = "AutoTokenizer"
GGUF = "llama"


shape = functools.partial(_llama_like.build_spec, "llama")

#: The study prints no head sizes (64 divides every d_model) and no d_ff (inferred: what gives the
#: printed counts). Its 100M prints d_model 864; only 832 gives its printed count.
_SLM = "arXiv 2410.19456, table of models (printed counts; d_ff and head size inferred)"
_SMOLLM2 = "arXiv 2502.02737; counts of the HuggingFaceTB/SmolLM2 checkpoints"


def _slm_preset(name: str, layers: int, d_model: int, d_ff: int, published: int) -> Preset:
    spec = shape(
        d_model=d_model, layers=layers, vocab_size=32_000, context=1024, d_ff=d_ff, tied=False
    )
    return Preset(name=name, spec=spec, published=published, source=_SLM)


def _smollm2_preset(
    name: str, layers: int, d_model: int, heads: int, kv_heads: int, d_ff: int, published: int
) -> Preset:
    spec = shape(
        d_model=d_model,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        d_ff=d_ff,
        vocab_size=49_152,
        context=8192,
        rope_theta=100_000.0,
    )
    return Preset(name=name, spec=spec, published=published, source=_SMOLLM2)


PRESETS = (
    _slm_preset("slm-100m", 9, 832, 2332, 130_569_920),
    _slm_preset("slm-500m", 15, 1536, 4147, 526_550_016),
    _slm_preset("slm-1b", 19, 1920, 5184, 970_458_240),
    _slm_preset("slm-2b", 24, 2496, 6739, 1_969_027_008),
    Preset(
        name="mistral-7b",
        spec=shape(
            d_model=4096,
            layers=32,
            heads=32,
            kv_heads=8,
            d_ff=14336,
            vocab_size=32_000,
            context=8192,
            tied=False,
        ),
        published=7_241_732_096,
        source="arXiv 2310.06825, table 1; count of the mistralai/Mistral-7B-v0.1 checkpoint",
        planning_only=True,
    ),
    _smollm2_preset("smollm2-135m", 30, 576, 9, 3, 1536, 134_515_008),
    _smollm2_preset("smollm2-360m", 32, 960, 15, 5, 2560, 361_821_120),
    _smollm2_preset("smollm2-1.7b", 24, 2048, 32, 32, 8192, 1_711_376_384),
    Preset(
        name="llama-3.2-1b",
        spec=shape(
            d_model=2048,
            layers=16,
            heads=32,
            kv_heads=8,
            d_ff=8192,
            vocab_size=128_256,
            context=131_072,
            rope_theta=500_000.0,
            rope_scaling=RopeScaling(
                factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
            ),
        ),
        published=1_235_814_400,
        source="count of the meta-llama/Llama-3.2-1B checkpoint",
    ),
)


def to_config(spec: ModelSpec) -> Config:
    """Write a spec of this family as a config.json."""
    biases = {"attention_bias": spec.bias, "mlp_bias": spec.bias}
    return _llama_like.write_config(spec, "LlamaForCausalLM", "llama") | biases


def from_config(config: Config) -> ModelSpec:
    """Read the spec of a config.json; a Refusal names what farspan does not compute."""
    bias = config.get("attention_bias", False)
    if config.get("mlp_bias", False) != bias:
        raise refuse_unsupported(
            "attention_bias", bias, "biases in attention and MLP alike: attention_bias == mlp_bias"
        )
    if config.get("model_type") == "mistral":
        _llama_like.require_full_attention(config, config.get("sliding_window"))
    return _llama_like.read_spec(config, "llama", bias=bias)


tensors = map_tensors
