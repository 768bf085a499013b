"""The messages between two neighbouring stages, which may lie on unlike meshes.

Every worker of a stage has rows of a microbatch; `semantics.reshard.plan_reshard` decides which
worker sends which of them to which other one, each byte over a long link once. All messages that
the sender may have under way have a receive that waits for them.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from farspan.domain.plan import Replica
from farspan.runtime.comm.message_tags import MessageChannel, tag
from farspan.runtime.comm.messages import Messenger, Posted
from farspan.runtime.comm.quantize import Codec
from farspan.runtime.comm.topology import ProcessGroups, Topology
from farspan.runtime.native_dtypes import TORCH_DTYPES
from farspan.semantics.communications import rows_held
from farspan.semantics.reshard import Send, plan_reshard

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
        # The groups of all edges of the run, in one order on all workers.
        for replica in topology.plan.replicas:
            for edge, boundary in enumerate(replica.edges):
                if boundary.streams > 1:
                    for k in range(boundary.streams):
                        groups.make_with_all(*_stream_group(replica, edge, k))
        s = topology.stage_index
        # A stage is ahead of the next by what it has in flight, and maybe the first message of its
        # next step.
        if not topology.first:
            before = s - 1
            ahead = depths[before] + 1
            self.from_before = self._make_messages(before, MessageChannel.ACTIVATIONS, ahead)
            self.to_before = self._make_messages(before, MessageChannel.GRADIENTS, ahead)
            self.evaluated_before = self._make_messages(
                before, MessageChannel.EVALUATED, EVALUATED_AHEAD
            )
        if not topology.last:
            ahead = depths[s] + 1
            self.to_next = self._make_messages(s, MessageChannel.ACTIVATIONS, ahead)
            self.from_next = self._make_messages(s, MessageChannel.GRADIENTS, ahead)
            self.evaluated_next = self._make_messages(s, MessageChannel.EVALUATED, EVALUATED_AHEAD)

    def _make_messages(self, edge: int, channel: int, ahead: int) -> StageMessages:
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
        rank = topology.rank
        self._messenger = messenger
        self._channel = channel
        self._ahead = ahead
        source = edge
        target = edge + 1
        if channel == MessageChannel.GRADIENTS:
            source, target = target, source
        sent_rows = rows_held(replica, source)
        wanted_rows = rows_held(replica, target)
        # Between stages, then inside the site of those that want them.
        first, second = plan_reshard(sent_rows, wanted_rows, topology.site)
        self._sends = [send for send in first if send.source == rank]
        self._receives = [send for send in first if send.target == rank]
        self._hands = [send for send in second if send.source == rank]
        self._handed = [send for send in second if send.target == rank]
        (own,) = (part for part in (*sent_rows, *wanted_rows) if part.rank == rank)
        self._start = own.start
        self._shape = (own.stop - own.start, plan.train.seq_len, plan.model.d_model)
        self._dtype = TORCH_DTYPES[plan.train.precision]
        self._device = torch.device(topology.device)
        # None where numbers go as they are computed.
        bits = replica.edges[edge].bits
        self._codec = None if bits == 8 * self._dtype.itemsize else Codec(bits)
        # The connection that all messages share, or several of this edge's own.
        self._groups: list[dist.ProcessGroup | None] = [None]
        count = replica.edges[edge].streams
        if count > 1:
            self._groups = [
                groups.of(*_stream_group(replica, edge, k), messages=True) for k in range(count)
            ]
        self._sent = 0
        self._taken = 0
        self._waiting: deque[list[Posted]] = deque()

    def send_rows(self, x: Tensor) -> None:
        """Send this worker's rows (rows, S, D) of the next message."""
        number = tag(self._channel, self._sent)
        for send in self._sends:
            content = self._flat_rows(x.detach().contiguous(), send)
            if self._codec is not None:
                content = self._codec.quantize(content)
            self._messenger.send(content, send.target, number, self._groups)
        self._sent += 1

    def take_rows(self) -> Tensor:
        """Return this worker's rows (rows, S, D) of the next message; hands on what others of its
        site want of them."""
        self.post_receives()
        x = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        arriving = iter(self._waiting.popleft())
        for send in self._receives:
            rows = self._flat_rows(x, send)
            posted = next(arriving)
            posted.wait()
            content = posted.upload()
            if self._codec is not None:
                content = self._codec.dequantize(content, rows.numel())
            rows.copy_(content)
        # Before waiting for what others hand on: they may wait for this.
        inside = tag(self._channel, self._taken, inside=True)
        for send in self._hands:
            self._messenger.send(self._flat_rows(x, send), send.target, inside)
        for send in self._handed:
            posted = next(arriving)
            posted.wait()
            self._flat_rows(x, send).copy_(posted.upload())
        self._taken += 1
        self.post_receives()
        return x

    def post_receives(self) -> None:
        """Post the receives of all messages that may be under way."""
        while len(self._waiting) < self._ahead:
            number = self._taken + len(self._waiting)
            across = tag(self._channel, number)
            inside = tag(self._channel, number, inside=True)
            posted = []
            for send in self._receives:
                size = self._count_elements(send)
                dtype = self._dtype
                if self._codec is not None:
                    size = self._codec.encoded_size(size)
                    dtype = torch.uint8
                receive = self._messenger.post(
                    size, dtype, send.source, across, self._groups, uploaded=True
                )
                posted.append(receive)
            for send in self._handed:
                size = self._count_elements(send)
                receive = self._messenger.post(
                    size, self._dtype, send.source, inside, uploaded=True
                )
                posted.append(receive)
            self._waiting.append(posted)

    def _flat_rows(self, x: Tensor, send: Send) -> Tensor:
        """Return the rows of one message, flattened."""
        first = send.start - self._start
        last = send.stop - self._start
        return x[first:last].view(-1)

    def _count_elements(self, send: Send) -> int:
        _, S, D = self._shape
        return (send.stop - send.start) * S * D


def _stream_group(replica: Replica, edge: int, k: int) -> tuple[list[int], str]:
    """Return the ranks of one connection, and its purpose."""
    before, after = replica.stages[edge : edge + 2]
    ranks = sorted([*before.mesh.ranks, *after.mesh.ranks])
    return ranks, f"edge {edge}, stream {k}"
