"""Copies between a GPU's memory and the host's for which neither waits.

A copy has a stream of its own, begins when the stream that computes has come so far, and ends with
an event: what needs the copy waits for that event, and never for the device. The host's buffers are
pinned, as the driver copies other memory while it holds up the host, and are used again. What lies
in the host's memory is handed over as it is.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

#: Buffers have the size of a power of two, as PyTorch's allocator of pinned memory makes them
#: (ATen/core/CachingHostAllocator.h), and at least this one: a page.
LEAST_BUFFER_BYTES = 4096
#: Bytes of a part of what is fetched. Two parts are under way: while one crosses the bus, the
#: host copies the other out of its buffer.
FETCHED_BYTES = 2**26


class CopyEvent(Protocol):
    """The end of a copy, as `torch.cuda.Event` has it."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class CopyEngine(Protocol):
    """How a kind of device copies while it computes: in order for each direction."""

    def allocate(self, size: int) -> Tensor:
        """Allocate bytes in the host's memory that the device copies by itself."""
        ...

    def begin_download(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> CopyEvent:
        """Begin to copy each first tensor, as computed so far, to the second, in a buffer."""
        ...

    def begin_upload(self, source: Tensor) -> tuple[Tensor, CopyEvent]:
        """Begin to copy from a buffer; what is computed next waits for it, not the host."""
        ...

    def delay_computing(self, event: CopyEvent) -> None:
        """Have what is computed next wait for a copy."""
        ...


class CudaCopies:
    """Copies on two streams that do not compute."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def begin_download(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> CopyEvent:
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            return self._record_event(self._down)

    def begin_upload(self, source: Tensor) -> tuple[Tensor, CopyEvent]:
        # Of this stream's own memory: what is free for the computing stream may still be read
        # by what was launched before.
        with torch.cuda.stream(self._up):
            target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
            target.copy_(source, non_blocking=True)
            event = self._record_event(self._up)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(event)
        target.record_stream(computing)
        return target, event

    def delay_computing(self, event: CopyEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(event)

    def _record_event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # A thread that waits for it leaves the core to others.
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event


#: By kind of device. The memory of a CPU is the host's, and Apple's GPUs share it: what they copy
#: is waited for.
COPY_ENGINES: dict[str, Callable[[torch.device], CopyEngine]] = {"cuda": CudaCopies}


class _Idle(NamedTuple):
    """A buffer that may be used again after an event, or at once."""

    buffer: Tensor
    event: CopyEvent | None


def round_to_power(size: int) -> int:
    """Return the bytes that PyTorch pins for a buffer of this size."""
    capacity = LEAST_BUFFER_BYTES
    while capacity < size:
        capacity *= 2
    return capacity


class _BufferPool:
    """Buffers by size, which are used again. Its size is what was in use at once."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._idle = defaultdict[int, list[_Idle]](list)
        self._lock = threading.Lock()

    def take(self, size: int) -> Tensor:
        capacity = round_to_power(size)
        with self._lock:
            idle = self._idle[capacity]
            for place, (buffer, event) in enumerate(idle):
                if event is None or event.query():
                    del idle[place]
                    return buffer
        return self._allocate(capacity)

    def give_back(self, buffer: Tensor, event: CopyEvent | None = None) -> None:
        with self._lock:
            self._idle[len(buffer)].append(_Idle(buffer, event))

    def clear(self) -> None:
        """Free the buffers that are not in use."""
        with self._lock:
            self._idle.clear()


class HostCopy:
    """A copy in the host's memory, under way. What is copied must not change before its end."""

    def __init__(
        self,
        values: Tensor,
        source: Tensor | None = None,
        event: CopyEvent | None = None,
        give_back: Callable[[], None] | None = None,
    ) -> None:
        #: What is copied, once it has ended.
        self.values = values
        #: Whether the device copies it while it computes.
        self.staged = event is not None
        # Until the copy has ended its memory must not be another tensor's.
        self._source = source
        self._event = event
        self._give_back = give_back

    def wait(self) -> Tensor:
        """Wait for the copy, and return it."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
            self._source = None
        return self.values

    def give_back(self) -> None:
        """Let others use the copy's memory: it is no longer read."""
        if self._give_back is not None:
            self._give_back()
            self._give_back = None


class HostBuffer(NamedTuple):
    """Memory of the host that something arrives in, for the device."""

    values: Tensor
    #: The pool's, if it is one of its buffers.
    whole: Tensor | None


class HostStaging:
    """One worker's copies between its device and the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        make_engine = COPY_ENGINES.get(device.type)
        self.engine = None if make_engine is None else make_engine(device)
        self._pool: _BufferPool | None = None
        if self.engine is not None:
            self._pool = _BufferPool(self.engine.allocate)
        #: The end of a copy of what the device may change.
        self._read: CopyEvent | None = None

    def download(self, data: Tensor) -> HostCopy:
        """Begin to copy a contiguous tensor to the host."""
        if self.engine is None or self._pool is None or data.device.type != self.device.type:
            return HostCopy(data.cpu())
        pool = self._pool
        buffer = pool.take(data.nbytes)
        values = view_as(buffer, data.shape, data.dtype)
        event = self.engine.begin_download([(data, values)])
        return HostCopy(values, data, event, lambda: pool.give_back(buffer))

    def fetch(self, data: Tensor) -> Tensor:
        """Copy to memory of the host that is not pinned, and wait: what is large, or stays."""
        if self.engine is None or data.device.type != self.device.type:
            return data.cpu()
        fetched = torch.empty(data.shape, dtype=data.dtype)
        step = FETCHED_BYTES // data.itemsize
        targets = fetched.view(-1).split(step)
        under_way = deque[tuple[HostCopy, Tensor]]()
        for source, target in zip(data.reshape(-1).split(step), targets, strict=True):
            under_way.append((self.download(source), target))
            if len(under_way) == 2:
                _land(*under_way.popleft())
        while under_way:
            _land(*under_way.popleft())
        return fetched

    def make_buffer(self, size: int, dtype: torch.dtype) -> HostBuffer:
        """Make memory for `size` elements that come from elsewhere and are uploaded then."""
        if self._pool is None:
            return HostBuffer(torch.empty(size, dtype=dtype), None)
        whole = self._pool.take(size * dtype.itemsize)
        return HostBuffer(view_as(whole, (size,), dtype), whole)

    def upload(self, data: Tensor | HostBuffer) -> Tensor:
        """Copy to the device, without waiting for it; a buffer is not to be used any more."""
        values = data.values if isinstance(data, HostBuffer) else data
        if self.engine is None or self._pool is None:
            return values.to(self.device)
        whole = data.whole if isinstance(data, HostBuffer) else None
        if whole is None:
            whole = self._pool.take(values.nbytes)
            values = view_as(whole, values.shape, values.dtype).copy_(values)
        uploaded, event = self.engine.begin_upload(values)
        self._pool.give_back(whole, event)
        return uploaded

    def protect(self, event: CopyEvent) -> None:
        """Note a copy of the state that has begun: `delay_changes` comes before its next change."""
        self._read = event

    def delay_changes(self) -> None:
        """Have the device, not the host, wait until the state that is being saved was read."""
        if self._read is not None and self.engine is not None:
            self.engine.delay_computing(self._read)
        self._read = None

    def close(self) -> None:
        """Free the buffers that are not in use."""
        if self._pool is not None:
            self._pool.clear()


def _land(copy: HostCopy, target: Tensor) -> None:
    target.copy_(copy.wait())
    copy.give_back()


def view_as(buffer: Tensor, shape: Sequence[int], dtype: torch.dtype, at: int = 0) -> Tensor:
    """View bytes of a buffer, from `at` on, as a tensor."""
    size = math.prod(shape) * dtype.itemsize
    return buffer[at : at + size].view(dtype).view(tuple(shape))
