"""A table that the first and the last stage of a pipeline both hold: the embedding, and the head's
matrix.

Each end adds the other's gradient to its own and makes the same update, so the two copies stay
equal. The head's gradient is complete before the last blocks' backward pass and travels while the
first stage makes its own, behind the activations' gradient that it waits for; the embedding's is
zero but for the rows of the step's tokens, and only these travel back (all where its sums are
rounded).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farspan.runtime.comm.message_tags import MessageChannel, tag
from farspan.runtime.comm.messages import Messenger, Posted
from farspan.runtime.comm.topology import Topology
from farspan.runtime.state.train_state import TrainState
from farspan.semantics.reshard import HeldRange, Send, plan_reshard

TABLE = "tok.weight"


class TiedEmbedding:
    """One worker's part of the exchange, once a step: `post_receives`; `on_grad_ready` when its
    own sum is complete, and `on_passes_done` when its passes have ended, in either order;
    `add_received` last."""

    def __init__(
        self,
        topology: Topology,
        state: TrainState,
        messenger: Messenger,
        rows: dict[int, tuple[int, int]],
    ) -> None:
        """`rows`: the rows [start, stop) of the table that each worker of both stages holds."""
        self._topology = topology
        self._rank = topology.rank
        self._state = state
        self._messenger = messenger
        self._rows = rows
        self._index = state.names.index(TABLE)
        first = topology.replica.stages[0]
        last = topology.replica.stages[-1]
        #: The quantization residuals of other steps' rows are in the first stage's sums, too.
        self._rounded = first.grad_sync.bits < 32 and len(first.mesh.batch) > 1
        self._count = -1
        self._complete = False
        self._released = False
        ends = [
            (first.mesh.ranks, MessageChannel.EMBEDDING),
            (last.mesh.ranks, MessageChannel.HEAD),
        ]
        if not topology.first:
            ends.reverse()
        (self._mine, self._own_channel), (self._theirs, self._other_channel) = ends

    def post_receives(self, tokens: NDArray[np.int64]) -> None:
        """Post the receives of a step that reads these tokens."""
        self._count += 1
        self._complete = False
        self._released = False
        every = np.arange(max(stop for _, stop in self._rows.values()))
        touched = every if self._rounded else np.unique(tokens)
        sent, received = (touched, every) if self._topology.first else (every, touched)
        self._sent_rows = sent
        self._sends, _ = self._exchange(sent, self._mine, self._theirs)
        # From the other end, then inside the site.
        first, second = self._exchange(received, self._theirs, self._mine)
        low, high = map(int, np.searchsorted(received, self._rows[self._rank]))
        self._received_rows = received[low:high]
        self._receives = self._post_receives(first, low, inside=False)
        self._handed = self._post_receives(second, low, inside=True)
        self._hands = []
        for send in second:
            if send.source == self._rank:
                rows = slice(send.start - low, send.stop - low)
                self._hands.append((rows, send.target))

    def _post_receives(
        self, sends: Sequence[Send], low: int, *, inside: bool
    ) -> list[tuple[slice, Posted]]:
        number = tag(self._other_channel, self._count, inside=inside)
        d_model = self._topology.plan.model.d_model
        receives = []
        for send in sends:
            if send.target == self._rank:
                size = (send.stop - send.start) * d_model
                posted = self._messenger.post(size, torch.float32, send.source, number)
                rows = slice(send.start - low, send.stop - low)
                receives.append((rows, posted))
        return receives

    def on_grad_ready(self) -> None:
        """Report that this end's own gradient is summed."""
        self._complete = True
        if self._released:
            self._send_rows()

    def on_passes_done(self) -> None:
        """Report that this worker has no more passes: nothing that is more urgent will be sent."""
        self._released = True
        if self._complete:
            self._send_rows()

    def _send_rows(self) -> None:
        """Send the rows that the other end lacks."""
        table = self._gradient()
        number = tag(self._own_channel, self._count)
        for send in self._sends:
            if send.source == self._rank:
                rows = self._local_rows(self._sent_rows[send.start : send.stop])
                self._messenger.send(table[rows].reshape(-1), send.target, number)

    def add_received(self) -> None:
        """Add the other end's gradient, and hand it on inside the site."""
        table = self._gradient()
        shape = (len(self._received_rows), table.shape[1])
        buffer = self._messenger.staging.make_buffer(math.prod(shape), torch.float32)
        gradient = buffer.values.view(shape)
        for rows, posted in self._receives:
            gradient[rows].view(-1).copy_(posted.wait())
        inside = tag(self._other_channel, self._count, inside=True)
        for rows, target in self._hands:
            self._messenger.send(gradient[rows].reshape(-1), target, inside)
        for rows, posted in self._handed:
            gradient[rows].view(-1).copy_(posted.wait())
        own_rows = self._local_rows(self._received_rows)
        table.index_add_(0, own_rows, self._messenger.staging.upload(buffer).view(shape))

    def _exchange(
        self, rows: NDArray[np.int64], source: Sequence[int], target: Sequence[int]
    ) -> tuple[Sequence[Send], Sequence[Send]]:
        """Return the exchange of some rows, counted by their place among them."""

        def held_ranges(ranks: Sequence[int]) -> list[HeldRange]:
            ranges = []
            for rank in ranks:
                low, high = np.searchsorted(rows, self._rows[rank])
                ranges.append(HeldRange(rank, int(low), int(high)))
            return ranges

        return plan_reshard(held_ranges(source), held_ranges(target), self._topology.site)

    def _gradient(self) -> Tensor:
        """Return the summed gradient of this end's part of the table."""
        b, _ = self._state.home[self._index]
        full = self._state.collected[b]
        assert full is not None
        return self._state.view_parameter({b: full}, self._index)  # type: ignore[arg-type]

    def _local_rows(self, rows: NDArray[np.int64]) -> Tensor:
        first, _ = self._rows[self._rank]
        return self._messenger.staging.upload(torch.from_numpy(rows - first))
