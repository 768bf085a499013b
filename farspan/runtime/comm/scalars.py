"""The few numbers that the workers of a replica must all know: gradient norm and loss, requests to
stop, when to save.

Each worker sends its own part straight to all others, and has receives posted for theirs: half a
round trip, which hides behind the last stage for all that is sent before that is done. All add the
parts in the order of ranks, in double precision, so that all decide alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from farspan.runtime.comm.host_staging import HostCopy
from farspan.runtime.comm.message_tags import tag
from farspan.runtime.comm.messages import Messenger, Posted
from farspan.runtime.comm.topology import Topology

#: Receives that wait: a worker may send its next part before another has received the one before.
AHEAD = 2


class ScalarExchange:
    """One worker's end of a series of exchanges of `width` numbers; each part is sent once and
    received once, in order."""

    def __init__(self, topology: Topology, messenger: Messenger, channel: int, width: int) -> None:
        self._messenger = messenger
        self._rank = topology.rank
        self._channel = channel
        self._width = width
        self.others = [rank for rank in topology.ranks if rank != topology.rank]
        self._num_sent = 0
        self._num_posted = 0
        self._own_values: deque[Sequence[float] | HostCopy] = deque()
        self._waiting: deque[list[Posted]] = deque()

    def send_values(self, values: Sequence[float]) -> None:
        """Send this worker's part."""
        self._send(torch.tensor(values, dtype=torch.float64))
        self._own_values.append(values)

    def send_computed(self, values: Tensor) -> None:
        """Send this worker's part, double and on a GPU, as soon as it is computed; nobody waits for
        that."""
        self._send(values)
        self._own_values.append(self._messenger.staging.download(values))

    def _send(self, values: Tensor) -> None:
        messenger = self._messenger
        while self._num_posted < self._num_sent + AHEAD:
            number = tag(self._channel, self._num_posted)
            posted = [messenger.post(self._width, torch.float64, r, number) for r in self.others]
            self._waiting.append(posted)
            self._num_posted += 1
        number = tag(self._channel, self._num_sent)
        for rank in self.others:
            messenger.send(values, rank, number)
        self._num_sent += 1

    @property
    def num_unreceived(self) -> int:
        return len(self._own_values)

    def receive_values(self) -> dict[int, Sequence[float]]:
        """Return all workers' parts of the oldest exchange that was not received yet, by rank."""
        own = self._own_values.popleft()
        if isinstance(own, HostCopy):
            own_copy = own
            own = own_copy.wait().tolist()
            own_copy.give_back()
        parts: dict[int, Sequence[float]] = {self._rank: own}
        for rank, receive in zip(self.others, self._waiting.popleft(), strict=True):
            parts[rank] = receive.wait().tolist()
        return {rank: parts[rank] for rank in sorted(parts)}
