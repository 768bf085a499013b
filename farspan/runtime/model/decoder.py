"""The decoder: all families in one module, driven by ModelSpec.

Shapes: B rows (sequences), S positions, D d_model, H heads, K kv heads, E head size, R dims of a
head that rotate, F d_ff, V vocabulary. Over a tensor axis B, H, K, F and V are a rank's share
wherever its operator is divided over them. Parameter names are farspan's own; `models/` maps them
to and from Hugging Face's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farspan.domain.model import ModelSpec
from farspan.runtime.model.attention_policy import DEFAULT_POLICY
from farspan.runtime.model.dropout import Dropout, PlacedDropout
from farspan.runtime.model.fused_loss import FusedLoss
from farspan.runtime.model.kernels import (
    LogitsCrossEntropy,
    causal_attention,
    head_cross_entropies,
    head_cross_entropy,
    logits_cross_entropies,
)
from farspan.runtime.model.linear import (
    A_SUFFIX,
    Linear,
    freeze_base,
    is_adapter,
    make_projection,
)
from farspan.runtime.model.norms import RMSNorm, make_norm, normalize_parts
from farspan.runtime.model.rotary import apply_rotary, layer_rotation
from farspan.runtime.model.tensor_axis import TABLE, TOKENS, TOTAL, Layouts, TensorAxis
from farspan.semantics.tensor_sharding import RESIDUAL

#: Tokens of one gradient of an embedding on NVIDIA's GPUs: between these numbers PyTorch's kernel
#: reads indices that it is replacing (pytorch#187687), and rarely adds to the wrong rows.
SAFE_LOOKUP_TOKENS = 1024
LAST_UNSAFE_LOOKUP_TOKENS = 3072
UNSAFE_LOOKUP_DEVICES = frozenset({"cuda"})


def embed_tokens(tokens_BS: Tensor, table_VD: Tensor) -> Tensor:
    """Return the rows (B, S, D) of tokens; several lookups where one would be unsafe."""
    count = tokens_BS.numel()
    unsafe = SAFE_LOOKUP_TOKENS < count <= LAST_UNSAFE_LOOKUP_TOKENS
    if not unsafe or tokens_BS.device.type not in UNSAFE_LOOKUP_DEVICES:
        return F.embedding(tokens_BS, table_VD)
    parts = tokens_BS.flatten().split(SAFE_LOOKUP_TOKENS)
    rows_ND = torch.cat([F.embedding(part, table_VD) for part in parts])
    return rows_ND.view(*tokens_BS.shape, -1)


class TokenEmbedding(nn.Embedding):
    """A table without first values, as `Linear`."""

    def reset_parameters(self) -> None:
        pass


class Summand(Linear):
    """The product with some of a matrix's columns, which the axis sums: the bias is added once."""

    def __init__(self, inputs: int, outputs: int, bias: bool, layouts: Layouts) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.layouts = layouts

    def forward(self, x: Tensor) -> Tensor:
        bias: Tensor | None = self.bias
        if bias is not None:
            bias = self.layouts.count_once(bias)
        return F.linear(x, self.weight, bias)


def _make_residual_writer(name: str, inputs: int, spec: ModelSpec, layouts: Layouts) -> Linear:
    """Make the matrix that writes the residual stream (D) from `inputs`, over which the axis may
    divide it."""
    ways = layouts.operator_ways(name)
    if ways > 1:
        return Summand(inputs // ways, spec.d_model, spec.bias, layouts)
    return make_projection(name, inputs, spec.d_model, bias=spec.bias, spec=spec)


class Attention(nn.Module):
    """Causal self-attention. `qkv` holds the rows of q (H E), k (K E) and v (K E), in this
    order."""

    def __init__(self, spec: ModelSpec, vanilla: bool, layouts: Layouts, layer: int) -> None:
        super().__init__()
        ways = layouts.operator_ways("attn")
        self.window = spec.window_size(layer)
        #: Of scores; None for 1 / sqrt(E).
        self.scale = None if not spec.query_scalar else spec.query_scalar**-0.5
        self.heads = spec.heads // ways
        self.kv_heads = spec.kv_heads // ways
        self.heads_per_group = spec.heads // spec.kv_heads
        self.head_dim = spec.head_dim
        rows = (spec.heads + 2 * spec.kv_heads) * spec.head_dim // layouts.operator_ways("attn.qkv")
        biased = spec.bias or bool(spec.qkv_bias)
        self.qkv = make_projection("attn.qkv", spec.d_model, rows, bias=biased, spec=spec)
        self.q_norm = self.k_norm = None
        self.joint_widths: tuple[int, int] | None = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec.head_dim, spec)
            self.k_norm = RMSNorm(spec.head_dim, spec)
        elif spec.joint_qk_norm:
            widths = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim)
            parts = layouts.operator_ways("attn.head_norm")
            self.q_norm = RMSNorm(widths[0] // parts, spec)
            self.k_norm = RMSNorm(widths[1] // parts, spec)
            self.joint_widths = widths
        self.out = _make_residual_writer("attn.out", spec.heads * spec.head_dim, spec, layouts)
        self.vanilla = vanilla
        #: Which of PyTorch's kernels computes it.
        self.policy = DEFAULT_POLICY
        self.layouts = layouts

    def forward(self, x_BSD: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        layouts = self.layouts
        projected = self.qkv(x_BSD)
        if self.q_norm is None:
            projected = layouts.convert_between(projected, "attn.qkv", "attn")
        else:
            projected = layouts.convert_between(projected, "attn.qkv", "attn.head_norm")
            projected = self.normalize_heads(projected)
            projected = layouts.convert_between(projected, "attn.head_norm", "attn")
        B, S, _ = projected.shape
        heads_BHSE = projected.view(B, S, -1, self.head_dim).transpose(1, 2)
        if rotation is not None and not heads_BHSE.is_cpu:
            # Queries and keys turn together: half as many kernels.
            turned = self.heads + self.kv_heads
            turned_BHSE, v = heads_BHSE.split([turned, self.kv_heads], dim=1)
            q, k = apply_rotary(turned_BHSE, *rotation).split([self.heads, self.kv_heads], dim=1)
        else:
            q, k, v = heads_BHSE.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
            if rotation is not None:
                q = apply_rotary(q, *rotation)
                k = apply_rotary(k, *rotation)
        if self.vanilla:
            y_BHSE = vanilla_attention(q, k, v, self.window, self.scale)
        else:
            y_BHSE = causal_attention(q, k, v, self.policy, self.window, self.scale)
        y_BSD = y_BHSE.transpose(1, 2).reshape(B, S, -1)
        return self.out(layouts.convert_between(y_BSD, "attn", "attn.out"))

    def normalize_heads(self, projected: Tensor) -> Tensor:
        """Return q, k and v (B, S, H E + 2 K E) with q and k after their norms."""
        if self.q_norm is None or self.k_norm is None:
            return projected
        B, S, _ = projected.shape
        if self.joint_widths is not None:
            shares = [self.heads_per_group, 1, 1]
            unit = projected.shape[-1] // sum(shares)
            q, k, v = projected.split([unit * share for share in shares], dim=-1)
            norms = (self.q_norm, self.k_norm)
            q, k = normalize_parts((q, k), norms, self.joint_widths, self.layouts)
            return torch.cat((q, k, v), dim=-1)
        heads_BSHE = projected.view(B, S, -1, self.head_dim)
        groups = heads_BSHE.shape[2] // (self.heads_per_group + 2)
        counts = [self.heads_per_group * groups, groups, groups]
        q, k, v = heads_BSHE.split(counts, dim=2)
        return torch.cat((self.q_norm(q), self.k_norm(k), v), dim=2).flatten(2)


def vanilla_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Attention by the textbook, its S x S scores in memory: the cost study's "vanilla" setting,
    and an oracle."""
    queries_per_kv = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(queries_per_kv, dim=1)
    v = v.repeat_interleave(queries_per_kv, dim=1)
    scores_BHSS = q @ k.transpose(-2, -1)
    scores_BHSS = scores_BHSS / math.sqrt(q.shape[-1]) if scale is None else scores_BHSS * scale
    hidden_SS = torch.ones_like(scores_BHSS[0, 0], dtype=torch.bool).triu(1)
    if window is not None:
        hidden_SS |= torch.ones_like(hidden_SS).tril(-window)
    scores_BHSS = scores_BHSS.masked_fill(hidden_SS, float("-inf"))
    p_BHSS = torch.softmax(scores_BHSS.float(), dim=-1)
    return p_BHSS.to(v.dtype) @ v


class MLP(nn.Module):
    """Two matrices and an activation. With a gate `up` holds its rows, then the value's."""

    def __init__(self, spec: ModelSpec, layouts: Layouts) -> None:
        super().__init__()
        self.activation = spec.activation
        self.layouts = layouts
        rows = spec.d_ff * (2 if spec.is_gated else 1)
        rows //= layouts.operator_ways("mlp.up")
        self.up = make_projection("mlp.up", spec.d_model, rows, bias=spec.bias, spec=spec)
        self.down = _make_residual_writer("mlp.down", spec.d_ff, spec, layouts)

    def forward(self, x_BSD: Tensor) -> Tensor:
        layouts = self.layouts
        h_BSF = layouts.convert_between(self.up(x_BSD), "mlp.up", "mlp.act")
        if self.activation == "swiglu":
            gate_BSF, value_BSF = h_BSF.chunk(2, dim=-1)
            h_BSF = F.silu(gate_BSF) * value_BSF
        elif self.activation == "geglu_tanh":
            gate_BSF, value_BSF = h_BSF.chunk(2, dim=-1)
            h_BSF = F.gelu(gate_BSF, approximate="tanh") * value_BSF
        elif self.activation == "relu":
            h_BSF = F.relu(h_BSF)
        elif self.activation == "gelu":
            h_BSF = F.gelu(h_BSF)
        else:
            h_BSF = F.gelu(h_BSF, approximate="tanh")
        return self.down(layouts.convert_between(h_BSF, "mlp.act", "mlp.down"))


class Block(nn.Module):
    """One layer, from 0, of a model."""

    def __init__(self, spec: ModelSpec, vanilla: bool, layouts: Layouts, layer: int) -> None:
        super().__init__()
        #: Blocks of one kind compute alike.
        self.kind = spec.rotates(layer), spec.window_size(layer)
        self.is_parallel = bool(spec.parallel_residual)
        has_before = spec.norm_place != "after"
        has_after = bool(spec.norm_place)
        self.attn_norm = make_norm(spec) if has_before else None
        self.attn = Attention(spec, vanilla, layouts, layer)
        self.attn_post_norm = make_norm(spec) if has_after else None
        self.mlp_norm = make_norm(spec) if has_before else None
        self.mlp = MLP(spec, layouts)
        self.mlp_post_norm = make_norm(spec) if has_after else None
        self.between = layouts.convert_between

    def forward(
        self,
        x_BSD: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        dropouts: tuple[PlacedDropout, PlacedDropout] | None = None,
    ) -> Tensor:
        """Return the residual stream after the block; before and after it has its own layout."""
        h_BSD = self.normalize(x_BSD, RESIDUAL, "attn_norm", "attn.qkv")
        h_BSD = self.attn(h_BSD, rotation)
        h_BSD = self.normalize(h_BSD, "attn.out", "attn_post_norm", RESIDUAL)
        if dropouts is not None:
            h_BSD = dropouts[0](h_BSD)
        after_BSD = x_BSD + h_BSD
        mlp_input_BSD = x_BSD if self.is_parallel else after_BSD
        h_BSD = self.normalize(mlp_input_BSD, RESIDUAL, "mlp_norm", "mlp.up")
        h_BSD = self.mlp(h_BSD)
        h_BSD = self.normalize(h_BSD, "mlp.down", "mlp_post_norm", RESIDUAL)
        if dropouts is not None:
            h_BSD = dropouts[1](h_BSD)
        return after_BSD + h_BSD

    def normalize(self, x_BSD: Tensor, writer: str, name: str, reader: str) -> Tensor:
        """Return x after the norm of that name, if the block has it, from the layout that `writer`
        writes to the one that `reader` reads."""
        norm: nn.Module | None = getattr(self, name)
        if norm is None:
            return self.between(x_BSD, writer, reader)
        x_BSD = norm(self.between(x_BSD, writer, name))
        return self.between(x_BSD, name, reader)


class Decoder(nn.Module):
    """Tokens (B, S) to `hidden_states` (B, S, D), to logits (B, S, V) with `forward`.

    Of units [first, last) it has a pipeline stage's part, 0 being the embedding, then the blocks,
    then norm and head; of an axis a rank's part of these. Parameters keep the names that they have
    in the whole model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        attention: str = "sdpa",
        recompute: bool = False,
        units: tuple[int, int] | None = None,
        axis: TensorAxis | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.recompute = recompute
        #: What computes the loss of a chunk of logits, where that is compiled.
        self.fused_loss: FusedLoss | None = None
        self.units = first, last = (0, spec.layers + 2) if units is None else units
        self.layouts = layouts = Layouts(spec, self.units, axis)
        #: The parts of parameters that are here; and the parameters whose gradients the axis must
        #: sum once a step.
        self.slices = layouts.slices
        self.partial = layouts.partial
        ends = self.has_head
        if first == 0 or (ends and spec.tied):
            rows = spec.vocab_size // layouts.table_shards(TABLE)
            self.tok = TokenEmbedding(rows, spec.d_model)
        if first == 0 and spec.positions == "learned":
            self.pos = TokenEmbedding(spec.context + spec.extra_positions, spec.d_model)
        # Filled by name: a stage's blocks have their place in the model as theirs.
        self.blocks = nn.ModuleList()
        for unit in range(max(first, 1), min(last, spec.layers + 1)):
            block = Block(spec, attention == "vanilla", layouts, unit - 1)
            self.blocks.add_module(str(unit - 1), block)
        if ends:
            self.norm = make_norm(spec)
            if not spec.tied:
                rows = spec.vocab_size // layouts.table_shards("head.weight")
                self.head = Linear(spec.d_model, rows, bias=False)
        if spec.lora:
            freeze_base(self)

    @property
    def has_head(self) -> bool:
        return self.units[1] == self.spec.layers + 2

    @property
    def head_VD(self) -> Tensor:
        table_VD = self.tok.weight if self.spec.tied else self.head.weight
        return self.layouts.operator_table(table_VD, "head")

    def residual_streams(self, x: Tensor, dropout: Dropout | None = None) -> Iterator[Tensor]:
        """Yield the residual stream (B, S, D) before the first block and after each, from tokens
        (B, S), or from the stream that the stage before this one sent; `dropout` has the seeds of
        all B rows. Raises ValueError past the context."""
        spec = self.spec
        S = x.shape[1]
        if S > spec.context:
            raise ValueError(f"{S} positions given, the model's context is {spec.context}")
        axis = self.layouts.axis
        if dropout is not None and self.layouts.operator_split(RESIDUAL) == "b":
            own_seeds = dropout.seeds.chunk(axis.size)[axis.coordinate]
            dropout = dropout._replace(seeds=own_seeds)
        # Two places a unit; of the embedding's the first alone is used.
        places = None if dropout is None else dropout.at_places(2 * self.units[1])
        x_BSD = x
        if self.units[0] == 0:
            x_BSD = self._embed(x)
            if places is not None:
                x_BSD = places[0](x_BSD)
        yield x_BSD
        dtype = x_BSD.dtype
        for unit, block in enumerate(self.blocks, max(self.units[0], 1)):
            dropouts = None if places is None else (places[2 * unit], places[2 * unit + 1])
            rotation = layer_rotation(spec, unit - 1, S, x.device, dtype)
            x_BSD = self.run_block(block, x_BSD, rotation, dropouts)
            yield x_BSD

    def run_block(
        self,
        block: nn.Module,
        x_BSD: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        dropouts: tuple[PlacedDropout, PlacedDropout] | None,
    ) -> Tensor:
        """Return the residual stream after a block, which keeps its activations or makes them again
        in the backward pass."""
        after_BSD: Tensor
        if self.recompute and self.training:
            # Dropout is a function of its seeds: there is no other randomness to repeat.
            after_BSD = torch.utils.checkpoint.checkpoint(
                block, x_BSD, rotation, dropouts, use_reentrant=False, preserve_rng_state=False
            )
        else:
            after_BSD = block(x_BSD, rotation, dropouts)
        return after_BSD

    def _embed(self, tokens_BS: Tensor) -> Tensor:
        """Return the residual stream (B, S, D) that tokens begin with."""
        layouts = self.layouts
        table_VD = layouts.operator_table(self.tok.weight, "tok")
        tokens_BS = layouts.convert_between(tokens_BS, TOKENS, "tok")
        shard = layouts.vocabulary_shard("tok")
        if shard is None:
            x_BSD = embed_tokens(tokens_BS, table_VD)
        else:
            tokens_BS = tokens_BS - shard.first
            absent_BS = (tokens_BS < 0) | (tokens_BS >= len(table_VD))
            x_BSD = embed_tokens(tokens_BS.masked_fill(absent_BS, 0), table_VD)
            x_BSD = x_BSD.masked_fill(absent_BS.unsqueeze(-1), 0.0)
        if self.spec.scaled_embedding:
            x_BSD = x_BSD * math.sqrt(self.spec.d_model)
        if self.spec.positions == "learned":
            first = self.spec.extra_positions
            positions_SD = self.pos.weight[first : first + tokens_BS.shape[1]]
            if shard is not None:
                positions_SD = layouts.count_once(positions_SD)
            x_BSD = x_BSD + positions_SD
        return layouts.convert_between(x_BSD, "tok", RESIDUAL)

    def forward_blocks(self, x: Tensor, dropout: Dropout | None = None) -> Tensor:
        """Return the residual stream (B, S, D) after this stage, in its layout over the axis; as in
        `residual_streams`."""
        (x_BSD,) = deque(self.residual_streams(x, dropout), maxlen=1)
        return x_BSD

    def _normalize(self, x_BSD: Tensor) -> Tensor:
        """Return states (B, S, D) after the final norm, as the head reads them, from the residual
        stream (B, S, D)."""
        states_BSD = self.norm(self.layouts.convert_between(x_BSD, RESIDUAL, "norm"))
        return self.layouts.convert_between(states_BSD, "norm", "head")

    def hidden_states(self, tokens_BS: Tensor) -> Tensor:
        """Return states (B, S, D) after the final norm, of a model that is all here."""
        return self._normalize(self.forward_blocks(tokens_BS))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return F.linear(self.hidden_states(tokens_BS), self.head_VD)

    def summed_loss(self, x_BSD: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the cross-entropy in nats summed over valid targets: an fp32 scalar, the same on
        every rank of an axis.

        From the last block's residual stream (B, S, D) in its layout, and all targets (B, S), -1
        where there is none.
        """
        layouts = self.layouts
        x_BSD = self._normalize(x_BSD)
        targets_N = layouts.convert_between(targets_BS, TOKENS, "loss").flatten()
        shard = layouts.vocabulary_shard("loss")
        if layouts.operator_split("head") == layouts.operator_split("loss"):
            loss = head_cross_entropy(
                x_BSD.flatten(0, 1), self.head_VD, targets_N, shard, self.fused_loss
            )
        else:
            logits_BSV = layouts.convert_between(F.linear(x_BSD, self.head_VD), "head", "loss")
            loss = LogitsCrossEntropy.apply(logits_BSV.flatten(0, 1), targets_N, shard)
        return layouts.convert_between(loss, "loss", TOTAL)

    @torch.no_grad()
    def row_losses(self, x_BSD: Tensor, targets_BS: Tensor) -> Tensor:
        """Return `summed_loss` for each row alone (B,), without a gradient."""
        layouts = self.layouts
        x_BSD = self._normalize(x_BSD)
        targets_here = layouts.convert_between(targets_BS, TOKENS, "loss")
        targets_N = targets_here.flatten()
        shard = layouts.vocabulary_shard("loss")
        if layouts.operator_split("head") == layouts.operator_split("loss"):
            losses_N = head_cross_entropies(x_BSD.flatten(0, 1), self.head_VD, targets_N, shard)
        else:
            logits_BSV = layouts.convert_between(F.linear(x_BSD, self.head_VD), "head", "loss")
            losses_N = logits_cross_entropies(logits_BSV.flatten(0, 1), targets_N, shard)
        losses_B = losses_N.new_zeros(len(targets_BS))
        count = len(targets_here)
        first = layouts.axis.coordinate * count if count < len(targets_BS) else 0
        losses_B[first : first + count] = losses_N.view_as(targets_here).sum(dim=1)
        return layouts.convert_between(losses_B, "loss", TOTAL)

    def loss(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the `summed_loss` of a model that has all units."""
        return self.summed_loss(self.forward_blocks(tokens_BS), targets_BS)


def load_whole(model: Decoder, name: str, whole: Tensor) -> None:
    """Copy a whole tensor, or the slice that is held of it, into a parameter."""
    with torch.no_grad():
        part = model.slices[name].copy_from(whole) if name in model.slices else whole
        model.get_parameter(name).copy_(part)


def initialize_model(model: Decoder, seed: int) -> None:
    """Give every parameter, or the slice of it that is here, its first value, as in
    `initial_parameters`."""
    own_names = dict(model.named_parameters())
    for name, whole in initial_parameters(model.spec, seed):
        if name in own_names:
            load_whole(model, name, whole)


def parameter_shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    """Return the shapes of all parameters of a whole model, by name."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in Decoder(spec).named_parameters()}


def initial_parameters(spec: ModelSpec, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the first values of all parameters, GPT-2's: N(0, 0.02), residual projections divided
    by sqrt(2 layers), biases zero.

    Drawn whole on the CPU in name order, one by one, so that any device and any part of the model
    sees the same. Adapters come last (`initial_adapters`).
    """
    generator = torch.Generator().manual_seed(seed)
    for name, shape in sorted(parameter_shapes(spec.base).items()):
        if name.endswith("bias"):
            yield name, torch.zeros(shape)
        elif "norm" in name:
            yield name, torch.zeros(shape) if spec.offset_gains else torch.ones(shape)
        else:
            std = 0.02
            if name.endswith(("attn.out.weight", "mlp.down.weight")):
                std /= math.sqrt(2 * spec.layers)
            yield name, torch.empty(shape).normal_(0.0, std, generator=generator)
    if spec.lora:
        yield from initial_adapters(spec, seed)


def initial_adapters(spec: ModelSpec, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the first values of all adapters, drawn likewise: A is uniform between -1 /
    sqrt(inputs) and that, as PEFT has it, and B is 0, so that the model begins as its base."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in sorted(parameter_shapes(spec).items()):
        if name.endswith(A_SUFFIX):
            bound = 1 / math.sqrt(shape[-1])
            yield name, torch.empty(shape).uniform_(-bound, bound, generator=generator)
        elif is_adapter(name):
            yield name, torch.zeros(shape)
