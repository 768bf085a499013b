"""GPT-2: learned positions, LayerNorm, GELU (tanh form), biases, multi-head attention."""

from __future__ import annotations

from typing import Literal

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

TITLE = "GPT-2"
ARCHITECTURES = ("GPT2LMHeadModel",)
TOKENIZER_CLASS = "AutoTokenizer"
GGUF = "gpt2"
#: Set before every tensor name but the head's; files saved from the bare model lack it.
PREFIX = "transformer."
HEAD = "lm_head"
#: Buffers that old files carry: the causal mask.
BUFFERS = (".attn.bias", ".attn.masked_bias")
#: The modules of a Hugging Face block that hold ours.
MODULES = {
    "attn_norm": ("ln_1",),
    "attn.qkv": ("attn.c_attn",),
    "attn.out": ("attn.c_proj",),
    "mlp_norm": ("ln_2",),
    "mlp.up": ("mlp.c_fc",),
    "mlp.down": ("mlp.c_proj",),
}

_ACTIVATIONS: dict[str, Literal["gelu_tanh", "relu"]] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
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
    """Build a GPT-2 of any size; heads of 64 and d_ff = 4 d_model unless given. Raise ValueError
    where none fits."""
    heads = heads or max(1, d_model // 64)
    if kv_heads not in (None, heads):
        raise ValueError(
            f"GPT-2 has as many kv_heads as heads ({heads}), not {kv_heads}; family: llama can"
        )
    return ModelSpec(
        family="gpt2",
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=heads,
        d_ff=d_ff or 4 * d_model,
        vocab_size=vocab_size,
        context=context,
        norm="layernorm",
        activation="gelu_tanh",
        positions="learned",
        bias=True,
        tied=tied,
    )


def _make_preset(
    name: str, layers: int, d_model: int, published: int | None, source: str, vocab_size: int
) -> Preset:
    spec = shape(d_model=d_model, layers=layers, vocab_size=vocab_size, context=1024)
    return Preset(name=name, spec=spec, published=published, source=source)


_OPENAI = "openai/gpt-2 checkpoints; Radford et al. 2019, table 2 (whose printed sizes are rounded)"
#: The paper prints no vocabulary and no exact count. Its author's set-up notes train a byte-level
#: BPE of 50,256 tokens (GPT-2's own has 50,257), so that is what was trained and what a prediction
#: of its times must price.
_FABRIC = (
    "arXiv 2602.02632, section IV (no exact count printed; vocabulary from the author's set-up "
    "notes)"
)

PRESETS = (
    _make_preset("gpt2", 12, 768, 124_439_808, _OPENAI, 50257),
    _make_preset("gpt2-medium", 24, 1024, 354_823_168, _OPENAI, 50257),
    _make_preset("gpt2-large", 36, 1280, 774_030_080, _OPENAI, 50257),
    _make_preset("gpt2-xl", 48, 1600, 1_557_611_200, _OPENAI, 50257),
    _make_preset("gpt2m", 24, 1024, None, _FABRIC, 50256),
    _make_preset("gpt2L", 30, 1280, None, _FABRIC, 50256),
    _make_preset("gpt2l", 26, 1280, None, _FABRIC, 50256),
)


def to_config(spec: ModelSpec) -> Config:
    """Write a spec of this family as a config.json."""
    if not spec.bias or spec.kv_heads != spec.heads:
        raise ValueError("GPT2LMHeadModel has biases and as many kv_heads as heads")
    activations: dict[str, str] = {}
    for theirs, ours in _ACTIVATIONS.items():
        activations.setdefault(ours, theirs)
    config: Config = {
        "architectures": list(ARCHITECTURES),
        "model_type": "gpt2",
        "n_layer": spec.layers,
        "n_embd": spec.d_model,
        "n_head": spec.heads,
        "n_inner": spec.d_ff,
        "n_positions": spec.context,
        "n_ctx": spec.context,
        "vocab_size": spec.vocab_size,
        "activation_function": activations[spec.activation],
        "layer_norm_epsilon": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }
    return config


def from_config(config: Config) -> ModelSpec:
    """Read the spec of a config.json; a Refusal names what farspan does not compute."""
    activation = config.get("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        raise refuse_unsupported(
            "activation_function", activation, f"activation_function in {list(_ACTIVATIONS)}"
        )
    require_value(config, "scale_attn_weights", (True,))
    require_value(config, "scale_attn_by_inverse_layer_idx", (False,))
    require_value(config, "add_cross_attention", (False,))
    d_model = require_key(config, "n_embd")
    heads = require_key(config, "n_head")
    layers = require_key(config, "n_layer")
    d_ff = config.get("n_inner") or 4 * d_model
    vocab_size = require_key(config, "vocab_size")
    context = require_key(config, "n_positions")
    return ModelSpec(
        family="gpt2",
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=heads,
        d_ff=d_ff,
        vocab_size=vocab_size,
        context=context,
        norm="layernorm",
        activation=_ACTIVATIONS[activation],
        positions="learned",
        bias=True,
        tied=config.get("tie_word_embeddings", True),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
    )


def tensors(spec: ModelSpec) -> tuple[TensorMap, ...]:
    """Every parameter of the model, with its Hugging Face tensors."""
    tokens = map_weight("tok", "transformer.wte", spec.vocab_size)
    positions = map_weight("pos", "transformer.wpe", spec.context)
    embeddings = (tokens, positions)
    return decoder_tensors(
        spec,
        embeddings,
        "transformer.h",
        MODULES,
        "transformer.ln_f",
        head=HEAD,
        transpose=True,
    )
