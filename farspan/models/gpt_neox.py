"""GPT-NeoX and Pythia: LayerNorm, biases, a part of each head rotates, and attention and MLP read
the same residual stream (arXiv 2204.06745, 2304.01373)."""

from __future__ import annotations

from typing import Any

import msgspec

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

TITLE = "GPT-NeoX"
ARCHITECTURES = ("GPTNeoXForCausalLM",)
TOKENIZER_CLASS = "AutoTokenizer"
GGUF = "gptneox"
#: Set before every tensor name but the head's; files saved from the bare model lack it.
PREFIX = "gpt_neox."
HEAD = "embed_out"
#: Buffers that old files carry: masks and rotary frequencies.
BUFFERS = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
#: The modules of a Hugging Face block that hold ours.
MODULES = {
    "attn_norm": ("input_layernorm",),
    "attn.qkv": ("attention.query_key_value",),
    "attn.out": ("attention.dense",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.up": ("mlp.dense_h_to_4h",),
    "mlp.down": ("mlp.dense_4h_to_h",),
}
#: Names of activations in config.json; of several for one of ours the first is written.
_ACTIVATIONS: dict[str, Any] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
#: Share of each head that rotates (arXiv 2204.06745, section 2.1).
ROTARY_SHARE = 0.25


def shape(
    *,
    d_model: int,
    layers: int,
    vocab_size: int,
    context: int,
    heads: int | None = None,
    kv_heads: int | None = None,
    d_ff: int | None = None,
    tied: bool = False,
) -> ModelSpec:
    """Build a GPT-NeoX of any size; heads of 64 and d_ff = 4 d_model unless given. Raise ValueError
    where none fits."""
    heads = heads or max(1, d_model // 64)
    if kv_heads not in (None, heads):
        raise ValueError(
            f"GPT-NeoX has as many kv_heads as heads ({heads}), not {kv_heads}; family: llama can"
        )
    head_size = d_model // heads
    turned = max(2, int(head_size * ROTARY_SHARE) // 2 * 2)
    rotary_dims = msgspec.UNSET if turned == head_size else turned
    return ModelSpec(
        family="gpt_neox",
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=heads,
        d_ff=d_ff or 4 * d_model,
        vocab_size=vocab_size,
        context=context,
        norm="layernorm",
        activation="gelu",
        positions="rope",
        bias=True,
        tied=tied,
        rotary_dims=rotary_dims,
        parallel_residual=True,
    )


def _make_preset(
    name: str, layers: int, d_model: int, heads: int, d_ff: int, published: int
) -> Preset:
    spec = shape(
        d_model=d_model, layers=layers, heads=heads, d_ff=d_ff, vocab_size=50_304, context=2048
    )
    source = "arXiv 2304.01373, table 1 and the EleutherAI/pythia checkpoints"
    return Preset(name=name, spec=spec, published=published, source=source)


PRESETS = (
    _make_preset("pythia-70m", 6, 512, 8, 2048, 70_426_624),
    _make_preset("pythia-160m", 12, 768, 12, 3072, 162_322_944),
    _make_preset("pythia-410m", 24, 1024, 16, 4096, 405_334_016),
    _make_preset("pythia-1b", 16, 2048, 8, 8192, 1_011_781_632),
)


def to_config(spec: ModelSpec) -> Config:
    """Write a spec of this family as a config.json."""
    activations: dict[str, str] = {}
    for theirs, ours in _ACTIVATIONS.items():
        activations.setdefault(ours, theirs)
    share = spec.turned_dims / spec.head_dim
    config: Config = {
        "architectures": list(ARCHITECTURES),
        "model_type": "gpt_neox",
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.d_model,
        "num_attention_heads": spec.heads,
        "intermediate_size": spec.d_ff,
        "max_position_embeddings": spec.context,
        "vocab_size": spec.vocab_size,
        "hidden_act": activations[spec.activation],
        "layer_norm_eps": spec.norm_eps,
        "rotary_pct": share,
        "rotary_emb_base": spec.rope_theta,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": spec.rope_theta,
            "partial_rotary_factor": share,
        },
        "use_parallel_residual": bool(spec.parallel_residual),
        "attention_bias": spec.bias,
        "tie_word_embeddings": spec.tied,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    return config


def from_config(config: Config) -> ModelSpec:
    """Read the spec of a config.json; a Refusal names what farspan does not compute."""
    activation = config.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise refuse_unsupported("hidden_act", activation, f"hidden_act in {list(_ACTIVATIONS)}")
    require_value(config, "attention_bias", (True,))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise refuse_unsupported("rope_type", kind, "rope_type in ['default']")
    rope_theta = rope.get("rope_theta")
    if rope_theta is None:
        rope_theta = config.get("rotary_emb_base", 10_000.0)
    share = rope.get("partial_rotary_factor", config.get("rotary_pct", ROTARY_SHARE))
    d_model = require_key(config, "hidden_size")
    heads = require_key(config, "num_attention_heads")
    head_size = d_model // heads
    turned = int(head_size * share)
    rotary_dims = msgspec.UNSET if turned == head_size else turned
    layers = require_key(config, "num_hidden_layers")
    d_ff = require_key(config, "intermediate_size")
    vocab_size = require_key(config, "vocab_size")
    context = require_key(config, "max_position_embeddings")
    tied = config.get("tie_word_embeddings", False)
    norm_eps = config.get("layer_norm_eps", 1e-5)
    parallel_residual = config.get("use_parallel_residual", True) or msgspec.UNSET
    return ModelSpec(
        family="gpt_neox",
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=heads,
        d_ff=d_ff,
        vocab_size=vocab_size,
        context=context,
        norm="layernorm",
        activation=_ACTIVATIONS[activation],
        positions="rope",
        bias=True,
        tied=tied,
        norm_eps=norm_eps,
        rope_theta=rope_theta,
        rotary_dims=rotary_dims,
        parallel_residual=parallel_residual,
    )


def tensors(spec: ModelSpec) -> tuple[TensorMap, ...]:
    """Every parameter of the model, with its Hugging Face tensors."""
    tokens = map_weight("tok", "gpt_neox.embed_in", spec.vocab_size)
    return decoder_tensors(
        spec,
        (tokens,),
        "gpt_neox.layers",
        MODULES,
        "gpt_neox.final_layer_norm",
        head=HEAD,
        by_head=True,
    )
