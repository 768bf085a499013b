"""The BERT-like architectures that are run here: their settings, and their weights under one set of
names.

Shapes: V vocabulary, P positions, D size of a state, M size of a feed-forward layer, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from farspan.domain.problems import Refusal
from farspan.retrieval.encoders.layout import WEIGHTS, read_json, unsupported
from farspan.retrieval.encoders.tensors import Floats, Tensor, another_encoder, unreadable

#: Activations by their names in config.json.
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
#: RoBERTa and its kin count positions from behind that of padding.
_ROBERTA_KIN = ("roberta", "xlm-roberta", "camembert", "mpnet")
#: Layer norms of DistilBERT add this, which its config.json does not say.
_DISTILBERT_EPS = 1e-12
#: What a language model's head or a pooler adds to a checkpoint; vectors do not need it.
_PREFIXES = ("", "bert.", "roberta.", "distilbert.", "mpnet.", "model.")


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """What decides how states are computed from weights."""

    model_type: str
    layers: int
    heads: int
    d_model: int
    d_ff: int
    vocab_size: int
    positions: int
    #: The position of a text's first token.
    first_position: int
    activation: str
    eps: float
    #: Buckets of MPNet's relative positions; 0 elsewhere.
    relative_buckets: int = 0

    @property
    def max_tokens(self) -> int:
        return self.positions - self.first_position


class _BertConfig(msgspec.Struct):
    """config.json of BERT, RoBERTa, XLM-RoBERTa and MPNet."""

    model_type: str
    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = None
    position_embedding_type: str = "absolute"
    relative_attention_num_buckets: int = 32
    is_decoder: bool = False


class _DistilBertConfig(msgspec.Struct):
    """config.json of DistilBERT."""

    n_layers: int
    n_heads: int
    dim: int
    hidden_dim: int
    vocab_size: int
    max_position_embeddings: int = 512
    activation: str = "gelu"


class _ModelType(msgspec.Struct):
    model_type: str = ""


def read_architecture(folder: Path, model: Path) -> Architecture:
    """Read config.json of a transformer; refuse (model-unsupported) what is not run here."""
    path = model / "config.json"
    model_type = read_json(path, _ModelType).model_type
    if model_type == "distilbert":
        architecture = _of_distilbert(read_json(path, _DistilBertConfig))
    elif model_type in ("bert", *_ROBERTA_KIN):
        config = read_json(path, _BertConfig)
        if config.position_embedding_type != "absolute" or config.is_decoder:
            raise unsupported(
                folder, "it is a BERT with relative positions, or one that sees no later token"
            )
        architecture = _of_bert(config)
    else:
        raise unsupported(
            folder,
            f"its architecture is {model_type or 'not said'}; those that are run here are bert, "
            "distilbert, roberta, xlm-roberta, camembert and mpnet, and static tables",
        )
    if architecture.activation not in ACTIVATIONS:
        raise unsupported(folder, f"its activation is {architecture.activation}")
    sizes = (
        architecture.layers,
        architecture.heads,
        architecture.d_model,
        architecture.d_ff,
        architecture.max_tokens,
    )
    if min(sizes) < 1 or architecture.d_model % architecture.heads:
        raise unreadable(path, "its numbers of layers, heads, positions and states do not fit")
    return architecture


def _of_bert(config: _BertConfig) -> Architecture:
    first = 0
    if config.model_type in _ROBERTA_KIN:
        # MPNet's embeddings have 1 written into transformers' code.
        padding = 1 if config.model_type == "mpnet" else config.pad_token_id
        first = (1 if padding is None else padding) + 1
    buckets = config.relative_attention_num_buckets if config.model_type == "mpnet" else 0
    return Architecture(
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        d_model=config.hidden_size,
        d_ff=config.intermediate_size,
        vocab_size=config.vocab_size,
        positions=config.max_position_embeddings,
        first_position=first,
        activation=config.hidden_act,
        eps=config.layer_norm_eps,
        relative_buckets=buckets,
    )


def _of_distilbert(config: _DistilBertConfig) -> Architecture:
    return Architecture(
        model_type="distilbert",
        layers=config.n_layers,
        heads=config.n_heads,
        d_model=config.dim,
        d_ff=config.hidden_dim,
        vocab_size=config.vocab_size,
        positions=config.max_position_embeddings,
        first_position=0,
        activation=config.activation,
        eps=_DISTILBERT_EPS,
    )


class LinearWeights(NamedTuple):
    """A linear map: weights (outputs, inputs) and a bias."""

    weight: Floats
    bias: Floats


class Norm(NamedTuple):
    """A layer norm's scale and shift (D)."""

    scale: Floats
    shift: Floats


class Layer(NamedTuple):
    """One block: attention and a feed-forward layer, each followed by a norm."""

    query: LinearWeights
    key: LinearWeights
    value: LinearWeights
    attention_out: LinearWeights
    attention_norm: Norm
    up: LinearWeights
    down: LinearWeights
    norm: Norm


class Weights(NamedTuple):
    """A transformer's weights; those of positions (P, D) include the first token type."""

    words: Floats
    positions: Floats
    norm: Norm
    layers: tuple[Layer, ...]
    #: MPNet's bias (buckets, H) of each bucket of relative positions.
    relative: Floats | None = None


#: Names within a layer, in the order of `Layer`'s fields.
_BERT_LAYER = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)
_MPNET_LAYER = (
    "attention.attn.q",
    "attention.attn.k",
    "attention.attn.v",
    "attention.attn.o",
    "attention.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)
_DISTILBERT_LAYER = (
    "attention.q_lin",
    "attention.k_lin",
    "attention.v_lin",
    "attention.out_lin",
    "sa_layer_norm",
    "ffn.lin1",
    "ffn.lin2",
    "output_layer_norm",
)
_LAYER_NAMES = {"mpnet": _MPNET_LAYER, "distilbert": _DISTILBERT_LAYER}


def bind_weights(
    folder: Path, model: Path, architecture: Architecture, tensors: Mapping[str, Tensor]
) -> Weights:
    """Find a transformer's weights by the names of its architecture.

    Refuses (model-unsupported) where one is missing or of another shape than in config.json.
    """
    kind = architecture.model_type
    take = _taker(folder, model, tensors)
    layers_at = "transformer.layer" if kind == "distilbert" else "encoder.layer"
    layer_names = _LAYER_NAMES.get(kind, _BERT_LAYER)
    size = architecture.d_model
    wide = architecture.d_ff

    def linear(name: str, outputs: int, inputs: int) -> LinearWeights:
        weight = take(f"{name}.weight", (outputs, inputs))
        return LinearWeights(weight, take(f"{name}.bias", (outputs,)))

    def norm(name: str) -> Norm:
        return Norm(take(f"{name}.weight", (size,)), take(f"{name}.bias", (size,)))

    layers = []
    for number in range(architecture.layers):
        parts = [f"{layers_at}.{number}.{name}" for name in layer_names]
        query, key, value, out = (linear(name, size, size) for name in parts[:4])
        attention_norm = norm(parts[4])
        up = linear(parts[5], wide, size)
        down = linear(parts[6], size, wide)
        layers.append(Layer(query, key, value, out, attention_norm, up, down, norm(parts[7])))
    positions_PD = take("embeddings.position_embeddings.weight", (architecture.positions, size))
    if kind not in ("distilbert", "mpnet"):
        # Texts are never pairs, so every token is of the first type.
        positions_PD = (
            positions_PD + take("embeddings.token_type_embeddings.weight", (None, size))[0]
        )
    relative_BH = None
    if architecture.relative_buckets:
        shape = (architecture.relative_buckets, architecture.heads)
        relative_BH = take("encoder.relative_attention_bias.weight", shape)
    words_VD = take("embeddings.word_embeddings.weight", (architecture.vocab_size, size))
    return Weights(words_VD, positions_PD, norm("embeddings.LayerNorm"), tuple(layers), relative_BH)


def _taker(
    folder: Path, model: Path, tensors: Mapping[str, Tensor]
) -> Callable[[str, tuple[int | None, ...]], Floats]:
    """Return a function that takes a tensor by its name and checks its shape, None being any
    size."""
    word_name = "embeddings.word_embeddings.weight"
    prefix = next((prefix for prefix in _PREFIXES if prefix + word_name in tensors), "")

    def take(name: str, shape: tuple[int | None, ...]) -> Floats:
        tensor = tensors.get(prefix + name)
        if tensor is None:
            raise _refuse_weights(folder, model, f"there is no tensor {prefix}{name}")
        shape_there = tensor.shape
        fits = len(shape_there) == len(shape) and all(
            size is None or size == given for size, given in zip(shape, shape_there, strict=True)
        )
        if not fits or 0 in shape_there:
            wanted = " x ".join("any" if size is None else str(size) for size in shape)
            has = " x ".join(map(str, shape_there))
            raise _refuse_weights(
                folder, model, f"{prefix}{name} is {has}, and config.json says {wanted}"
            )
        return tensor.floats()

    return take


def _refuse_weights(folder: Path, model: Path, fact: str) -> Refusal:
    return Refusal(
        "model-unsupported",
        what=f"the weights of the encoder {folder.name} do not fit its config.json",
        where=model / WEIGHTS,
        fact=fact,
        remedy=another_encoder(),
        key="index.encoder",
    )
