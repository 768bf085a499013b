"""A worker's position in a plan, and the groups of workers that it exchanges with."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from farspan.domain.plan import Axis, Mesh, Plan, Replica, Stage
from farspan.runtime.comm.worker_group import BUSY_S, NCCL, backend


@dataclass(frozen=True)
class Topology:
    """One rank of a plan: its replica, its stage there, and its coordinates on the stage's mesh."""

    plan: Plan
    rank: int

    @functools.cached_property
    def _position(self) -> tuple[int, int, int]:
        for r, replica in enumerate(self.plan.replicas):
            for s, stage in enumerate(replica.stages):
                if self.rank in stage.mesh.ranks:
                    return r, s, stage.mesh.ranks.index(self.rank)
        raise ValueError(f"rank {self.rank} has no stage")

    @property
    def replica_index(self) -> int:
        return self._position[0]

    @property
    def stage_index(self) -> int:
        return self._position[1]

    @property
    def replica(self) -> Replica:
        return self.plan.replicas[self._position[0]]

    @property
    def stage(self) -> Stage:
        return self.replica.stages[self._position[1]]

    @property
    def mesh(self) -> Mesh:
        return self.stage.mesh

    @property
    def first(self) -> bool:
        return self.stage_index == 0

    @property
    def last(self) -> bool:
        return self.stage_index == len(self.replica.stages) - 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the replica."""
        return sum((stage.mesh.ranks for stage in self.replica.stages), ())

    @property
    def tensor(self) -> int:
        """The coordinate on the tensor axis."""
        return self._position[2] % self.mesh.size("tensor")

    @property
    def batch(self) -> int:
        """The batch coordinate, over the site and data axes together."""
        return self._position[2] // self.mesh.size("tensor")

    def group(self, axis: Axis) -> tuple[int, ...]:
        """Return the ranks along one axis, this one among them."""
        return next(group for group in self.mesh.groups(axis) if self.rank in group)

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks that hold the same parts of operators for other sequences."""
        return self.mesh.transposed[self.tensor]

    def sites(self, ranks: Sequence[int]) -> dict[str, list[int]]:
        """Group these ranks by their site."""
        by_site: dict[str, list[int]] = {}
        for rank in ranks:
            by_site.setdefault(self.site(rank), []).append(rank)
        return by_site

    def site(self, rank: int) -> str:
        device = self.plan.devices[rank]
        return device.site or device.host

    def backend(self, ranks: Sequence[int]) -> str:
        """Return the backend of a group of these ranks."""
        return backend(self.plan.devices[rank].backend for rank in ranks)

    @property
    def device(self) -> str:
        """The torch device of this rank; of GPUs the current one is a worker's own
        (`open_device`)."""
        return self.plan.devices[self.rank].backend

    @property
    def zero(self) -> int:
        """ZeRO stage: what is divided over the data axis; nothing where the axis has one rank."""
        return self.stage.zero if self.mesh.size("data") > 1 else 0

    def samples_by_microbatch(self, step: int) -> list[NDArray[np.int64]]:
        """Return the samples of a step that this rank reads, by microbatch; replicas read one
        after another."""
        replica = self.replica
        samples = self.replica_samples(step)
        own = list[NDArray[np.int64]]()
        for microbatch in range(replica.microbatches):
            first, last = replica.microbatch_span(self.stage_index, self.batch, microbatch)
            own.append(samples[first:last])
        return own

    def replica_samples(self, step: int) -> NDArray[np.int64]:
        """Return all samples of a step that this rank's replica reads."""
        before = sum(replica.batch for replica in self.plan.replicas[: self.replica_index])
        start = step * self.plan.train.batch + before
        return np.arange(start, start + self.replica.batch, dtype=np.int64)


class ProcessGroups:
    """Process groups by their ranks and purpose, made when first asked for; None for a rank alone.

    A group's ranks have the order given. All ranks of a group must have made the same number of
    groups before it.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._made: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}

    def of(
        self, ranks: Sequence[int], purpose: str, *, messages: bool = False
    ) -> dist.ProcessGroup | None:
        """Return a group for collectives, or for messages between two ranks."""
        if len(ranks) < 2:
            return None
        key = tuple(ranks), purpose
        if key not in self._made:
            # torch names such a group by how many there are, which must therefore be the same on
            # all of its ranks.
            self._make_group(ranks, purpose, local=True)
            group = self._made.get(key)
            if group is not None and not messages and self._topology.backend(ranks) == NCCL:
                # NCCL connects a group at its first collective: here, where all ranks make their
                # groups in one order, and not inside the first backward pass.
                dist.all_reduce(torch.zeros(1, device=self._topology.device), group=group)
        return self._made[key]

    def make_with_all(self, ranks: Sequence[int], purpose: str) -> None:
        """Make a group of workers that have made different numbers of them: all workers of the run
        call this at once, its members or not."""
        self._make_group(ranks, purpose, local=False)

    def _make_group(self, ranks: Sequence[int], purpose: str, *, local: bool) -> None:
        timeout = timedelta(seconds=BUSY_S)
        group = dist.new_group(
            list(ranks),
            timeout,
            self._topology.backend(ranks),
            use_local_synchronization=local,
            sort_ranks=False,
        )
        if isinstance(group, dist.ProcessGroup):
            self._made[tuple(ranks), purpose] = group
