"""Copies of the state for a checkpoint, taken while training continues.

On a CPU training waits for a copy. A GPU copies during its next passes, straight into pinned memory
for all of the snapshot, which stays for the run: with a few small buffers the next update would
wait for the host to empty them. That update waits, on the device, until all was read. Where the
host lacks the memory, training waits for a copy through two buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farspan.runtime.comm.host_staging import CopyEvent, HostStaging, round_to_power, view_as
from farspan.runtime.device import available_host_memory

#: Bytes that are pinned at once, for many small slices or one that is larger.
PINNED_CHUNK_BYTES = 2**26
#: Share of the free memory of a host that the snapshots of all workers may pin together.
PINNED_SHARE = 0.5


class Snapshots:
    """One worker's snapshots; one is in use at a time."""

    def __init__(self, staging: HostStaging) -> None:
        self._staging = staging
        self._chunks: list[Tensor] = []
        self._copied: CopyEvent | None = None

    def take(self, sources: Sequence[Tensor], checkpoint_bytes: int) -> list[Tensor]:
        """Begin to copy these tensors of a checkpoint, which takes `checkpoint_bytes` for all
        workers; `wait` before the copies are read."""
        engine = self._staging.engine
        if engine is None or not sources:
            return [torch.empty(source.shape).copy_(source) for source in sources]
        copies = self._place(sources, checkpoint_bytes)
        if copies is None:
            return [self._staging.fetch(source) for source in sources]
        self._copied = engine.begin_download(list(zip(sources, copies, strict=True)))
        self._staging.protect(self._copied)
        return copies

    def wait(self) -> None:
        """Wait until the snapshot is whole, in another thread than the one that trains."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def close(self) -> None:
        """Free the memory of snapshots: none is read any more."""
        self._chunks.clear()

    def _place(self, sources: Sequence[Tensor], checkpoint_bytes: int) -> list[Tensor] | None:
        """Return pinned memory for copies of these, one after another; None where there is not
        enough."""
        capacities: list[int] = []
        places: list[tuple[int, int]] = []
        used = 0
        for source in sources:
            if not capacities or used + source.nbytes > capacities[-1]:
                capacities.append(max(PINNED_CHUNK_BYTES, round_to_power(source.nbytes)))
                used = 0
            places.append((len(capacities) - 1, used))
            used += source.nbytes
        if not self._reserve(capacities, checkpoint_bytes):
            return None
        copies = []
        for source, (chunk, at) in zip(sources, places, strict=True):
            copies.append(view_as(self._chunks[chunk], source.shape, source.dtype, at))
        return copies

    def _reserve(self, capacities: Sequence[int], checkpoint_bytes: int) -> bool:
        """Have chunks of at least these sizes; return whether there is memory for them."""
        engine = self._staging.engine
        assert engine is not None
        for place, capacity in enumerate(capacities):
            if place < len(self._chunks) and len(self._chunks[place]) >= capacity:
                continue
            # The workers of a host ask at once: as if all the checkpoint's were here.
            if checkpoint_bytes > PINNED_SHARE * available_host_memory():
                return False
            self._chunks[place : place + 1] = [engine.allocate(capacity)]
        return True
