"""Parameters that are divided over the data axis, gathered block by block for the passes that need
them.

As FSDP (arXiv 2304.11277): a block's weights are gathered before its forward and again before its
backward pass, the next block's while one computes, and given back after it. The embedding, the last
norm and the head stay for the step.
"""

from __future__ import annotations

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
    """Makes working buckets whole: all after an update (`publish`), or, where parameters are
    divided, one by one."""

    def __init__(
        self,
        topology: Topology,
        state: TrainState,
        blocks: dict[str, nn.Module],
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
            for name, block in blocks.items():
                held = (
                    state.home[i][0]
                    for i, parameter in enumerate(state.names)
                    if parameter.startswith(f"{name}.")
                )
                self._hook(block, len(self._blocks))
                self._blocks.append(
                    tuple(b for b in dict.fromkeys(held) if state.buckets[b].ways > 1)
                )
            for bucket in range(len(state.buckets)):
                self.release(bucket)

    def publish(self) -> None:
        """After an update: every worker gets the whole of what others own, unless it is gathered
        when it is needed."""
        if self._divided or self._group is None:
            return
        works = [self._start(b) for b, bucket in enumerate(self._state.buckets) if bucket.ways > 1]
        for work in works:
            work.wait()

    def begin(self) -> None:
        """Before passes over the stage: what stays for all of them."""
        if self._divided:
            for b in self._stays():
                self._gather(b)
            for b in self._stays():
                self._wait(b)

    def end(self) -> None:
        """After the passes."""
        if self._divided:
            for b in range(len(self._state.buckets)):
                self.release(b)
            self._backward.clear()

    def release(self, bucket: int) -> None:
        """Give a bucket's memory back, once nothing that was gathered for it is still coming."""
        if self._state.buckets[bucket].ways > 1 and self._divided:
            work = self._coming.pop(bucket, None)
            if work is not None:
                work.wait()
            self._state.working[bucket].untyped_storage().resize_(0)

    def passed(self, bucket: int) -> None:
        """A bucket's gradients of one backward pass are complete."""
        if bucket in self._backward:
            self._backward.discard(bucket)
            self.release(bucket)

    def _stays(self) -> list[int]:
        come_and_go = {b for buckets in self._blocks for b in buckets}
        return [
            b
            for b, bucket in enumerate(self._state.buckets)
            if bucket.ways > 1 and b not in come_and_go
        ]

    def _start(self, b: int) -> dist.Work:
        state = self._state
        # `data` counts no versions: what the backward pass saved of these weights is what comes
        # back.
        whole = state.working[b].data
        work = dist.all_gather_into_tensor(whole, state.shards[b], group=self._group, async_op=True)
        assert work is not None
        return work

    def _gather(self, b: int) -> None:
        """Begin to gather a bucket, unless it is here or coming."""
        storage = self._state.working[b].untyped_storage()
        full = self._state.working[b]
        if b not in self._coming and storage.size() == 0:
            storage.resize_(full.numel() * full.itemsize)
            self._coming[b] = self._start(b)

    def _wait(self, b: int) -> None:
        self._gather(b)
        work = self._coming.pop(b, None)
        if work is not None:
            work.wait()

    def _hook(self, block: nn.Module, place: int) -> None:
        def before(module: nn.Module, inputs: Any) -> None:
            self._arrive(place, -1 if self._passes_back(place) else 1)

        def after(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if self._passes_back(place):
                return  # Computed again inside its backward pass.
            if output.requires_grad:
                output.register_hook(lambda gradient: self._before_backward(place))
            for b in self._blocks[place]:
                self.release(b)

        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)

    def _passes_back(self, place: int) -> bool:
        return not self._backward.isdisjoint(self._blocks[place])

    def _before_backward(self, place: int) -> None:
        self._backward.update(self._blocks[place])
        self._arrive(place, -1)

    def _arrive(self, place: int, way: int) -> None:
        """Wait for a block's buckets, and gather those of the neighbour that comes next while it
        computes."""
        for b in self._blocks[place]:
            self._gather(b)
        for b in self._blocks[place]:
            self._wait(b)
        if 0 <= place + way < len(self._blocks):
            for b in self._blocks[place + way]:
                self._gather(b)
