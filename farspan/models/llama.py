"""Llama: rotary positions, RMSNorm, SwiGLU, no biases, grouped-query attention. Mistral is the same
decoder."""

from __future__ import annotations

from farspan.domain.model import ModelSpec
from farspan.models._decoder import graph as graph
from farspan.models._family import (
    Config,
    Preset,
    TensorMap,
    decoder_tensors,
    map_weight,
    refuse_unsupported,
    require_key,
    require_value,
)

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
#: Set before every tensor name but the head's; files saved from the bare model lack it.
PREFIX = "model."
#: Buffers that old files carry: the rotary frequencies.
BUFFERS = (".rotary_emb.inv_freq",)
#: The modules of a Hugging Face block that hold ours.
MODULES = {
    "attn_norm": ("input_layernorm",),
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}


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
) -> ModelSpec:
    """Build a Llama of any size; heads of 64 unless given, d_ff = 8/3 d_model rounded up to a
    multiple of 64.

    8/3 keeps SwiGLU's three matrices at the parameters of a 4 d_model MLP's two (arXiv 2002.05202).
    Embeddings are tied by default, as small models spend most of their parameters there. Raises
    ValueError where no shape fits.
    """
    heads = heads or max(1, d_model // 64)
    swiglu_d_ff = -(-8 * d_model // (3 * 64)) * 64
    return ModelSpec(
        family="llama",
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=kv_heads or heads,
        d_ff=d_ff or swiglu_d_ff,
        vocab_size=vocab_size,
        context=context,
        norm="rmsnorm",
        activation="swiglu",
        positions="rope",
        bias=False,
        tied=tied,
    )


#: The study prints no head sizes (64 divides every d_model) and no d_ff (inferred: what gives the
#: printed counts). Its 100M prints d_model 864; only 832 gives its printed count.
_SLM = "arXiv 2410.19456, table of models (printed counts; d_ff and head size inferred)"


def _slm_preset(name: str, layers: int, d_model: int, d_ff: int, published: int) -> Preset:
    spec = shape(
        d_model=d_model, layers=layers, vocab_size=32_000, context=1024, d_ff=d_ff, tied=False
    )
    return Preset(name=name, spec=spec, published=published, source=_SLM)


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
)


def to_config(spec: ModelSpec) -> Config:
    """Write a spec of this family as a config.json."""
    config: Config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.d_model,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.d_ff,
        "max_position_embeddings": spec.context,
        "vocab_size": spec.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "attention_bias": spec.bias,
        "mlp_bias": spec.bias,
        "tie_word_embeddings": spec.tied,
    }
    return config


def _rope_theta(config: Config) -> float:
    """Return the base of the rotary angles: `rope_parameters` since transformers 5, `rope_theta`
    before."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise refuse_unsupported(
            "rope_type", kind, "rotary positions without scaling (rope_type 'default')"
        )
    theta = rope.get("rope_theta", config.get("rope_theta"))
    return 10_000.0 if theta is None else float(theta)


def from_config(config: Config) -> ModelSpec:
    """Read the spec of a config.json; a Refusal names what farspan does not compute."""
    require_value(config, "hidden_act", ("silu", "swish"))
    require_value(config, "partial_rotary_factor", (1.0,))
    d_model = require_key(config, "hidden_size")
    heads = require_key(config, "num_attention_heads")
    require_value(config, "head_dim", (d_model // heads, None))
    bias = config.get("attention_bias", False)
    if config.get("mlp_bias", False) != bias:
        raise refuse_unsupported(
            "attention_bias", bias, "biases in attention and MLP alike: attention_bias == mlp_bias"
        )
    context = require_key(config, "max_position_embeddings")
    window = config.get("sliding_window") if config.get("model_type") == "mistral" else None
    if window is not None and window < context:
        raise refuse_unsupported(
            "sliding_window", window, f"full attention: a window of at least {context} positions"
        )
    layers = require_key(config, "num_hidden_layers")
    kv_heads = config.get("num_key_value_heads") or heads
    d_ff = require_key(config, "intermediate_size")
    vocab_size = require_key(config, "vocab_size")
    return ModelSpec(
        family="llama",
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=kv_heads,
        d_ff=d_ff,
        vocab_size=vocab_size,
        context=context,
        norm="rmsnorm",
        activation="swiglu",
        positions="rope",
        bias=bias,
        tied=config.get("tie_word_embeddings", False),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(config),
    )


def tensors(spec: ModelSpec) -> tuple[TensorMap, ...]:
    """Every parameter of the model, with its Hugging Face tensors."""
    tokens = map_weight("tok", "model.embed_tokens", spec.vocab_size)
    return decoder_tensors(spec, (tokens,), "model.layers", MODULES, "model.norm")
