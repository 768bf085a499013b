"""A table that the first and the last stage of a pipeline both hold: the embedding, and the head's
matrix.

Each end adds the other's gradient to its own and makes the same update, so the two copies stay
equal. The head's gradient is complete before the last blocks' backward pass and travels while the
first stage makes its own, behind the activations' gradient that it waits for; the embedding's is
zero but for the rows of the step's tokens, and only these travel back (all where its sums are
rounded).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farspan.runtime.comm.channels import Channel, tag
from farspan.runtime.comm.messages import Messenger, Posted
from farspan.runtime.comm.topology import Topology
from farspan.runtime.state.train_state import TrainState
from farspan.semantics.layout import HeldRange, Send, transfer

TABLE = "tok.weight"


class TiedEmbedding:
    """One worker's part of the exchange, once a step: `expect`; `complete` when its own sum is, and
    `release` when its passes have ended, in either order; `add` last."""

    def __init__(
        self,
        topology: Topology,
        state: TrainState,
        messenger: Messenger,
        rows: dict[int, tuple[int, int]],
    ) -> None:
        """`rows`: the rows [start, stop) of the table that each worker of both stages holds."""
        self._topology = topology
        self._state = state
        self._messenger = messenger
        self._held = rows
        self._bucket = state.home[state.names.index(TABLE)][0]
        first = topology.replica.stages[0]
        #: What rounding left of other steps' rows is in the first stage's sums, too.
        self._rounded = first.grad_sync.bits < 32 and len(first.mesh.batch) > 1
        self._count = -1
        self._complete = self._released = False
        ends = topology.replica.stages[0].mesh.ranks, topology.replica.stages[-1].mesh.ranks
        self._mine, self._theirs = ends if topology.first else ends[::-1]
        self._received: list[list[tuple[Send, Posted]]] = []
        self._out: tuple[NDArray[np.int64], Sequence[Send], Sequence[Send]]

    def expect(self, tokens: NDArray[np.int64]) -> None:
        """A step begins that reads these tokens: post the receives."""
        self._count += 1
        self._complete = self._released = False
        every = np.arange(max(stop for _, stop in self._held.values()))
        touched = every if self._rounded else np.unique(tokens)
        sent, received = (touched, every) if self._topology.first else (every, touched)
        self._out = (sent, *self._sends(sent, self._mine, self._theirs))
        first, second = self._sends(received, self._theirs, self._mine)
        rank = self._topology.rank
        embedding = not self._topology.first
        self._received = [
            [
                (
                    send,
                    self._messenger.post(
                        self._size(send), torch.float32, send.source, self._tag(embedding, hop)
                    ),
                )
                for send in sends
                if send.target == rank
            ]
            for hop, sends in enumerate((first, second))
        ]
        low, high = np.searchsorted(received, self._held[self._topology.rank])
        self._expected = int(low), int(high)
        self._hands = [send for send in second if send.source == self._topology.rank]
        self._incoming = received

    def complete(self) -> None:
        """This end's own gradient is summed."""
        self._complete = True
        if self._released:
            self._send()

    def release(self) -> None:
        """This worker has no more passes: nothing that is more urgent will be sent."""
        self._released = True
        if self._complete:
            self._send()

    def _send(self) -> None:
        """Send the rows that the other end lacks."""
        rows, first, _ = self._out
        table = self._table()
        for send in first:
            if send.source == self._topology.rank:
                part = table[self._local(rows[send.start : send.stop])].reshape(-1)
                self._messenger.send(part, send.target, self._tag(self._topology.first, 0))

    def add(self) -> None:
        """Add the other end's gradient, and hand it on inside the site."""
        table = self._table()
        (low, high) = self._expected
        gradient = torch.empty(high - low, table.shape[1])
        for hop, received in enumerate(self._received):
            for send, posted in received:
                gradient[send.start - low : send.stop - low] = posted.wait().view(
                    -1, table.shape[1]
                )
            for send in self._hands if hop == 0 else ():
                part = gradient[send.start - low : send.stop - low].reshape(-1)
                self._messenger.send(part, send.target, self._tag(not self._topology.first, 1))
        table.index_add_(0, self._local(self._incoming[low:high]), gradient.to(table.device))

    def _sends(
        self, rows: NDArray[np.int64], source: Sequence[int], target: Sequence[int]
    ) -> tuple[Sequence[Send], Sequence[Send]]:
        """The exchange of some rows, counted by their place among them."""

        def parts(ranks: Sequence[int]) -> list[HeldRange]:
            bounds = (np.searchsorted(rows, self._held[rank]) for rank in ranks)
            return [
                HeldRange(rank, int(low), int(high))
                for rank, (low, high) in zip(ranks, bounds, strict=True)
            ]

        return transfer(parts(source), parts(target), self._topology.site)

    def _table(self) -> Tensor:
        full = self._state.collected[self._bucket]
        assert full is not None
        return self._state.view({self._bucket: full}, self._state.names.index(TABLE))  # type: ignore[arg-type]

    def _local(self, rows: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(rows - self._held[self._topology.rank][0]).to(self._state.device)

    def _size(self, send: Send) -> int:
        return (send.stop - send.start) * self._topology.plan.model.d_model

    def _tag(self, embedding: bool, hop: int) -> int:
        return tag(Channel.EMBEDDING if embedding else Channel.HEAD, self._count, inside=hop > 0)
