"""What Llama and its relatives share: RMSNorm, SwiGLU, rotary positions, grouped queries, and the
names of their tensors."""

from __future__ import annotations

from typing import Any

import msgspec

from farspan.domain.model import ModelSpec, RopeScaling
from farspan.models._family import (
    Config,
    TensorMap,
    decoder_tensors,
    map_weight,
    refuse_unsupported,
    require_key,
    require_value,
)

#: Set before every tensor name but the head's; files saved from the bare model lack it.
PREFIX = "model."
HEAD = "lm_head"
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
BEFORE_NORMS = frozenset({"attn_norm", "mlp_norm"})
#: Its norms, where they are not before attention and MLP alone.
NORM_MODULES: dict[str, dict[str, tuple[str, ...]]] = {
    "after": {
        "attn_post_norm": ("post_attention_layernorm",),
        "mlp_post_norm": ("post_feedforward_layernorm",),
    },
    "around": {
        "attn_norm": ("input_layernorm",),
        "attn_post_norm": ("post_attention_layernorm",),
        "mlp_norm": ("pre_feedforward_layernorm",),
        "mlp_post_norm": ("post_feedforward_layernorm",),
    },
}
HEAD_NORMS = {"attn.q_norm": ("self_attn.q_norm",), "attn.k_norm": ("self_attn.k_norm",)}


def build_spec(
    family: str,
    *,
    d_model: int,
    layers: int,
    vocab_size: int,
    context: int,
    heads: int | None = None,
    kv_heads: int | None = None,
    d_ff: int | None = None,
    tied: bool = True,
    **knobs: Any,
) -> ModelSpec:
    """Build a model of any size; heads of 64 unless given, d_ff = 8/3 d_model rounded up to a
    multiple of 64.

    8/3 keeps SwiGLU's three matrices at the parameters of a 4 d_model MLP's two (arXiv 2002.05202).
    Embeddings are tied by default, as small models spend most of their parameters there.
    Raises ValueError where no shape fits.
    """
    heads = heads or max(1, d_model // 64)
    usual: dict[str, Any] = {"bias": False, "activation": "swiglu"}
    swiglu_d_ff = -(-8 * d_model // (3 * 64)) * 64
    return ModelSpec(
        family=family,
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=kv_heads or heads,
        d_ff=d_ff or swiglu_d_ff,
        vocab_size=vocab_size,
        context=context,
        norm="rmsnorm",
        positions="rope",
        tied=tied,
        **(usual | knobs),
    )


def write_config(spec: ModelSpec, architecture: str, model_type: str) -> Config:
    """Write a spec as a config.json, without the keys of biases."""
    rope = write_rope(spec)
    config: Config = {
        "architectures": [architecture],
        "model_type": model_type,
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
        "rope_parameters": rope,
        "tie_word_embeddings": spec.tied,
    }
    if spec.rope_scaling:
        config["rope_scaling"] = rope  # As transformers before 5 and other readers name it.
    return config


def read_spec(
    config: Config, family: str, *, default_head_size: int | None = None, **knobs: Any
) -> ModelSpec:
    """Read the spec of a config.json, with `knobs` in addition; a Refusal names what farspan does
    not compute. `default_head_size` is what the family takes where none is given."""
    if "activation" not in knobs:
        require_value(config, "hidden_act", ("silu", "swish"))
        knobs["activation"] = "swiglu"
    require_value(config, "partial_rotary_factor", (1.0,))
    d_model = require_key(config, "hidden_size")
    heads = require_key(config, "num_attention_heads")
    context = require_key(config, "max_position_embeddings")
    layers = require_key(config, "num_hidden_layers")
    kv_heads = config.get("num_key_value_heads") or heads
    d_ff = require_key(config, "intermediate_size")
    vocab_size = require_key(config, "vocab_size")
    head_size = config.get("head_dim") or default_head_size
    if head_size is None or head_size * heads == d_model:
        head_size = msgspec.UNSET
    rope_theta, rope_scaling = read_rope(config)
    tied = config.get("tie_word_embeddings", False)
    norm_eps = config.get("rms_norm_eps", 1e-6)
    return ModelSpec(
        family=family,
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=kv_heads,
        d_ff=d_ff,
        vocab_size=vocab_size,
        context=context,
        norm="rmsnorm",
        positions="rope",
        tied=tied,
        norm_eps=norm_eps,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        head_size=head_size,
        **knobs,
    )


def require_full_attention(config: Config, window: object) -> None:
    """Refuse a config whose layers look back at a window shorter than the context."""
    context = require_key(config, "max_position_embeddings")
    if window is not None and window < context:
        raise refuse_unsupported(
            "sliding_window", window, f"full attention: a window of at least {context} positions"
        )


def map_tensors(spec: ModelSpec) -> tuple[TensorMap, ...]:
    """Map every parameter of the model to its Hugging Face tensors."""
    tokens = map_weight("tok", "model.embed_tokens", spec.vocab_size)
    modules = MODULES
    if spec.qk_norm or spec.joint_qk_norm:
        modules = modules | HEAD_NORMS
    if spec.norm_place:
        products = {part: theirs for part, theirs in modules.items() if part not in BEFORE_NORMS}
        modules = products | NORM_MODULES[spec.norm_place]
    return decoder_tensors(spec, (tokens,), "model.layers", modules, "model.norm", head=HEAD)


# -- rotary positions
#   ------------------------------------------------------------------------------------------------


def read_rope(config: Config) -> tuple[float, RopeScaling | msgspec.UnsetType]:
    """Return the base of the rotary angles and their scaling: of `rope_parameters` since
    transformers 5, of `rope_theta` and `rope_scaling` before."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    theta = 10_000.0 if theta is None else float(theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, msgspec.UNSET
    if kind != "llama3":
        raise refuse_unsupported("rope_type", kind, "rope_type in ['default', 'llama3']")
    original = rope.get(
        "original_max_position_embeddings", config.get("original_max_position_embeddings")
    )
    if original is None:
        original = require_key(rope, "original_max_position_embeddings")
    scaling = RopeScaling(
        factor=float(require_key(rope, "factor")),
        low_freq_factor=float(require_key(rope, "low_freq_factor")),
        high_freq_factor=float(require_key(rope, "high_freq_factor")),
        original_context=original,
    )
    return theta, scaling


def write_rope(spec: ModelSpec) -> dict[str, Any]:
    """Write rotary positions as transformers' `rope_parameters`."""
    scaling = spec.rope_scaling
    if not scaling:
        return {"rope_type": "default", "rope_theta": spec.rope_theta}
    return {
        "rope_type": "llama3",
        "rope_theta": spec.rope_theta,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
    }
