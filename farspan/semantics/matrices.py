"""The matrices of a model's blocks, which Muon updates whole: what they are, what that costs, and who does it.

A matrix is what a block multiplies by: of a parameter that holds several, such as q, k and v, each is one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from farspan.domain.graph import OpGraph
from farspan.semantics.tensor_sharding import sections


class Matrix(NamedTuple):
    """A parameter of a block that is multiplied by: whole, `rows` x `columns`, of several matrices one below another,
    whose rows have these shares of all."""

    rows: int
    columns: int
    shares: tuple[int, ...]

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of each matrix in it."""
        return tuple((self.rows * share // sum(self.shares), self.columns) for share in self.shares)


def matrices(graph: OpGraph) -> dict[str, Matrix]:
    """The matrices of a block, by the parameter's name inside it: the weights that a product's einsum names."""
    found = {}
    for op in graph.block:
        dims = op.inputs[-1]
        for weight in op.weights if op.kind == "matmul" else ():
            if weight.dims == dims:
                left, right = (dims[0], dims[1:]) if dims[0] == "d" else (dims[:-1], dims[-1])
                shares = (1,) if dims[0] == "d" else sections(graph, dims)
                found[weight.name] = Matrix(graph.size(left), graph.size(right), shares)
    return found


def block_matrices(graph: OpGraph) -> dict[str, Matrix]:
    """The matrices of all blocks, by the parameter's global name."""
    return {f"blocks.{b}.{name}": matrix for b in range(graph.layers) for name, matrix in matrices(graph).items()}


def update_flops(matrix: Matrix, iterations: int) -> float:
    """FLOPs of Newton and Schulz's iterations on n x m matrices, n <= m: X X' (2 n n m), its square (2 n n n), and
    that times X (2 n n m)."""
    sides = (sorted(part) for part in matrix.parts)
    return iterations * sum(4.0 * n * n * m + 2.0 * n**3 for n, m in sides)


def owners(sizes: Sequence[int], ways: int) -> list[int]:
    """Who of `ways` workers owns each matrix whole: the largest first, each to who has the least so far (Graham 1969:
    the most that one has is at most 4/3 of the least possible)."""
    held, owner = [0] * ways, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner[i] = min(range(ways), key=lambda k: (held[k], k))
        held[owner[i]] += sizes[i]
    return owner
