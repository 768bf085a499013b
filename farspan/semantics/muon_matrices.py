"""The matrices of a model's blocks, which Muon updates whole: what they are, what that costs, and
who does it.

A matrix is what a block multiplies by: of a parameter that holds several, such as q, k and v, each
is one of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from farspan.domain.graph import OpGraph
from farspan.domain.plan import Stage
from farspan.semantics.tensor_sharding import sections

#: More than all matrices of a unit have.
ANY_SIZE = 2**62


class Matrix(NamedTuple):
    """A parameter of a block that is multiplied by: whole, `rows` x `columns`, of several matrices
    one below another, whose rows have these shares of all."""

    rows: int
    columns: int
    shares: tuple[int, ...]

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of each matrix in it."""
        return tuple((self.rows * share // sum(self.shares), self.columns) for share in self.shares)


def matrices(graph: OpGraph) -> dict[str, Matrix]:
    """Return the matrices of a block, by the parameter's name inside it: the weights that a
    product's einsum names."""
    matrices_by_name = {}
    for op in graph.block:
        dims = op.inputs[-1]
        for weight in op.weights if op.kind == "matmul" else ():
            if weight.dims == dims:
                output, right = (dims[0], dims[1:]) if dims[0] == "d" else (dims[:-1], dims[-1])
                shares = (1,) if dims[0] == "d" else sections(graph, dims)
                matrices_by_name[weight.name] = Matrix(
                    graph.size(output), graph.size(right), shares
                )
    return matrices_by_name


def by_shape(updated: Iterable[tuple[Matrix, int]]) -> dict[tuple[int, int], int]:
    """Return the number of matrices of each shape, for the given numbers of parameters."""
    counted: dict[tuple[int, int], int] = {}
    for matrix, count in updated:
        for part in matrix.parts:
            counted[part] = counted.get(part, 0) + count
    return counted


def block_matrices(graph: OpGraph) -> dict[str, Matrix]:
    """Return the matrices of all blocks, by the parameter's global name."""
    return {
        f"blocks.{b}.{name}": matrix
        for b in range(graph.layers)
        for name, matrix in matrices(graph).items()
    }


def update_flops(matrix: Matrix, iterations: int) -> float:
    """FLOPs of Newton and Schulz's iterations on n x m matrices, n <= m: X X' (2 n n m), its square
    (2 n n n), and that times X (2 n n m)."""
    sides = (sorted(part) for part in matrix.parts)
    return iterations * sum(4.0 * n * n * m + 2.0 * n**3 for n, m in sides)


def owners(sizes: Sequence[int], ways: int) -> list[int]:
    """Who of `ways` workers owns each matrix whole: the largest first, each to who has the least so
    far (Graham 1969: the most that one has is at most 4/3 of the least possible)."""
    owned, owner = [0] * ways, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner[i] = min(range(ways), key=lambda k: (owned[k], k))
        owned[owner[i]] += sizes[i]
    return owner


def in_buckets(sizes: Sequence[int], bucket_bytes: int | None, least: int = 1) -> list[list[int]]:
    """Divide parameters of these sizes, in their order, into buckets of about `bucket_bytes` of
    fp32 (None: each alone), of at least `least` parameters."""
    groups, owned = list[list[int]](), 0
    for i, size in enumerate(sizes):
        full = not groups or bucket_bytes is None or owned + 4 * size > bucket_bytes
        if not groups or (full and min(len(groups[-1]), len(sizes) - i) >= least):
            groups.append([])
            owned = 0
        groups[-1].append(i)
        owned += 4 * size
    return groups


class OwnedMatrices(NamedTuple):
    """The matrices of a stage that its busiest worker updates."""

    #: Elements of each worker's moments and gradients, with what fills parts up to the largest, and
    #: without.
    elements: float
    filled: float
    #: Parameters that the worker makes the update of, and how many of each there are.
    updated: tuple[tuple[Matrix, int], ...]
    #: Elements of whole matrices that the ranks of a tensor axis have parts of, of one owner.
    shared: float

    @property
    def padding(self) -> float:
        return self.elements - self.filled


NO_MATRICES = OwnedMatrices(0.0, 0.0, (), 0.0)


def owned_matrices(graph: OpGraph, stage: Stage) -> OwnedMatrices:
    """How `in_buckets` and `owners` divide a stage's matrices over its data axis, and its tensor
    axis those in parts that it has."""
    ways, tensor = stage.mesh.size("data") if stage.zero else 1, stage.mesh.size("tensor")
    blocks = max(0, min(stage.units[1], graph.layers + 1) - max(stage.units[0], 1))
    splits = {
        weight.name: stage.splits.get(op.name, "") for op in graph.block for weight in op.weights
    }
    elements = filled = 0.0
    owned: list[Counter[Matrix]] = [Counter() for _ in range(ways)]
    separate: list[Counter[Matrix]] = [Counter() for _ in range(ways)]
    for kind in ("copied", "summed", "divided"):
        mine = [m for name, m in matrices(graph).items() if _kind(splits[name], tensor) == kind]
        size = partial(_size, ways=tensor if kind == "divided" else 1)
        # Where parameters are divided each block is by itself; where nothing is, one is as another.
        every, times = (mine, blocks) if stage.zero == 3 or ways == 1 else (mine * blocks, 1)
        limit = (
            stage.grad_sync.bucket_bytes
            if stage.zero != 3 or stage.grad_sync.bucket_bytes is None
            else ANY_SIZE
        )
        groups = [
            [every[i] for i in group] for group in in_buckets([size(m) for m in every], limit, ways)
        ]
        for group in groups:
            each = [size(m) for m in group]
            parts = [0] * ways
            for matrix, elements_of, k in zip(group, each, owners(each, ways), strict=True):
                parts[k] += elements_of
                (separate if kind == "divided" else owned)[k][matrix] += times
            elements, filled = elements + times * max(parts), filled + times * sum(parts) / ways
    busiest = max(range(ways), key=lambda k: _flops(owned[k]) + _flops(separate[k]) / tensor)
    every = list(separate[busiest].elements())
    owner = owners([round(update_flops(matrix, 1)) for matrix in every], tensor)
    taken = [
        Counter(m for m, t in zip(every, owner, strict=True) if t == rank) for rank in range(tensor)
    ]
    updated = owned[busiest] + max(taken, key=_flops)
    shared = float(sum(matrix.rows * matrix.columns for matrix in every))
    return OwnedMatrices(elements, filled, tuple(updated.items()), shared)


def _size(matrix: Matrix, ways: int) -> int:
    """Return the elements of each of `ways` parts of a parameter."""
    return matrix.rows * matrix.columns // ways


def _kind(split: str, tensor: int) -> str:
    """Return the effect of a tensor axis on a parameter: nothing, or all have a summand of its
    gradient, or a part of it."""
    return "copied" if tensor == 1 or not split else "summed" if split == "b" else "divided"


def _flops(owned: Counter[Matrix]) -> float:
    return sum(count * update_flops(matrix, 1) for matrix, count in owned.items())
