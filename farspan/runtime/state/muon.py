"""The directions in which Muon moves the matrices of a stage's blocks.

Over a tensor axis each rank has a part of a matrix: the parts are gathered, each rank does some of
the matrices, and all get what it made. So it is the same as where one process has them whole.

Shapes: N and M the shorter and the longer side, A matrices of one shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from farspan.domain.graph import OpGraph
from farspan.runtime.model.tensor_axis import DimSplit, TensorSlice
from farspan.semantics.muon_matrices import Matrix, block_matrices, owners, update_flops
from farspan.semantics.tensor_sharding import sections

#: A quintic whose repeated use brings any singular value of (0, 1] to about 1, found for the
#: steepest rise at 0 (Jordan et al. 2024).
A = 3.4445
QUINTIC_B = -4.7750
C = 2.0315
#: Keeps a matrix of zeros from being divided by its norm.
LEAST_NORM = 1e-7


def newton_schulz(x_AMN: Tensor, iterations: int, dtype: torch.dtype) -> Tensor:
    """Return matrices (A, ., .) with their singular vectors, and singular values between about 0.7
    and 1.2, by products in `dtype`."""
    tall = x_AMN.shape[-2] > x_AMN.shape[-1]
    x_ANM = (x_AMN.mT if tall else x_AMN).to(dtype)
    norm_A11 = x_ANM.norm(dim=(-2, -1), keepdim=True)
    x_ANM = x_ANM / (norm_A11 + LEAST_NORM)
    for _ in range(iterations):
        y_ANN = x_ANM @ x_ANM.mT
        y_ANN = torch.baddbmm(y_ANN, y_ANN, y_ANN, beta=QUINTIC_B, alpha=C)
        if x_ANM.device.type == "cpu":
            x_ANM = A * x_ANM + y_ANN @ x_ANM
        else:  # One kernel instead of three.
            x_ANM = torch.baddbmm(x_ANM, y_ANN, x_ANM, beta=A)
    return (x_ANM.mT if tall else x_ANM).to(x_AMN.dtype).contiguous()


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
        dims = {}
        for op in graph.block:
            for weight in op.weights:
                dims[weight.name] = weight.dims
        #: How each matrix that is not whole here is divided over the axis.
        self._splits = dict[str, DimSplit]()
        for name in self._matrices:
            if name in slices:
                _, _, in_block = name.split(".", 2)
                self._splits[name] = DimSplit(slices[name].dim, sections(graph, dims[in_block]))

    @property
    def matrix_names(self) -> frozenset[str]:
        return frozenset(self._matrices)

    def muon_directions(
        self, parameter_names: Sequence[str], momenta: Sequence[Tensor], iterations: int
    ) -> list[Tensor]:
        """Return of each momentum (parameter's part here) the same part of the step that an
        element's learning rate of 1 makes. All ranks of a tensor axis give the same names."""
        whole = {}
        parts = {}
        for name, momentum in zip(parameter_names, momenta, strict=True):
            if name in self._splits:
                parts[name] = momentum
            else:
                whole[name] = momentum
        directions = self._orthogonalize(whole, iterations)
        if parts:
            directions |= self._orthogonalize_over_axis(parts, iterations)
        return [directions[name] for name in parameter_names]

    def _orthogonalize(self, whole: Mapping[str, Tensor], iterations: int) -> dict[str, Tensor]:
        """Return every matrix of these parameters for itself, those of one shape together."""
        directions = dict[str, Tensor]()
        parts = defaultdict[torch.Size, list[Tensor]](list)
        targets = defaultdict[torch.Size, list[Tensor]](list)
        for name, momentum in whole.items():
            directions[name] = torch.empty_like(momentum)
            rows = [rows for rows, _ in self._matrices[name].parts]
            for part in momentum.split(rows):
                parts[part.shape].append(part)
            for target in directions[name].split(rows):
                targets[target.shape].append(target)
        for shape, same_shape in parts.items():
            made = newton_schulz(torch.stack(same_shape), iterations, self._dtype)
            made.mul_(0.2 * max(shape) ** 0.5)
            torch._foreach_copy_(targets[shape], list(made.unbind()))
        return directions

    def _orthogonalize_over_axis(
        self, parts: Mapping[str, Tensor], iterations: int
    ) -> dict[str, Tensor]:
        """Return this rank's parts of the directions of matrices that the axis divides: each whole
        one is made by one of its ranks."""
        costs = [round(update_flops(self._matrices[name], iterations)) for name in parts]
        owner = owners(costs, self._ways)
        flat = torch.cat([part.reshape(-1) for part in parts.values()])
        by_rank = self._gather_flat(flat)
        at = 0
        own = dict[str, Tensor]()
        rank = dist.get_rank(self._group)
        for (name, part), k in zip(parts.items(), owner, strict=True):
            end = at + part.numel()
            if k == rank:
                pieces = [flat[at:end].view(part.shape) for flat in by_rank]
                own[name] = self._splits[name].join_parts(pieces)
            at = end

        # Every rank sends what it made, filled up to as much as the most.
        made = self._orthogonalize(own, iterations)
        elements = [0] * self._ways
        ends = []
        for name, k in zip(parts, owner, strict=True):
            matrix = self._matrices[name]
            elements[k] += matrix.rows * matrix.columns
            ends.append(elements[k])
        content = flat.new_zeros(max(elements))
        at = 0
        for direction in made.values():
            end = at + direction.numel()
            content[at:end] = direction.reshape(-1)
            at = end
        by_rank = self._gather_flat(content)
        directions = dict[str, Tensor]()
        for name, end, k in zip(parts, ends, owner, strict=True):
            matrix = self._matrices[name]
            start = end - matrix.rows * matrix.columns
            direction = by_rank[k][start:end].view(matrix.rows, matrix.columns)
            directions[name] = self._slices[name].copy_from(direction)
        return directions

    def _gather_flat(self, flat: Tensor) -> list[Tensor]:
        """Return the same of every rank of the axis."""
        by_rank = [torch.empty_like(flat) for _ in range(self._ways)]
        dist.all_gather(by_rank, flat, group=self._group)
        return by_rank
