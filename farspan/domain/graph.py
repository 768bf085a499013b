"""OpGraph: a training step as operators over named dims. How work can be split, and what it costs,
follows from these.

Dims, one letter each: b sequences, s positions, d d_model, v vocabulary, p rows of the position
table, n groups of heads that share one key and value head, c rows of q, k and v of one group, r
rows of q of one group, e rows of k of one group (a head's size), f d_ff, w matrices that feed the
MLP's activation (2 for SwiGLU, else 1), i rank of adapters, j and k adapters of the matrices into
attention and MLP.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import msgspec

from farspan.domain.struct_files import content_hash

Kind = Literal["matmul", "attention", "pointwise", "lookup", "loss"]


class Weight(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One parameter tensor of a unit, by its name inside the unit and its dims (`"ncd"`)."""

    name: str
    dims: str
    #: Whether it stays as it is: it has no gradient and no optimizer state. Unset where not: units
    #: of before are known by the same hashes.
    frozen: bool | msgspec.UnsetType = msgspec.UNSET


class Operator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One operator: `einsum` names the dims of its inputs and its output, weights last
    ("bsd,fwd->bsfw")."""

    name: str
    kind: Kind
    einsum: str
    weights: tuple[Weight, ...] = ()
    #: Tensors that the backward pass needs, by their dims.
    keeps: tuple[str, ...] = ()
    #: Dims that devices can divide among themselves, in addition to b.
    divisible: str = ""
    #: Where no fused kernel exists it computes in fp32, and keeps that, whatever the training's
    #: precision.
    upcasts: bool = False
    #: Whether the output is added to the residual stream, where its kind does not decide: a norm's
    #: after attention or MLP is, and that of the product before it is not.
    adds_to_residual: bool | msgspec.UnsetType = msgspec.UNSET
    #: Positions that attention looks back at, itself included, where these are not all.
    window: int | msgspec.UnsetType = msgspec.UNSET

    @property
    def is_frozen(self) -> bool:
        """Whether it has weights, and none of them is trained."""
        return bool(self.weights) and all(weight.frozen for weight in self.weights)

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(self.einsum.split("->")[0].split(","))

    @property
    def output(self) -> str:
        return self.einsum.split("->")[1]


class OtherBlocks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Blocks that differ from the first layer's in how attention computes: the same operators by
    name, weights and dims. `layers` counts from 0."""

    layers: tuple[int, ...]
    block: tuple[Operator, ...]


class OpGraph(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Units in order: the embedding, `layers` blocks of one kind or two, the head. Operators of a
    unit feed one another in order, and the residual stream runs from unit to unit as "bsd"."""

    sizes: dict[str, int]
    layers: int
    embedding: tuple[Operator, ...]
    block: tuple[Operator, ...]
    head: tuple[Operator, ...]
    #: The head's matrix is the embedding's table: stages that hold both ends exchange its gradient.
    tied: bool
    #: Unset where all blocks are equal.
    others: OtherBlocks | msgspec.UnsetType = msgspec.UNSET

    @property
    def units(self) -> int:
        """Where stages can be cut: before any of these."""
        return self.layers + 2

    @property
    def units_hash(self) -> str:
        """The same for all models of the same units, however many blocks they have."""
        others = self.others
        if others:
            others = msgspec.structs.replace(others, layers=())
        return content_hash(msgspec.structs.replace(self, layers=1, others=others))

    @property
    def blocks(self) -> tuple[tuple[Operator, ...], ...]:
        """Each kind of block once, the first layer's first."""
        return (self.block, self.others.block) if self.others else (self.block,)

    def is_block(self, unit: tuple[Operator, ...]) -> bool:
        return any(unit is block for block in self.blocks)

    def is_other(self, unit: tuple[Operator, ...]) -> bool:
        """Return whether a block, or a part with its attention, is of the other kind."""
        if not self.others:
            return False
        return any(op.kind == "attention" and op in self.others.block for op in unit)

    def unit(self, number: int) -> tuple[Operator, ...]:
        """Return the operators of unit 0 (embedding), 1 to layers (block), or layers + 1 (head)."""
        if number == 0:
            return self.embedding
        if number > self.layers:
            return self.head
        if self.others and number - 1 in self.others.layers:
            return self.others.block
        return self.block

    def kinds(self, first: int, last: int) -> tuple[tuple[tuple[Operator, ...], int], ...]:
        """Return the distinct units of a stage [first, last), each with how often it occurs."""
        counted = []
        if first == 0 < last:
            counted.append((self.embedding, 1))
        here = range(max(first, 1) - 1, min(last, self.layers + 1) - 1)
        others = 0
        if self.others:
            others = sum(layer in here for layer in self.others.layers)
        if len(here) > others:
            counted.append((self.block, len(here) - others))
        if self.others and others:
            counted.append((self.others.block, others))
        if first < last == self.units:
            counted.append((self.head, 1))
        return tuple(counted)

    def size(self, dims: str, **given: int) -> int:
        """Elements of a tensor over these dims; `b` and `s` are given."""
        elements = 1
        sizes = self.sizes
        for dim in dims:
            elements *= given[dim] if dim in given else sizes[dim]
        return elements

    def parameters(self, first: int = 0, last: int | None = None) -> int:
        """Parameters of the units [first, last); a tied table counts once where both ends are
        in."""
        return self._count(first, last, lambda weight: True)

    def trained_parameters(self, first: int = 0, last: int | None = None) -> int:
        """Those that are not frozen."""
        return self._count(first, last, lambda weight: not weight.frozen)

    def _count(self, first: int, last: int | None, counts: Callable[[Weight], bool]) -> int:
        last = self.units if last is None else last
        total = 0
        for unit, count in self.kinds(first, last):
            for op in unit:
                total += count * sum(self.size(w.dims) for w in op.weights if counts(w))
        table = self.embedding[0].weights[0]
        if self.tied and counts(table) and first == 0 and last == self.units:
            total -= self.size("vd")
        return total


def forward_flops(
    graph: OpGraph, op: Operator, rows: int, seq_len: int, keys: float | None = None
) -> float:
    """FLOPs of one forward pass over `rows` sequences: 2 a multiply-add; attention's two products
    are counted whole, or with `keys` keys a query."""
    if op.kind == "matmul":
        dims = set(op.einsum) - set(",->")
        return 2.0 * math.prod(graph.size(dim, b=rows, s=seq_len) for dim in dims)
    if op.kind == "attention":
        keys = flash_keys(op, seq_len) if keys is None else keys
        return 4.0 * keys * graph.size("bsnr", b=rows, s=seq_len)
    return 0.0


def is_windowed(op: Operator, seq_len: int) -> bool:
    """Return whether attention leaves out keys that lie too far back."""
    return isinstance(op.window, int) and op.window < seq_len


def flash_keys(op: Operator, seq_len: int) -> float:
    """Return the keys that attention without scores in memory computes with, a query in the mean:
    all; or with a window the keys of a chunk as long as it, and of the one before."""
    if not isinstance(op.window, int) or op.window >= seq_len:
        return seq_len
    chunks = math.ceil(seq_len / op.window)
    return op.window**2 * (2 * chunks - 1) / seq_len


def recomputed_operators(unit: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Return the operators of a unit that recomputation runs again: all but a last product, whose
    output the backward pass does not need (PyTorch's checkpoints stop there, and compilers drop
    it). A last norm runs, as it keeps what its gain multiplies; its output goes nowhere."""
    last = unit[-1]
    if last.kind != "pointwise":
        return unit[:-1]
    return (*unit[:-1], msgspec.structs.replace(last, adds_to_residual=False))


def backward_flops(
    graph: OpGraph, op: Operator, rows: int, seq_len: int, keys: float | None
) -> float:
    """FLOPs of the backward pass: a product for each input, but for frozen weights; flash
    attention, which keeps the scores of no `keys`, also computes them again (arXiv 2307.08691,
    section 2.3: 5 products for the forward pass's 2)."""
    if op.is_frozen:
        return forward_flops(graph, op, rows, seq_len, keys)
    factor = 2.5 if op.kind == "attention" and keys is None else 2.0
    return factor * forward_flops(graph, op, rows, seq_len, keys)
