"""Parameters that are divided over the data axis, gathered block by block for the passes that need
them.

As FSDP (arXiv 2304.11277): a block's weights are gathered before its forward and again before its
backward pass, the next block's while one computes, and given back after it. The embedding, the last
norm and the head stay for the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from farspan.runtime.comm.topology import ProcessGroups, Topology
from farspan.runtime.device import give_back
from farspan.runtime.state.train_state import TrainState

#: Bytes from which what comes and goes, a block's weights and gradients, leaves the heap when it is
#: free.
LARGE = 2**22


class ParamGather:
    """Makes working buckets whole: all after an update (`all_gather_updated`), or, where
    parameters are divided, one by one."""

    def __init__(
        self,
        topology: Topology,
        state: TrainState,
        blocks: nn.ModuleList,
        groups: ProcessGroups,
    ) -> None:
        self._state = state
        self._group = groups.of(topology.group("data"), "gather") if topology.zero else None
        self._divided = state.division.zero == 3
        self._coming: dict[int, dist.Work | None] = {}
        self._backward: set[int] = set()
        #: Of each block its buckets: what a tensor axis divides, sums or leaves whole lies apart.
        self._blocks: list[tuple[int, ...]] = []
        if self._divided:
            if state.device.type == "cpu":
                give_back(LARGE)
            for name, block in blocks.named_children():
                buckets = dict[int, None]()
                for i, parameter in enumerate(state.names):
                    b = state.home[i][0]
                    if parameter.startswith(f"blocks.{name}.") and state.buckets[b].ways > 1:
                        buckets[b] = None
                self._gather_around(block, len(self._blocks))
                self._blocks.append(tuple(buckets))
            for bucket in range(len(state.buckets)):
                self.release_bucket(bucket)

    def all_gather_updated(self) -> None:
        """Give every worker the whole of what others own after an update, unless it is gathered
        when it is needed."""
        if self._divided or self._group is None:
            return
        works = []
        for b, bucket in enumerate(self._state.buckets):
            if bucket.ways > 1:
                works.append(self._all_gather_bucket(b))
        for work in works:
            work.wait()

    def begin_passes(self) -> None:
        """Gather what stays for all passes over the stage, before them."""
        if self._divided:
            come_and_go = set(itertools.chain.from_iterable(self._blocks))
            stays = []
            for b, bucket in enumerate(self._state.buckets):
                if bucket.ways > 1 and b not in come_and_go:
                    stays.append(b)
            self._gather_all(stays)

    def end_passes(self) -> None:
        """Release all after the passes."""
        if self._divided:
            for b in range(len(self._state.buckets)):
                self.release_bucket(b)
            self._backward.clear()

    def release_bucket(self, bucket: int) -> None:
        """Give a bucket's memory back, once nothing that was gathered for it is still coming."""
        if self._state.buckets[bucket].ways > 1 and self._divided:
            work = self._coming.pop(bucket, None)
            if work is not None:
                work.wait()
            self._state.working[bucket].untyped_storage().resize_(0)

    def on_bucket_ready(self, bucket: int) -> None:
        """Release a bucket: its gradients of one backward pass are complete."""
        if bucket in self._backward:
            self._backward.discard(bucket)
            self.release_bucket(bucket)

    def _all_gather_bucket(self, b: int) -> dist.Work:
        # `data` counts no versions: what the backward pass saved of these weights is what comes
        # back.
        whole = self._state.working[b].data
        shard = self._state.shards[b]
        work = dist.all_gather_into_tensor(whole, shard, group=self._group, async_op=True)
        assert work is not None
        return work

    def _begin_gather(self, b: int) -> None:
        """Begin to gather a bucket, unless it is here or coming."""
        full = self._state.working[b]
        storage = full.untyped_storage()
        if b not in self._coming and storage.size() == 0:
            storage.resize_(full.numel() * full.itemsize)
            self._coming[b] = self._all_gather_bucket(b)

    def _gather_all(self, buckets: Sequence[int]) -> None:
        """Gather these buckets, all at once."""
        for b in buckets:
            self._begin_gather(b)
        for b in buckets:
            work = self._coming.pop(b, None)
            if work is not None:
                work.wait()

    def _gather_around(self, block: nn.Module, place: int) -> None:
        """Gather a block's buckets before each of its passes, and release them after it."""

        def before(module: nn.Module, inputs: Any) -> None:
            self._prefetch_block(place, -1 if self._passes_back(place) else 1)

        def after(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if self._passes_back(place):
                return  # Computed again inside its backward pass.
            if output.requires_grad:
                output.register_hook(lambda gradient: self._before_backward(place))
            for b in self._blocks[place]:
                self.release_bucket(b)

        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)

    def _passes_back(self, place: int) -> bool:
        return not self._backward.isdisjoint(self._blocks[place])

    def _before_backward(self, place: int) -> None:
        self._backward.update(self._blocks[place])
        self._prefetch_block(place, -1)

    def _prefetch_block(self, place: int, direction: int) -> None:
        """Gather a block's buckets, and begin those of the neighbour that comes next while it
        computes."""
        self._gather_all(self._blocks[place])
        neighbour = place + direction
        if 0 <= neighbour < len(self._blocks):
            for b in self._blocks[neighbour]:
                self._begin_gather(b)
