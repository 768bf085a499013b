"""The few numbers that the workers of a replica must all know: gradient norm and loss, who wants to
stop, when to save.

Each worker sends its own part straight to all others, and has receives posted for theirs: half a
round trip, of which whatever is sent before the last stage is done hides behind it. All add the
parts in the order of ranks, in double precision, so that all decide alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from farspan.runtime.comm.channels import tag
from farspan.runtime.comm.messages import Messenger, Posted
from farspan.runtime.comm.topology import Topology

#: Receives that wait: a worker may say its next part before another has heard the one before.
AHEAD = 2


class ScalarExchange:
    """One worker's end of a series of exchanges of `width` numbers; each is said once and heard
    once, in order."""

    def __init__(self, topology: Topology, messenger: Messenger, channel: int, width: int) -> None:
        self._messenger = messenger
        self._rank = topology.rank
        self._channel = channel
        self._width = width
        self.others = [rank for rank in topology.ranks if rank != topology.rank]
        self._said = self._posted = 0
        self._mine: deque[Sequence[float]] = deque()
        self._waiting: deque[dict[int, Posted]] = deque()

    def say(self, values: Sequence[float]) -> None:
        """Send this worker's part."""
        while self._posted < self._said + AHEAD:
            number = tag(self._channel, self._posted)
            self._waiting.append(
                {
                    r: self._messenger.post(self._width, torch.float64, r, number)
                    for r in self.others
                }
            )
            self._posted += 1
        for rank in self.others:
            self._messenger.send(
                torch.tensor(values, dtype=torch.float64), rank, tag(self._channel, self._said)
            )
        self._mine.append(values)
        self._said += 1

    @property
    def unheard(self) -> int:
        return len(self._mine)

    def hear(self) -> dict[int, Sequence[float]]:
        """All workers' parts of the oldest exchange that was not heard yet, by rank."""
        mine = self._mine.popleft()
        posted = self._waiting.popleft()
        parts: dict[int, Sequence[float]] = {
            rank: receive.wait().tolist() for rank, receive in posted.items()
        }
        parts[self._rank] = mine
        return {rank: parts[rank] for rank in sorted(parts)}
