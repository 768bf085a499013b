"""The directions in which Muon moves the matrices of a stage's blocks.

Over a tensor axis each rank has a part of a matrix: the parts are gathered, each rank does some of
the matrices, and all get what it made. So it is the same as where one process has them whole.

Shapes: N and M the shorter and the longer side, A matrices of one shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from farspan.domain.graph import OpGraph
from farspan.runtime.model.tensor_axis import DimSplit, TensorSlice
from farspan.semantics.matrices import Matrix, block_matrices, owners, update_flops
from farspan.semantics.tensor_sharding import sections

#: A quintic whose repeated use brings any singular value of (0, 1] to about 1, found for the
#: steepest rise at 0 (Jordan et al. 2024).
A = 3.4445
B = -4.7750
C = 2.0315
#: Keeps a matrix of zeros from being divided by its norm.
LEAST_NORM = 1e-7


def orthogonalized(x_AMN: Tensor, iterations: int, dtype: torch.dtype) -> Tensor:
    """Matrices (A, ., .) with their singular vectors, and singular values between about 0.7 and
    1.2, by products in `dtype`."""
    tall = x_AMN.shape[-2] > x_AMN.shape[-1]
    x_ANM = (x_AMN.mT if tall else x_AMN).to(dtype)
    x_ANM = x_ANM / (x_ANM.norm(dim=(-2, -1), keepdim=True) + LEAST_NORM)
    for _ in range(iterations):
        square_ANN = x_ANM @ x_ANM.mT
        x_ANM = (
            A * x_ANM + torch.baddbmm(square_ANN, square_ANN, square_ANN, beta=B, alpha=C) @ x_ANM
        )
    return (x_ANM.mT if tall else x_ANM).to(x_AMN.dtype)


class MatrixUpdates:
    """What one worker's matrices are, by global name, and how they are updated."""

    def __init__(
        self,
        graph: OpGraph,
        slices: Mapping[str, TensorSlice],
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
    ) -> None:
        """`slices` of the parameters that are not whole here, and the `group` that has the rest."""
        self._slices = slices
        self._group = group
        self._dtype = dtype
        self._ways = 1 if group is None else group.size()
        self._matrices: dict[str, Matrix] = block_matrices(graph)
        dims = {weight.name: weight.dims for op in graph.block for weight in op.weights}
        self._cuts = {
            name: DimSplit(slices[name].dim, sections(graph, dims[name.split(".", 2)[2]]))
            for name in self._matrices
            if name in slices
        }

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._matrices)

    def directions(
        self, names: Sequence[str], momenta: Sequence[Tensor], iterations: int
    ) -> list[Tensor]:
        """Of each momentum (parameter's part here), the same part of the step that an element's
        learning rate of 1 makes. All ranks of a tensor axis give the same names."""
        found: dict[str, Tensor] = {}
        for sliced in (False, True):
            mine = {
                n: m for n, m in zip(names, momenta, strict=True) if (n in self._cuts) == sliced
            }
            if mine:
                found |= (
                    self._over_axis(mine, iterations)
                    if sliced
                    else self._orthogonal(mine, iterations)
                )
        return [found[name] for name in names]

    def _orthogonal(self, whole: Mapping[str, Tensor], iterations: int) -> dict[str, Tensor]:
        """Every matrix of these parameters for itself, those of one shape together."""
        by_shape: dict[tuple[int, int], list[Tensor]] = {}
        directions = {name: torch.empty_like(momentum) for name, momentum in whole.items()}
        targets: dict[tuple[int, int], list[Tensor]] = {}
        for name, momentum in whole.items():
            rows = [rows for rows, _ in self._matrices[name].parts]
            for part, target in zip(
                momentum.split(rows), directions[name].split(rows), strict=True
            ):
                shape = part.shape[0], part.shape[1]
                by_shape.setdefault(shape, []).append(part)
                targets.setdefault(shape, []).append(target)
        for shape, parts in by_shape.items():
            scale = 0.2 * max(shape) ** 0.5
            made = orthogonalized(torch.stack(parts), iterations, self._dtype)
            for target, part in zip(targets[shape], made, strict=True):
                torch.mul(part, scale, out=target)
        return directions

    def _over_axis(self, parts: Mapping[str, Tensor], iterations: int) -> dict[str, Tensor]:
        """Matrices of which each rank of the axis has a part: each is done by one of them."""
        names = list(parts)
        whole = self._gathered(torch.cat([part.reshape(-1) for part in parts.values()]))
        owner = owners(
            [round(update_flops(self._matrices[name], iterations)) for name in names], self._ways
        )
        at = 0
        mine = dict[str, Tensor]()
        rank = dist.get_rank(self._group)
        for name, k in zip(names, owner, strict=True):
            shape = parts[name].shape
            size = parts[name].numel()
            if k == rank:
                mine[name] = self._cuts[name].join(
                    [flat[at : at + size].view(shape) for flat in whole]
                )
            at += size
        made = self._orthogonal(mine, iterations)
        return self._handed(names, owner, made, next(iter(parts.values())))

    def _handed(
        self, names: Sequence[str], owner: Sequence[int], made: Mapping[str, Tensor], like: Tensor
    ) -> dict[str, Tensor]:
        """This rank's part of what all have made."""
        sizes = [self._matrices[name].rows * self._matrices[name].columns for name in names]
        held = [
            sum(size for size, k in zip(sizes, owner, strict=True) if k == rank)
            for rank in range(self._ways)
        ]
        flat = torch.zeros(max(held), dtype=like.dtype, device=like.device)
        at = 0
        for direction in made.values():
            flat[at : at + direction.numel()] = direction.reshape(-1)
            at += direction.numel()
        came = self._gathered(flat)
        places = [0] * self._ways
        found = dict[str, Tensor]()
        for name, size, k in zip(names, sizes, owner, strict=True):
            matrix = self._matrices[name]
            direction = came[k][places[k] : places[k] + size].view(matrix.rows, matrix.columns)
            found[name] = self._slices[name].of(direction)
            places[k] += size
        return found

    def _gathered(self, flat: Tensor) -> list[Tensor]:
        """The same of every rank of the axis."""
        came = [torch.empty_like(flat) for _ in range(self._ways)]
        dist.all_gather(came, flat, group=self._group)
        return came
