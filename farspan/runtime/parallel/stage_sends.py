"""The messages between two neighbouring stages, which may lie on unlike meshes.

Every worker of a stage has rows of a microbatch; `semantics.layout.transfer` says who sends which
to whom, each byte over a long line once. Of the messages that the sender may have under way, all
have a receive that waits for them.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from farspan.domain.plan import Replica
from farspan.runtime.comm.channels import Channel, tag
from farspan.runtime.comm.compress import Codec
from farspan.runtime.comm.messages import Messenger, Posted
from farspan.runtime.comm.topology import ProcessGroups, Topology
from farspan.runtime.state.train_state import WORKING_DTYPES
from farspan.semantics.communications import rows_held
from farspan.semantics.layout import Send, transfer

#: Microbatches of a validation that are under way between two stages.
EVALUATED_AHEAD = 4


class StageSends:
    """All messages of one stage's training steps; validations make theirs when they begin."""

    def __init__(
        self, topology: Topology, groups: ProcessGroups, messenger: Messenger, depths: list[int]
    ) -> None:
        self._topology = topology
        self._groups = groups
        self._messenger = messenger
        for replica in topology.plan.replicas:
            for edge, boundary in enumerate(replica.edges):
                for k in range(boundary.streams if boundary.streams > 1 else 0):
                    groups.together(*_stream(replica, edge, k))
        s = topology.stage_index
        # A stage is ahead of the next by what it has in flight, and maybe the first message of its
        # next step.
        if not topology.first:
            self.from_before = self._messages(s - 1, Channel.ACTIVATIONS, depths[s - 1] + 1)
            self.to_before = self._messages(s - 1, Channel.GRADIENTS, depths[s - 1] + 1)
            self.evaluated_before = self._messages(s - 1, Channel.EVALUATED, EVALUATED_AHEAD)
        if not topology.last:
            self.to_next = self._messages(s, Channel.ACTIVATIONS, depths[s] + 1)
            self.from_next = self._messages(s, Channel.GRADIENTS, depths[s] + 1)
            self.evaluated_next = self._messages(s, Channel.EVALUATED, EVALUATED_AHEAD)

    def _messages(self, edge: int, channel: int, ahead: int) -> StageMessages:
        return StageMessages(self._topology, edge, channel, ahead, self._groups, self._messenger)


class StageMessages:
    """One direction of an edge at one worker: what it sends, or what it receives and hands on."""

    def __init__(
        self,
        topology: Topology,
        edge: int,
        channel: int,
        ahead: int,
        groups: ProcessGroups,
        messenger: Messenger,
    ) -> None:
        replica = topology.replica
        plan = topology.plan
        self._messenger = messenger
        self._channel = channel
        self._ahead = ahead
        ends = (edge + 1, edge) if channel == Channel.GRADIENTS else (edge, edge + 1)
        held, wanted = (rows_held(replica, stage) for stage in ends)
        first, second = transfer(held, wanted, topology.site)
        self._sends = [send for send in first if send.source == topology.rank]
        self._receives = [send for send in first if send.target == topology.rank]
        self._hands = [send for send in second if send.source == topology.rank]
        self._handed = [send for send in second if send.target == topology.rank]
        (mine,) = (part for part in (*held, *wanted) if part.rank == topology.rank)
        self._start = mine.start
        self._rows = mine.stop - mine.start
        self._row = (plan.train.seq_len, plan.model.d_model)
        self._dtype = WORKING_DTYPES[plan.train.precision]
        self._device = torch.device(topology.device)
        self._codec = _codec(replica.edges[edge].bits, self._dtype)
        self._groups = streams(topology, edge, groups)
        self._sent = self._taken = 0
        self._waiting: deque[list[tuple[Send, Posted]]] = deque()

    def send(self, x: Tensor) -> None:
        """Send this worker's rows (rows, S, D) of the next message."""
        for send in self._sends:
            part = self._part(x.detach().contiguous(), send)
            content = part if self._codec is None else self._codec.encode(part)
            self._messenger.send(content, send.target, tag(self._channel, self._sent), self._groups)
        self._sent += 1

    def take(self) -> Tensor:
        """This worker's rows (rows, S, D) of the next message; hands on what others of its site
        want of them."""
        self.post()
        x = torch.empty((self._rows, *self._row), dtype=self._dtype, device=self._device)
        arrived = self._waiting.popleft()
        for send, posted in arrived[: len(self._receives)]:
            into = self._part(x, send)
            content = posted.wait().to(self._device)
            into.copy_(
                content if self._codec is None else self._codec.decode(content, into.numel())
            )
        # Before waiting for what others hand on: they may wait for this.
        for send in self._hands:
            self._messenger.send(
                self._part(x, send), send.target, tag(self._channel, self._taken, inside=True)
            )
        for send, posted in arrived[len(self._receives) :]:
            self._part(x, send).copy_(posted.wait())
        self._taken += 1
        self.post()
        return x

    def post(self) -> None:
        """Wait in advance for as many messages as may be under way."""
        while len(self._waiting) < self._ahead:
            number = self._taken + len(self._waiting)
            posted = [(send, self._receive(send, number)) for send in self._receives]
            inside = tag(self._channel, number, inside=True)
            posted += [
                (send, self._messenger.post(self._elements(send), self._dtype, send.source, inside))
                for send in self._handed
            ]
            self._waiting.append(posted)

    def _receive(self, send: Send, number: int) -> Posted:
        size = self._elements(send)
        dtype = self._dtype
        if self._codec is not None:
            size = self._codec.encoded_size(size)
            dtype = torch.uint8
        return self._messenger.post(
            size, dtype, send.source, tag(self._channel, number), self._groups
        )

    def _part(self, x: Tensor, send: Send) -> Tensor:
        """The rows of one message, flattened."""
        return x[send.start - self._start : send.stop - self._start].view(-1)

    def _elements(self, send: Send) -> int:
        return (send.stop - send.start) * self._row[0] * self._row[1]


def streams(topology: Topology, edge: int, groups: ProcessGroups) -> list[dist.ProcessGroup | None]:
    """The connections of an edge: the one that all messages share, or several of its own."""
    count = topology.replica.edges[edge].streams
    return (
        [groups.of(*_stream(topology.replica, edge, k)) for k in range(count)]
        if count > 1
        else [None]
    )


def _stream(replica: Replica, edge: int, k: int) -> tuple[list[int], str]:
    """The ranks of one connection, and its purpose."""
    ranks = sorted(rank for stage in replica.stages[edge : edge + 2] for rank in stage.mesh.ranks)
    return ranks, f"edge {edge}, stream {k}"


def _codec(bits: int, dtype: torch.dtype) -> Codec | None:
    """None where numbers go as they are computed."""
    return None if bits == 8 * dtype.itemsize else Codec(bits)
