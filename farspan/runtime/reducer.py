"""Summing gradients over the data axis, in buckets that leave as soon as the backward pass has filled them."""

from __future__ import annotations

import torch.distributed as dist

from farspan.runtime.state import TrainState


class Reducer:
    """All-reduces the flat gradient of every rank of `group` while the backward pass is still running.

    Buckets are contiguous parts of the flat gradient of about `bucket_bytes`. `arm()` before the last backward pass of
    a step; `finish()` after it, when every bucket has left, waits for them.
    """

    def __init__(self, state: TrainState, bucket_bytes: int, group: dist.ProcessGroup | None = None) -> None:
        self._state, self._group = state, group
        self._bucket_of: list[int] = []
        self._ends: list[int] = [0]
        for i in range(len(state.parameters)):
            if (state.offsets[i + 1] - self._ends[-1]) * 4 > bucket_bytes and state.offsets[i] > self._ends[-1]:
                self._ends.append(state.offsets[i])
            self._bucket_of.append(len(self._ends) - 1)
        self._ends.append(state.offsets[-1])
        self._missing: list[int] = []
        self._works: list[dist.Work] = []
        state.on_grad = self._arrived

    def arm(self) -> None:
        """The next backward pass is the step's last: gradients that it adds are final."""
        self._missing = [self._bucket_of.count(bucket) for bucket in range(len(self._ends) - 1)]

    def _arrived(self, index: int) -> None:
        if not self._missing:
            return
        bucket = self._bucket_of[index]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            part = self._state.grad[self._ends[bucket] : self._ends[bucket + 1]]
            work = dist.all_reduce(part, group=self._group, async_op=True)
            assert work is not None
            self._works.append(work)

    def finish(self) -> None:
        """Wait until every bucket is the sum over all ranks."""
        if any(self._missing):
            raise RuntimeError("a parameter got no gradient: its bucket was never sent")
        for work in self._works:
            work.wait()
        self._works, self._missing = [], []
