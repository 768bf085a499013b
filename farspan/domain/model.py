"""ModelSpec: the knobs of a decoder, and what follows from them by arithmetic (parameters,
FLOPs)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

#: Types of exported weights; the last two are those of GGUF files alone.
WeightType = Literal["fp32", "bf16", "fp16", "q8_0"]
#: Types of the weights in a Hugging Face folder.
StoredType = Literal["fp32", "bf16", "fp16"]


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How Llama 3.1 stretches rotary positions beyond the context that it was trained at: low
    frequencies are divided by `factor`, high ones stay, and those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} must be above 0 and below "
                f"high_freq_factor {self.high_freq_factor}"
            )
        if self.factor < 1:
            raise ValueError(f"factor must be at least 1, got {self.factor}")
        if self.original_context < 1:
            raise ValueError(f"original_context must be at least 1, got {self.original_context}")


class SlidingWindow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers, from 0, that look back at `size` positions alone, themselves included. Their rotary
    positions have a base of their own, and are not scaled."""

    size: int
    layers: tuple[int, ...]
    rope_theta: float

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a window has 1 position at least, got {self.size}")


class Lora(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters (LoRA, arXiv 2106.09685): to what each projection W of attention and MLP
    makes of x, `alpha / rank` B A x is added. A and B are trained, everything else is frozen."""

    rank: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    #: A constant, so that one learning rate is near the best at every rank ("LoRA Without Regret",
    #: Schulman et al. 2025, thinkingmachines.ai/blog/lora, which takes 32).
    alpha: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 32.0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer. Families differ only in these knobs; one module builds them
    all."""

    #: The name of a file in `models/`.
    family: str
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    d_ff: int
    vocab_size: int
    context: int
    norm: Literal["layernorm", "rmsnorm"]
    activation: Literal["gelu", "gelu_tanh", "relu", "swiglu", "geglu_tanh"]
    positions: Literal["learned", "rope"]
    bias: bool
    tied: bool
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    #: Rows of the position table beyond `context` (OPT keeps 2 for padding).
    extra_positions: int = 0
    #: Size of a head, where it is not d_model / heads. From here on a knob is unset, not None or
    #: False, where it does nothing: plans of before are known by the same hashes.
    head_size: int | msgspec.UnsetType = msgspec.UNSET
    #: q, k and v have biases where the other matrices have none.
    qkv_bias: bool | msgspec.UnsetType = msgspec.UNSET
    #: Each head of q and k goes through RMSNorm before positions.
    qk_norm: bool | msgspec.UnsetType = msgspec.UNSET
    #: Dims of each head that rotate, where not all do.
    rotary_dims: int | msgspec.UnsetType = msgspec.UNSET
    rope_scaling: RopeScaling | msgspec.UnsetType = msgspec.UNSET
    #: Attention and MLP read the same residual stream, and both are added to it.
    parallel_residual: bool | msgspec.UnsetType = msgspec.UNSET
    #: Layers, from 0, whose queries and keys no rotary positions turn.
    unrotated_layers: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    #: q and k go through RMSNorm before positions, each over all its heads together.
    joint_qk_norm: bool | msgspec.UnsetType = msgspec.UNSET
    #: Attention and MLP have their norm after them, not before; or one before and one after.
    norm_place: Literal["after", "around"] | msgspec.UnsetType = msgspec.UNSET
    #: RMSNorm multiplies by 1 + its gain.
    offset_gains: bool | msgspec.UnsetType = msgspec.UNSET
    #: Token embeddings are multiplied by sqrt(d_model).
    scaled_embedding: bool | msgspec.UnsetType = msgspec.UNSET
    #: Scores are divided by its square root, where that is not the head size's.
    query_scalar: int | msgspec.UnsetType = msgspec.UNSET
    window: SlidingWindow | msgspec.UnsetType = msgspec.UNSET
    #: Adapters of a frozen model, which are all that is trained.
    lora: Lora | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        for name in ("layers", "d_model", "heads", "kv_heads", "d_ff", "vocab_size", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.head_size is msgspec.UNSET and self.d_model % self.heads:
            raise ValueError(f"d_model {self.d_model} is not a multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.head_dim < 1:
            raise ValueError(f"head_size must be at least 1, got {self.head_dim}")
        if self.qk_norm and self.joint_qk_norm:
            raise ValueError("qk_norm and joint_qk_norm exclude each other")
        if self.parallel_residual and self.norm_place:
            raise ValueError("parallel_residual has its norms before attention and MLP")
        if self.positions == "rope" and self.turned_dims % 2:
            raise ValueError(f"rotary positions need an even head size, got {self.turned_dims}")
        if not 0 < self.turned_dims <= self.head_dim:
            raise ValueError(
                f"rotary_dims must be between 1 and the head size {self.head_dim}, got "
                f"{self.turned_dims}"
            )
        windowed = self.window.layers if self.window else ()
        for layer in (*(self.unrotated_layers or ()), *windowed):
            if not 0 <= layer < self.layers:
                raise ValueError(f"there is no layer {layer}, but {self.layers} from 0 on")
        if self.unrotated_layers and windowed:
            raise ValueError("unrotated_layers and window exclude each other")
        if self.offset_gains and self.norm != "rmsnorm":
            raise ValueError("offset_gains are those of RMSNorm")
        if self.query_scalar is not msgspec.UNSET and self.query_scalar < 1:
            raise ValueError(f"query_scalar must be at least 1, got {self.query_scalar}")

    @property
    def base(self) -> ModelSpec:
        """The model without adapters."""
        return msgspec.structs.replace(self, lora=msgspec.UNSET) if self.lora else self

    @property
    def head_dim(self) -> int:
        if isinstance(self.head_size, msgspec.UnsetType):
            return self.d_model // self.heads
        return self.head_size

    def rotates(self, layer: int) -> bool:
        """Return whether rotary positions turn the queries and keys of a layer, from 0."""
        return self.positions == "rope" and layer not in (self.unrotated_layers or ())

    def window_size(self, layer: int) -> int | None:
        """Return the positions that a layer, from 0, looks back at; None for all."""
        return self.window.size if self.window and layer in self.window.layers else None

    @property
    def is_gated(self) -> bool:
        """Whether a gate multiplies the MLP's values."""
        return self.activation in ("swiglu", "geglu_tanh")

    @property
    def turned_dims(self) -> int:
        """Dims of each head that rotary positions turn."""
        if isinstance(self.rotary_dims, msgspec.UnsetType):
            return self.head_dim
        return self.rotary_dims


def matmul_parameters(spec: ModelSpec) -> int:
    """Weights that multiply every token: attention, MLP and the head (tied or not), without
    biases."""
    kv = spec.kv_heads * spec.head_dim
    queries = spec.heads * spec.head_dim
    attention = spec.d_model * (2 * queries + 2 * kv)
    matrices = 3 if spec.is_gated else 2
    mlp = matrices * spec.d_model * spec.d_ff
    return spec.layers * (attention + mlp) + spec.vocab_size * spec.d_model


def count_parameters(spec: ModelSpec) -> int:
    """Exact number of parameters without adapters; a tied head is counted once."""
    kv = spec.kv_heads * spec.head_dim
    norm = spec.d_model * (2 if spec.norm == "layernorm" else 1)
    biases = 0
    if spec.bias or spec.qkv_bias:
        biases = spec.heads * spec.head_dim + 2 * kv
    if spec.bias:
        mlp_inputs = 2 if spec.is_gated else 1
        biases += 2 * spec.d_model + mlp_inputs * spec.d_ff
    head_norms = 0
    if spec.qk_norm:
        head_norms = 2 * spec.head_dim
    if spec.joint_qk_norm:
        head_norms = spec.heads * spec.head_dim + kv
    norms = 4 if spec.norm_place == "around" else 2
    positions = 0
    if spec.positions == "learned":
        positions = (spec.context + spec.extra_positions) * spec.d_model
    untied = 0 if spec.tied else spec.vocab_size * spec.d_model
    in_layers = spec.layers * (norms * norm + head_norms + biases)
    return matmul_parameters(spec) + in_layers + norm + positions + untied


def train_flops_per_token(spec: ModelSpec, seq_len: int) -> float:
    """Model FLOPs of forward and backward, a token: `6 N + 12 L H E T` (PaLM, arXiv 2204.02311,
    appendix B).

    N counts the matrix-multiplied weights including the head. Attention is counted whole, not
    halved for the causal mask; recomputation is not counted. Both are the convention of MFU. Of
    T positions a layer with a window has those of the window. Of frozen weights there are 4 N, and
    adapters are not counted.
    """
    keys = spec.layers * seq_len
    if spec.window:
        keys -= len(spec.window.layers) * max(0, seq_len - spec.window.size)
    attention = 12.0 * spec.heads * spec.head_dim * keys
    per_weight = 4.0 if spec.lora else 6.0
    return per_weight * matmul_parameters(spec) + attention
