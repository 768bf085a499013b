"""Messages between two workers on a long link: receives are posted before the data comes, sends are
never waited for before the end of a step.

Gloo moves a message as soon as both ends know of it. A receive that is posted when the data is
wanted therefore costs a round trip, one that was posted before costs nothing. Messages go through
the memory of the hosts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

#: A message is divided over streams in parts of at least this many bytes.
LEAST_PART = 2**16


class Posted(NamedTuple):
    """A receive under way."""

    buffer: Tensor
    works: tuple[dist.Work, ...]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.buffer


class Sent:
    """A send under way, and what must not change meanwhile and goes when it has left. Gloo counts
    completions: a second wait would never end."""

    def __init__(self, work: dist.Work, part: Tensor) -> None:
        self._under_way: tuple[dist.Work, Tensor] | None = (work, part)
        self._failure: Exception | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._under_way is None:
                return
            try:
                self._under_way[0].wait()
            except Exception as error:
                self._failure = error
                raise
            finally:
                self._under_way = None


class Messenger:
    """One worker's end of all its messages. `groups` hold the connections between two ranks;
    several are streams."""

    def __init__(self) -> None:
        self._sent: deque[Sent] = deque()
        self._before = 0
        # Frees the memory of what has been sent, long before it is waited for.
        self._leaving = ThreadPoolExecutor(1)

    def send(
        self,
        data: Tensor,
        target: int,
        tag: int,
        groups: Sequence[dist.ProcessGroup | None] = (None,),
    ) -> list[Sent]:
        """Send a contiguous tensor to a rank; it must not change before what is returned has
        ended."""
        works = []
        flat = data.detach().cpu().view(-1)
        for group, part in zip(groups, split_parts(flat, len(groups)), strict=False):
            work = dist.isend(part, target, group=group, tag=tag)
            assert work is not None
            works.append(Sent(work, part))
            self._leaving.submit(works[-1].wait)
        self._sent.extend(works)
        return works

    def post(
        self,
        size: int,
        dtype: torch.dtype,
        source: int,
        tag: int,
        groups: Sequence[dist.ProcessGroup | None] = (None,),
    ) -> Posted:
        """Begin to receive `size` elements from a rank."""
        buffer = torch.empty(size, dtype=dtype)
        works = []
        for group, part in zip(groups, split_parts(buffer, len(groups)), strict=False):
            work = dist.irecv(part, source, group=group, tag=tag)
            assert work is not None
            works.append(work)
        return Posted(buffer, tuple(works))

    def wait_for_previous_step(self) -> None:
        """Wait, at the end of a step, for what was sent before the last end of a step."""
        for _ in range(self._before):
            self._sent.popleft().wait()
        self._before = len(self._sent)

    def close(self) -> None:
        """Wait for everything that was sent."""
        while self._sent:
            self._sent.popleft().wait()
        self._before = 0


def split_parts(flat: Tensor, count: int) -> tuple[Tensor, ...]:
    """Split a flat tensor into up to `count` nearly equal parts, the same on both ends."""
    num_parts = max(1, min(count, flat.nbytes // LEAST_PART))
    return torch.tensor_split(flat, num_parts)
