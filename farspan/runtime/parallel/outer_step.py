"""Replicas that keep optimizer state of their own and meet now and then (DiLoCo, arXiv 2311.08105).

Every H steps the mean of what all replicas changed, each weighted by the sequences that it reads
(federated averaging, arXiv 1602.05629), becomes the gradient of an outer Nesterov step on the
parameters of the last meeting. With `overlap` the exchange goes on during the next H steps; what a
replica learns meanwhile is added to its result (arXiv 2501.18512, section 2.3).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from farspan.domain.problems import Refusal
from farspan.runtime.comm.channels import Channel, tag
from farspan.runtime.comm.compress import Codec, ErrorFeedback
from farspan.runtime.comm.messages import Messenger, Posted
from farspan.runtime.comm.topology import Topology
from farspan.runtime.state.full_state import BucketManifest, FullState, Piece
from farspan.runtime.state.train_state import TrainState
from farspan.semantics.layout import HeldRange, Send, transfer

#: Bytes of a message between replicas at most; and what the workers of a site have under way to
#: those of another one, all together: a little more than 1 Gbit/s carries in a round trip of 100
#: ms. With more at once the queues of a long line overflow while TCP still looks for its rate, and
#: what is lost costs round trips.
PART = 2**20
ON_THE_LINE = 16 * 2**20


class OuterStep:
    """One worker's part of the meetings: `meet` every H steps, `finish` where none comes any more,
    `resume` after the state was restored at a meeting."""

    def __init__(self, topology: Topology, state: TrainState, whole: FullState) -> None:
        assert topology.plan.sync is not None
        self._state = state
        self._sync = topology.plan.sync
        # Its own: an exchange may take H steps, and the end of each step waits for what the steps
        # before have sent.
        self._messenger = Messenger()
        self._replica = topology.replica_index
        self._shares = [
            replica.batch / topology.plan.train.batch for replica in topology.plan.replicas
        ]
        #: By bucket: parameters of the last meeting, the outer momentum, and what the exchange
        #: under way left from.
        self.anchor = [master.clone() for master in state.master]
        self.momentum = [torch.zeros_like(master) for master in state.master]
        self._left: list[Tensor] | None = None
        self._feedback = ErrorFeedback(Codec(self._sync.bits))
        self._space = _Space(whole.manifests, topology.rank)
        self._routes = {
            r: _Route(self._space, topology, r)
            for r in range(len(self._shares))
            if r != self._replica
        }
        if self._sync.bits < 32 and not self._alike():
            raise Refusal(
                "cannot-plan",
                what=f"replicas of unlike shape cannot meet in {self._sync.bits} bits",
                where="plan.json",
                fact="every replica must round the same numbers together",
                remedy="set the plan's sync.bits to 32",
            )
        self._count = 0
        self._coming: dict[int, _Exchange] = {}
        self._own: Tensor | None = None

    def _alike(self) -> bool:
        """Whether what this worker owns goes to every other replica in the same parts."""
        parts = {route.chunks for route in self._routes.values()}
        whole = all(
            sum(stop - start for start, stop in chunks) == self._space.owned for chunks in parts
        )
        return whole and len(parts) <= 1

    def meet(self, last: bool) -> None:
        """The replicas have made H steps. Without overlap, and at the end of the run, all go on
        from one model."""
        if self._left is not None:
            self._take()
        if self._sync.overlap and not last:
            self._left = [master.clone() for master in self._state.master]
            self._send()
            return
        self._send()
        self._take()

    @property
    def under_way(self) -> bool:
        """Whether an exchange goes on while steps are made."""
        return self._left is not None

    def show_met(self) -> None:
        """The masters become those of the last meeting, the same in all replicas, until `show_own`;
        directly after a meeting that an exchange goes on from."""
        self._become(self.anchor)

    def show_own(self) -> None:
        """The masters are again this replica's own."""
        assert self._left is not None
        self._become(self._left)

    def _become(self, values: Sequence[Tensor]) -> None:
        for master, value in zip(self._state.master, values, strict=True):
            master.copy_(value)

    def finish(self) -> None:
        """No meeting comes any more: take the exchange under way."""
        self._take()

    def close(self) -> None:
        """Wait for all that this worker has sent: who parts from the others before would cut it
        off."""
        self._messenger.close()

    def start(self) -> None:
        """The masters are those of a meeting, the first."""
        for anchor, master in zip(self.anchor, self._state.master, strict=True):
            anchor.copy_(master)

    @property
    def apart(self) -> bool:
        """Whether this worker has left the model of the last meeting."""
        return any(
            not torch.equal(*pair) for pair in zip(self.anchor, self._state.master, strict=True)
        )

    def resume(self, apart: bool) -> None:
        """The masters, the anchor and the momentum are those of a meeting; where any worker was
        `apart`, an exchange was under way: it is sent again."""
        self._left = None
        if self._sync.overlap and apart:
            self._left = [master.clone() for master in self._state.master]
            self._send()

    def _send(self) -> None:
        """Send what this replica changed, and post receives for what the others did."""
        number = self._count
        self._count = self._count + 1
        for r, route in self._routes.items():
            self._coming[r] = _Exchange(
                [self._post(send, r, number) for send in route.receives],
                [
                    self._messenger.post(
                        send.stop - send.start,
                        torch.float32,
                        send.source,
                        tag(Channel.OUTER + r, number, inside=True),
                    )
                    for send in route.handed
                ],
            )
        pairs = zip(self.anchor, self._state.master, strict=True)
        self._own = own = torch.cat([anchor - master for anchor, master in pairs]).cpu()
        encoded: dict[tuple[int, int], Tensor] = {}
        for start, stop in {
            chunk: None for route in self._routes.values() for chunk in route.chunks
        }:
            content = self._space.read(own, start, stop)
            encoded[start, stop] = self._feedback.encode_((start, stop), content)
            # Everyone adds what went over the line, this replica too.
            self._space.put(own, start, content)
        for r, route in self._routes.items():
            self._coming[r].leaving = deque(
                (part, send.target)
                for send in route.sends
                for part in encoded[send.start, send.stop].split(PART)
            )
            # While steps go on nobody looks after the exchange: then all leaves at once.
            least = PART + self._feedback.codec.encoded_size(route.ahead)
            self._leave(r, max(least, ON_THE_LINE // route.senders) if self._left is None else None)

    def _post(self, send: Send, r: int, number: int) -> list[Posted]:
        """Receives for the parts of one range of replica `r`."""
        size = self._feedback.codec.encoded_size(send.stop - send.start)
        sizes = (min(PART, size - at) for at in range(0, size, PART))
        return [
            self._messenger.post(part, torch.uint8, send.source, tag(Channel.OUTER + r, number))
            for part in sizes
        ]

    def _leave(self, r: int, limit: int | None) -> None:
        """Send the next parts to replica `r`, of so many bytes or all."""
        leaving = self._coming[r].leaving
        sent = 0
        while leaving and (limit is None or sent < limit):
            part, target = leaving.popleft()
            self._messenger.send(part, target, tag(Channel.OUTER + self._replica, self._count - 1))
            sent += part.nbytes

    def _take(self) -> None:
        """The outer step on what all replicas changed, and this replica's parameters after it."""
        assert self._own is not None
        changes = {self._replica: self._own} | {
            r: self._received(r, route) for r, route in self._routes.items()
        }
        total = torch.zeros(self._space.size)
        for r in sorted(changes):
            total.add_(changes[r], alpha=self._shares[r])
        gradients = self._space.by_bucket(total, self._state.master)
        left = self._left or self._state.master
        for master, anchor, momentum, gradient, before in zip(
            self._state.master, self.anchor, self.momentum, gradients, left, strict=True
        ):
            # Nesterov's momentum as torch.optim.SGD has it.
            momentum.mul_(self._sync.momentum).add_(gradient)
            anchor.sub_(gradient.add(momentum, alpha=self._sync.momentum), alpha=self._sync.lr)
            master.copy_(anchor if self._left is None else anchor + (master - before))
        self._left = self._own = None
        self.close()
        self._state.publish()

    def _received(self, r: int, route: _Route) -> Tensor:
        """What replica `r` changed, of what this worker owns; handed on to those of its site that
        own it too."""
        change = torch.zeros(self._space.size)  # What fills up a bucket comes from nobody.
        for send, parts in zip(route.receives, self._coming[r].receives, strict=True):
            came = []
            for posted in parts:
                came.append(posted.wait())
                # The other side has room again for as much as came: both do the same.
                self._leave(r, PART)
            self._space.put(
                change,
                send.start,
                self._feedback.codec.decode(torch.cat(came), send.stop - send.start),
            )
        self._leave(r, None)
        for send in route.hands:
            content = self._space.read(change, send.start, send.stop)
            self._messenger.send(
                content, send.target, tag(Channel.OUTER + r, self._count - 1, inside=True)
            )
        for send, handed in zip(route.handed, self._coming.pop(r).handed, strict=True):
            self._space.put(change, send.start, handed.wait())
        return change


class _Exchange:
    """What comes from another replica, range by range and in parts, and the parts that are still to
    leave."""

    def __init__(self, receives: list[list[Posted]], handed: list[Posted]) -> None:
        self.receives = receives
        self.handed = handed
        self.leaving: deque[tuple[Tensor, int]] = deque()


class _Range(NamedTuple):
    """Elements [start, stop) of all parameters together that a worker owns. They are of a part that
    begins at `first` and consists of lines of `width`; these lie `stride` apart among the worker's
    own, the first of them at `at`."""

    start: int
    stop: int
    first: int
    width: int
    stride: int
    at: int

    def places(self, start: int, stop: int) -> slice | Tensor:
        """Where elements [start, stop) of it are among the worker's own."""
        if self.width == self.stride:
            return slice(self.at + start - self.first, self.at + stop - self.first)
        k = torch.arange(start - self.first, stop - self.first)
        return self.at + k // self.width * self.stride + k % self.width


class _Space:
    """All parameters one after another, as one range of elements, and what each worker owns of it.

    Tensor axes may divide a parameter unlike each other in two replicas: it is cut wherever one of
    them is, and each of these parts is a range of its own, so that a worker's elements of it follow
    one another.
    """

    def __init__(self, manifests: Sequence[BucketManifest], rank: int) -> None:
        pieces = [piece for manifest in manifests for bucket in manifest.pieces for piece in bucket]
        shapes = {piece.name: piece.shape for piece in pieces}
        self._dims = {piece.name: piece.slice.dim for piece in pieces if piece.slice is not None}
        bounds: dict[str, set[int]] = {name: set() for name in shapes}
        for piece in pieces:
            bounds[piece.name].update(bound for part in self._held(piece) for bound in part)
        self._bounds = {name: sorted(cuts) for name, cuts in bounds.items()}
        self._first: dict[tuple[str, int], int] = {}
        end = 0
        for name, shape in sorted(shapes.items()):
            for low, high in pairwise(self._bounds[name]):
                self._first[name, low] = end
                end += math.prod(shape) // shape[self._dims.get(name, 0)] * (high - low)
        self.parts = [
            [HeldRange(r, part.start, part.stop) for part in self._ranges(m)]
            for r, m in enumerate(manifests)
        ]
        self.replicas = [m.replica for m in manifests]
        self._mine = self._ranges(manifests[rank])
        self._lengths = manifests[rank].sizes
        #: Elements of this worker's buckets, and those of parameters: a bucket is filled up so that
        #: all owners have as many.
        self.size, self.owned = (
            sum(self._lengths),
            sum(part.stop - part.start for part in self._mine),
        )

    def _held(self, piece: Piece) -> tuple[tuple[int, int], ...]:
        """The ranges of the dim that a parameter is divided along, of which a worker has the
        slice."""
        return (
            piece.slice.ranges
            if piece.slice
            else ((0, piece.shape[self._dims.get(piece.name, 0)]),)
        )

    def _ranges(self, manifest: BucketManifest) -> list[_Range]:
        ranges = list[_Range]()
        before = 0
        for pieces, size in zip(manifest.pieces, manifest.sizes, strict=True):
            for piece in pieces:
                ranges += self._of(piece, before + piece.at - piece.start)
            before += size
        return sorted(ranges)

    def _of(self, piece: Piece, at: int) -> Iterator[_Range]:
        """The ranges of one piece, of which the slice would begin at `at` among the worker's
        own."""
        dim = self._dims.get(piece.name, 0)
        inner = math.prod(piece.shape[dim + 1 :])
        lines = math.prod(piece.shape[:dim])
        stride = piece.shape[dim] * inner
        begin = 0
        for low, high in self._held(piece):
            for a, b in pairwise(
                bound for bound in self._bounds[piece.name] if low <= bound <= high
            ):
                first = self._first[piece.name, a]
                width = (b - a) * inner
                offset = begin + (a - low) * inner
                start, stop = (
                    _counted(edge - offset, width, stride) for edge in (piece.start, piece.stop)
                )
                if start < stop:
                    yield _Range(
                        first + start,
                        first + stop,
                        first,
                        width,
                        stride if lines > 1 else width,
                        at + offset,
                    )
            begin += (high - low) * inner

    def of(self, replica: int) -> list[HeldRange]:
        """What the workers of a replica own."""
        return [
            part
            for r, parts in zip(self.replicas, self.parts, strict=True)
            if r == replica
            for part in parts
        ]

    def owns(self, start: int, stop: int) -> bool:
        return (
            sum(max(0, min(part.stop, stop) - max(part.start, start)) for part in self._mine)
            == stop - start
        )

    def read(self, own: Tensor, start: int, stop: int) -> Tensor:
        """Elements [start, stop) from this worker's own."""
        return torch.cat([own[places] for _, places in self._overlaps(start, stop)])

    def put(self, own: Tensor, start: int, content: Tensor) -> None:
        """Write elements from `start` on where they belong among this worker's own."""
        for part, places in self._overlaps(start, start + len(content)):
            own[places] = content[part]

    def by_bucket(self, own: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        return [
            part.to(flat.device) for part, flat in zip(own.split(self._lengths), like, strict=True)
        ]

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[slice, slice | Tensor]]:
        """Every part of a range that this worker owns, and its places among the worker's own."""
        for part in self._mine:
            low = max(part.start, start)
            high = min(part.stop, stop)
            if high > low:
                yield slice(low - start, high - start), part.places(low, high)


def _counted(end: int, width: int, stride: int) -> int:
    """Elements before `end` of lines of `width` that lie `stride` apart."""
    lines, rest = divmod(max(0, end), stride)
    return lines * width + min(rest, width)


class _Route:
    """What one worker sends to, and receives from, another replica."""

    def __init__(self, space: _Space, topology: Topology, other: int) -> None:
        mine = space.of(topology.replica_index)
        theirs = space.of(other)
        out, _ = transfer(mine, theirs, topology.site)
        into, spread = transfer(theirs, mine, topology.site)
        # In the order of elements: what `_ahead` says holds for that alone.
        self.sends = sorted(
            (send for send in out if send.source == topology.rank), key=lambda send: send.start
        )
        #: Workers of this replica that send to the other one.
        self.senders = max(1, len({send.source for send in out}))
        self.receives = sorted(
            (send for send in into if send.target == topology.rank), key=lambda send: send.start
        )
        self.ahead = _ahead(self.sends, self.receives)
        self.handed = [send for send in spread if send.target == topology.rank]
        self.hands = [send for send in spread if send.source == topology.rank]
        #: The ranges that are rounded together, of those that this worker owns.
        self.chunks = tuple(
            dict.fromkeys(
                (send.start, send.stop) for send in out if space.owns(send.start, send.stop)
            )
        )


def _ahead(sends: Sequence[Send], receives: Sequence[Send]) -> int:
    """The most elements, over all places in their order, that a worker sends before a place and has
    not received before it. A worker that may have more than these under way can always send the
    first element that someone still waits for: whoever waits for it has all before it, so this
    worker has what comes to it from before, too."""
    changes: dict[int, int] = {}
    for sign, ranges in ((1, sends), (-1, receives)):
        for send in ranges:
            changes[send.start] = changes.get(send.start, 0) + sign
            changes[send.stop] = changes.get(send.stop, 0) - sign
    most = now = slope = before = 0
    for place in sorted(changes):
        now = now + slope * (place - before)
        before = place
        slope += changes[place]
        most = max(most, now)
    return most
