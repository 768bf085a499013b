"""OPT: GPT-2's decoder with ReLU, two extra position rows and a padded vocabulary (arXiv
2205.01068)."""

from __future__ import annotations

from farspan.domain.model import ModelSpec
from farspan.models._decoder import graph as graph
from farspan.models._family import (
    Config,
    Preset,
    TensorMap,
    decoder_tensors,
    map_weight,
    require_key,
    require_value,
)

TITLE = "OPT"
ARCHITECTURES = ("OPTForCausalLM",)
TOKENIZER_CLASS = "AutoTokenizer"
GGUF = None
#: Set before every tensor name but the head's; files saved from the bare model lack it.
PREFIX = "model."
HEAD = "lm_head"
BUFFERS: tuple[str, ...] = ()
#: The modules of a Hugging Face block that hold ours.
MODULES = {
    "attn_norm": ("self_attn_layer_norm",),
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.out": ("self_attn.out_proj",),
    "mlp_norm": ("final_layer_norm",),
    "mlp.up": ("fc1",),
    "mlp.down": ("fc2",),
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
    """Build an OPT of any size; heads of 64 and d_ff = 4 d_model unless given. Raise ValueError
    where none fits."""
    heads = heads or max(1, d_model // 64)
    if kv_heads not in (None, heads):
        raise ValueError(
            f"OPT has as many kv_heads as heads ({heads}), not {kv_heads}; family: llama can"
        )
    return ModelSpec(
        family="opt",
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=heads,
        d_ff=d_ff or 4 * d_model,
        vocab_size=vocab_size,
        context=context,
        norm="layernorm",
        activation="relu",
        positions="learned",
        bias=True,
        tied=tied,
        extra_positions=2,
    )


def _make_preset(name: str, layers: int, d_model: int, heads: int, published: int) -> Preset:
    spec = shape(d_model=d_model, layers=layers, heads=heads, vocab_size=50272, context=2048)
    return Preset(
        name=name,
        spec=spec,
        published=published,
        source=f"facebook/{name} checkpoint; arXiv 2205.01068, table 1",
        planning_only=published > 2e9,
    )


PRESETS = (
    _make_preset("opt-125m", 12, 768, 12, 125_239_296),
    # Its layers, width and heads, but neither its norms after the blocks nor its tokens' width of
    # 512: a model of other parameters, for plans alone. `from_config` refuses the checkpoint.
    Preset(
        name="opt-350m",
        spec=shape(d_model=1024, layers=24, heads=16, vocab_size=50272, context=2048),
        published=None,
        source="arXiv 2205.01068, table 1. facebook/opt-350m has 331,196,416 parameters: "
        "word_embed_proj_dim is 512 "
        "and norms come after the blocks, which farspan does not compute; this shape has "
        "355,889,152",
        planning_only=True,
    ),
    _make_preset("opt-1.3b", 24, 2048, 32, 1_315_758_080),
    _make_preset("opt-2.7b", 32, 2560, 32, 2_651_596_800),
    _make_preset("opt-6.7b", 32, 4096, 32, 6_658_473_984),
    # GPT-3's weights are closed and its table 2.1 (arXiv 2005.14165) prints "13.0B" with d_model
    # 5140, a misprint: 40 heads of 128 make 5120. The exact count is that of its open replica
    # OPT-13B, hence OPT's vocabulary and positions.
    Preset(
        name="gpt3-13b",
        spec=shape(d_model=5120, layers=40, heads=40, vocab_size=50272, context=2048),
        published=12_853_473_280,
        source=(
            "arXiv 2005.14165, table 2.1 (d_model misprinted 5140); count of facebook/opt-13b, "
            "the same shape"
        ),
        planning_only=True,
    ),
)


def to_config(spec: ModelSpec) -> Config:
    """Write a spec of this family as a config.json."""
    config: Config = {
        "architectures": list(ARCHITECTURES),
        "model_type": "opt",
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.d_model,
        "num_attention_heads": spec.heads,
        "ffn_dim": spec.d_ff,
        "word_embed_proj_dim": spec.d_model,
        "max_position_embeddings": spec.context,
        "vocab_size": spec.vocab_size,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "enable_bias": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "layerdrop": 0.0,
        "tie_word_embeddings": spec.tied,
    }
    return config


def from_config(config: Config) -> ModelSpec:
    """Read the spec of a config.json; a Refusal names what farspan does not compute."""
    d_model = require_key(config, "hidden_size")
    require_value(config, "activation_function", ("relu",))
    require_value(config, "do_layer_norm_before", (True,))
    require_value(config, "enable_bias", (True,))
    require_value(config, "layer_norm_elementwise_affine", (True,))
    require_value(config, "word_embed_proj_dim", (d_model,))
    return shape(
        d_model=d_model,
        layers=require_key(config, "num_hidden_layers"),
        heads=require_key(config, "num_attention_heads"),
        d_ff=require_key(config, "ffn_dim"),
        vocab_size=require_key(config, "vocab_size"),
        context=require_key(config, "max_position_embeddings"),
        tied=config.get("tie_word_embeddings", True),
    )


def tensors(spec: ModelSpec) -> tuple[TensorMap, ...]:
    """Every parameter of the model, with its Hugging Face tensors."""
    tokens = map_weight("tok", "model.decoder.embed_tokens", spec.vocab_size)
    rows = spec.context + spec.extra_positions
    embeddings = (tokens, map_weight("pos", "model.decoder.embed_positions", rows))
    return decoder_tensors(
        spec,
        embeddings,
        "model.decoder.layers",
        MODULES,
        "model.decoder.final_layer_norm",
        head=HEAD,
    )
