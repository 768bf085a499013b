"""Messages between two workers on a long link: receives are posted before the data comes, sends are
never waited for before the end of a step.

Gloo moves a message as soon as both ends know of it. A receive that is posted when the data is
wanted therefore costs a round trip, one that was posted before costs nothing. Messages go through
the memory of the hosts. What a GPU sends is copied there without waiting (`host_staging`), and
leaves as soon as the copy has ended.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from farspan.runtime.comm.host_staging import HostBuffer, HostCopy, HostStaging

#: A message is divided over streams in parts of at least this many bytes.
LEAST_PART = 2**16


class Posted(NamedTuple):
    """A receive under way."""

    buffer: HostBuffer
    works: tuple[dist.Work, ...]
    staging: HostStaging

    def wait(self) -> Tensor:
        """Wait for the message, and return it in the host's memory."""
        for work in self.works:
            work.wait()
        return self.buffer.values

    def upload(self) -> Tensor:
        """Return a message that has come in the device's memory; its buffer is used again."""
        return self.staging.upload(self.buffer)


class Sent:
    """A send under way, and what must not change meanwhile and goes when it has left. Gloo counts
    completions: a second wait would never end."""

    def __init__(self, work: dist.Work | Future[dist.Work], part: Tensor) -> None:
        """Take a send that has begun, or begins when a copy has ended."""
        self._under_way: tuple[dist.Work | Future[dist.Work], Tensor] | None = (work, part)
        self._failure: Exception | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._under_way is None:
                return
            try:
                work = self._under_way[0]
                if isinstance(work, Future):
                    work = work.result()
                work.wait()
            except Exception as error:
                self._failure = error
                raise
            finally:
                self._under_way = None


class Messenger:
    """One worker's end of all its messages. `groups` hold the connections between two ranks;
    several are streams."""

    def __init__(self, staging: HostStaging | None = None) -> None:
        """Take the copies of the device that messages come from and go to; else the CPU's."""
        self.staging = staging or HostStaging(torch.device("cpu"))
        self._sent: deque[Sent] = deque()
        self._before = 0
        # Frees the memory of what has been sent, long before it is waited for.
        self._leaving = ThreadPoolExecutor(1)
        # Sends what has been copied. A device copies in order, so messages of one tag keep theirs.
        self._copied = ThreadPoolExecutor(1)

    def send(
        self,
        data: Tensor,
        target: int,
        tag: int,
        groups: Sequence[dist.ProcessGroup | None] = (None,),
    ) -> list[Sent]:
        """Send a contiguous tensor to a rank; it must not change before what is returned has
        ended."""
        copy = self.staging.download(data.detach().view(-1))
        if not copy.staged:
            works = []
            for group, part in zip(groups, split_parts(copy.values, len(groups)), strict=False):
                works.append(Sent(_begin_send(part, target, tag, group), part))
                self._leaving.submit(works[-1].wait)
        else:
            works = self._send_when_copied(copy, target, tag, groups)
        self._sent.extend(works)
        return works

    def _send_when_copied(
        self,
        copy: HostCopy,
        target: int,
        tag: int,
        groups: Sequence[dist.ProcessGroup | None],
    ) -> list[Sent]:
        """Send a copy as soon as it has ended; its memory is used again when all of it has left."""

        def begin(part: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
            copy.wait()
            return _begin_send(part, target, tag, group)

        def finish(works: Sequence[Sent]) -> None:
            for work in works:
                work.wait()
            copy.give_back()

        works = []
        for group, part in zip(groups, split_parts(copy.values, len(groups)), strict=False):
            works.append(Sent(self._copied.submit(begin, part, group), part))
        self._leaving.submit(finish, works)
        return works

    def post(
        self,
        size: int,
        dtype: torch.dtype,
        source: int,
        tag: int,
        groups: Sequence[dist.ProcessGroup | None] = (None,),
        *,
        uploaded: bool = False,
    ) -> Posted:
        """Begin to receive `size` elements from a rank; they are `uploaded` then, or stay in the
        host's memory."""
        if uploaded:
            buffer = self.staging.make_buffer(size, dtype)
        else:
            buffer = HostBuffer(torch.empty(size, dtype=dtype), None)
        works = []
        for group, part in zip(groups, split_parts(buffer.values, len(groups)), strict=False):
            work = dist.irecv(part, source, group=group, tag=tag)
            assert work is not None
            works.append(work)
        return Posted(buffer, tuple(works), self.staging)

    def wait_for_previous_step(self) -> None:
        """Wait, at the end of a step, for what was sent before the last end of a step."""
        for _ in range(self._before):
            self._sent.popleft().wait()
        self._before = len(self._sent)

    def close(self) -> None:
        """Wait for everything that was sent, and free the memory that it took."""
        while self._sent:
            self._sent.popleft().wait()
        self._before = 0
        self.staging.close()


def _begin_send(part: Tensor, target: int, tag: int, group: dist.ProcessGroup | None) -> dist.Work:
    work = dist.isend(part, target, group=group, tag=tag)
    assert work is not None
    return work


def split_parts(flat: Tensor, count: int) -> tuple[Tensor, ...]:
    """Split a flat tensor into up to `count` nearly equal parts, the same on both ends."""
    num_parts = max(1, min(count, flat.nbytes // LEAST_PART))
    return torch.tensor_split(flat, num_parts)
