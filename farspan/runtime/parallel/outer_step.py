"""Replicas that keep optimizer state of their own and synchronize every H steps (DiLoCo, arXiv
2311.08105).

The mean of what all replicas changed, each weighted by the sequences that it reads (federated
averaging, arXiv 1602.05629), becomes the gradient of an outer Nesterov step on the parameters of
the last outer sync. With `overlap` the exchange takes place during the next H steps; what a replica
learns meanwhile is added to its result (arXiv 2501.18512, section 2.3).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from farspan.domain.problems import Refusal
from farspan.runtime.comm.host_staging import HostStaging
from farspan.runtime.comm.message_tags import MessageChannel, tag
from farspan.runtime.comm.messages import Messenger, Posted
from farspan.runtime.comm.quantize import Codec, ErrorFeedback
from farspan.runtime.comm.topology import Topology
from farspan.runtime.state.full_state import BucketManifest, FullState, Piece
from farspan.runtime.state.train_state import TrainState
from farspan.semantics.reshard import HeldRange, Send, plan_reshard

#: Bytes of a message between replicas at most; and what the workers of a site have under way to
#: those of another one, all together: a little more than 1 Gbit/s carries in a round trip of 100
#: ms. With more at once the queues of a long line overflow while TCP still looks for its rate, and
#: what is lost costs round trips.
PART = 2**20
ON_THE_LINE = 16 * 2**20


class OuterStep:
    """One worker's part of the outer syncs: `synchronize_replicas` every H steps,
    `finish_exchange` where none comes any more, `resume_exchange` after the state was restored at
    an outer sync."""

    def __init__(
        self, topology: Topology, state: TrainState, whole: FullState, staging: HostStaging
    ) -> None:
        plan = topology.plan
        assert plan.sync is not None
        self._state = state
        self._sync = plan.sync
        self._staging = staging
        # Its own: an exchange may take H steps, and the end of each step waits for what the steps
        # before have sent.
        self._messenger = Messenger()
        self._replica = topology.replica_index
        self._shares = [replica.batch / plan.train.batch for replica in plan.replicas]
        #: By bucket: parameters of the last outer sync, the outer momentum, and the masters that
        #: the exchange under way started from.
        self.synced_parameters = [master.clone() for master in state.master]
        self.momentum = [torch.zeros_like(master) for master in state.master]
        self._started_from: list[Tensor] | None = None
        self._feedback = ErrorFeedback(Codec(self._sync.bits))
        self._space = _Space(whole.manifests, topology.rank)
        self._routes = {}
        for r in range(len(self._shares)):
            if r != self._replica:
                self._routes[r] = _Route(self._space, topology, r)
        if self._sync.bits < 32 and not self._sends_same_parts():
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

    def _sends_same_parts(self) -> bool:
        """Return whether what this worker owns goes to every other replica in the same parts."""
        parts = {route.chunks for route in self._routes.values()}
        for chunks in parts:
            if sum(stop - start for start, stop in chunks) != self._space.owned:
                return False
        return len(parts) <= 1

    def synchronize_replicas(self, last: bool) -> None:
        """Synchronize the replicas after H steps. Without overlap, and at the end of the run, all
        resume from one model."""
        if self._started_from is not None:
            self._nesterov_outer_step()
        if self._sync.overlap and not last:
            self._begin_overlapped()
            return
        self._send_pseudo_gradient()
        self._nesterov_outer_step()

    def _begin_overlapped(self) -> None:
        self._started_from = [master.clone() for master in self._state.master]
        self._send_pseudo_gradient()

    @property
    def under_way(self) -> bool:
        """Whether an exchange is under way while steps are made."""
        return self._started_from is not None

    def show_synced(self) -> None:
        """Make the masters those of the last outer sync, the same in all replicas, until
        `show_own`; directly after an outer sync with an exchange under way."""
        _copy_all(self.synced_parameters, self._state.master)

    def show_own(self) -> None:
        """Make the masters this replica's own again."""
        assert self._started_from is not None
        _copy_all(self._started_from, self._state.master)

    def finish_exchange(self) -> None:
        """Take the exchange under way: no outer sync comes any more."""
        self._nesterov_outer_step()

    def close_messages(self) -> None:
        """Wait for all that this worker has sent: a worker that exits before cuts the others
        off."""
        self._messenger.close()

    def start_from_masters(self) -> None:
        """Begin from these masters, as after a first outer sync."""
        _copy_all(self._state.master, self.synced_parameters)

    @property
    def diverged(self) -> bool:
        """Whether this worker has diverged from the model of the last outer sync."""
        pairs = zip(self.synced_parameters, self._state.master, strict=True)
        return any(not torch.equal(anchor, master) for anchor, master in pairs)

    def resume_exchange(self, diverged: bool) -> None:
        """Resume from masters, anchor and momentum of an outer sync; where any worker `diverged`,
        an exchange was under way: it is sent again."""
        self._started_from = None
        if self._sync.overlap and diverged:
            self._begin_overlapped()

    def _send_pseudo_gradient(self) -> None:
        """Send what this replica changed, and post receives for what the others did."""
        number = self._count
        self._count += 1
        codec = self._feedback.codec
        for r, route in self._routes.items():
            across = tag(MessageChannel.OUTER + r, number)
            inside = tag(MessageChannel.OUTER + r, number, inside=True)
            receives = []
            for send in route.receives:
                size = codec.encoded_size(send.stop - send.start)
                parts = []
                for at in range(0, size, PART):
                    part_bytes = min(PART, size - at)
                    parts.append(self._messenger.post(part_bytes, torch.uint8, send.source, across))
                receives.append(parts)
            handed = []
            for send in route.handed:
                elements = send.stop - send.start
                handed.append(self._messenger.post(elements, torch.float32, send.source, inside))
            self._coming[r] = _Exchange(receives, handed)
        pairs = zip(self.synced_parameters, self._state.master, strict=True)
        change = torch.cat([anchor - master for anchor, master in pairs])
        self._own = own = self._staging.fetch(change)
        encoded: dict[tuple[int, int], Tensor] = {}
        for chunk in itertools.chain.from_iterable(route.chunks for route in self._routes.values()):
            if chunk not in encoded:
                content = self._space.read_range(own, *chunk)
                encoded[chunk] = self._feedback.quantize_(chunk, content)
                # Everyone adds what went over the link, this replica too.
                self._space.write_range(own, chunk[0], content)
        for r, route in self._routes.items():
            leaving = self._coming[r].leaving
            for send in route.sends:
                for part in encoded[send.start, send.stop].split(PART):
                    leaving.append((part, send.target))
            # While steps are made nobody looks after the exchange: then all leaves at once.
            limit = None
            if self._started_from is None:
                least = PART + codec.encoded_size(route.ahead)
                limit = max(least, ON_THE_LINE // route.senders)
            self._send_parts(r, limit)

    def _send_parts(self, r: int, limit: int | None) -> None:
        """Send the next parts to replica `r`, of `limit` bytes or all."""
        leaving = self._coming[r].leaving
        number = tag(MessageChannel.OUTER + self._replica, self._count - 1)
        sent = 0
        while leaving and (limit is None or sent < limit):
            part, target = leaving.popleft()
            self._messenger.send(part, target, number)
            sent += part.nbytes

    def _nesterov_outer_step(self) -> None:
        """Make the outer step on what all replicas changed, and set this replica's parameters."""
        assert self._own is not None
        changes = {self._replica: self._own}
        for r, route in self._routes.items():
            changes[r] = self._receive_pseudo_gradient(r, route)
        total = torch.zeros(self._space.size)
        for r in sorted(changes):
            total.add_(changes[r], alpha=self._shares[r])
        masters = self._state.master
        gradients = total.split(self._space.sizes)
        for b, master in enumerate(masters):
            anchor = self.synced_parameters[b]
            momentum = self.momentum[b]
            gradient = self._staging.upload(gradients[b])
            # Nesterov's momentum as torch.optim.SGD has it.
            momentum.mul_(self._sync.momentum).add_(gradient)
            step = gradient.add(momentum, alpha=self._sync.momentum)
            anchor.sub_(step, alpha=self._sync.lr)
            if self._started_from is None:
                master.copy_(anchor)
            else:
                # What this replica learned meanwhile is added.
                master.copy_(anchor + (master - self._started_from[b]))
        self._started_from = None
        self._own = None
        self.close_messages()
        self._state.publish_masters()

    def _receive_pseudo_gradient(self, r: int, route: _Route) -> Tensor:
        """Return replica `r`'s change of the parameters that this worker owns; pass it on to those
        of its site that own it too."""
        space = self._space
        change = torch.zeros(space.size)  # What fills up a bucket comes from nobody.
        exchange = self._coming[r]
        for send, parts in zip(route.receives, exchange.receives, strict=True):
            arrived = []
            for posted in parts:
                arrived.append(posted.wait())
                # The other side has room again for as much as came: both do the same.
                self._send_parts(r, PART)
            elements = send.stop - send.start
            content = self._feedback.codec.dequantize(torch.cat(arrived), elements)
            space.write_range(change, send.start, content)
        self._send_parts(r, None)
        inside = tag(MessageChannel.OUTER + r, self._count - 1, inside=True)
        for send in route.hands:
            content = space.read_range(change, send.start, send.stop)
            self._messenger.send(content, send.target, inside)
        for send, handed in zip(route.handed, exchange.handed, strict=True):
            space.write_range(change, send.start, handed.wait())
        del self._coming[r]
        return change


def _copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


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

    def own_places(self, start: int, stop: int) -> slice | Tensor:
        """Return where elements [start, stop) of it are among the worker's own."""
        first = start - self.first
        last = stop - self.first
        if self.width == self.stride:
            return slice(self.at + first, self.at + last)
        k = torch.arange(first, last)
        lines = k // self.width
        return self.at + lines * self.stride + k % self.width


class _Space:
    """All parameters one after another, as one range of elements, and what each worker owns of it.

    Tensor axes may divide a parameter unlike each other in two replicas: it is cut wherever one of
    them is, and each of these parts is a range of its own, so that a worker's elements of it follow
    one another.
    """

    def __init__(self, manifests: Sequence[BucketManifest], rank: int) -> None:
        pieces: list[Piece] = []
        for manifest in manifests:
            pieces += itertools.chain.from_iterable(manifest.pieces)
        shapes = {piece.name: piece.shape for piece in pieces}
        self._dims = {piece.name: piece.slice.dim for piece in pieces if piece.slice is not None}
        bounds: dict[str, set[int]] = {name: set() for name in shapes}
        for piece in pieces:
            bounds[piece.name].update(itertools.chain.from_iterable(self._held_ranges(piece)))
        self._bounds = {name: sorted(cuts) for name, cuts in bounds.items()}
        self._first: dict[tuple[str, int], int] = {}
        end = 0
        for name, shape in sorted(shapes.items()):
            line = math.prod(shape) // shape[self._dims.get(name, 0)]
            for low, high in pairwise(self._bounds[name]):
                self._first[name, low] = end
                end += line * (high - low)
        #: What the workers of each replica own.
        self.parts = defaultdict[int, list[HeldRange]](list)
        for r, manifest in enumerate(manifests):
            ranges = self._owned_ranges(manifest)
            parts = [HeldRange(r, part.start, part.stop) for part in ranges]
            self.parts[manifest.replica] += parts
            if r == rank:
                self._mine = ranges
        #: Elements of this worker's buckets, and those of parameters: a bucket is filled up so that
        #: all owners have as many.
        self.sizes = manifests[rank].sizes
        self.size = sum(self.sizes)
        self.owned = sum(part.stop - part.start for part in self._mine)

    def _held_ranges(self, piece: Piece) -> tuple[tuple[int, int], ...]:
        """Return the ranges of the dim that a parameter is divided along, in a worker's slice."""
        if piece.slice:
            return piece.slice.ranges
        dim = self._dims.get(piece.name, 0)
        return ((0, piece.shape[dim]),)

    def _owned_ranges(self, manifest: BucketManifest) -> list[_Range]:
        ranges = list[_Range]()
        before = 0
        for pieces, size in zip(manifest.pieces, manifest.sizes, strict=True):
            for piece in pieces:
                ranges += self._ranges_of(piece, before + piece.at - piece.start)
            before += size
        return sorted(ranges)

    def _ranges_of(self, piece: Piece, at: int) -> Iterator[_Range]:
        """Yield the ranges of one piece; its slice would begin at `at` among the worker's own."""
        dim = self._dims.get(piece.name, 0)
        inner = math.prod(piece.shape[dim + 1 :])
        lines = math.prod(piece.shape[:dim])
        stride = piece.shape[dim] * inner
        bounds = self._bounds[piece.name]
        begin = 0
        for low, high in self._held_ranges(piece):
            for a, b in pairwise(bound for bound in bounds if low <= bound <= high):
                first = self._first[piece.name, a]
                width = (b - a) * inner
                offset = begin + (a - low) * inner
                start = _elements_before(piece.start - offset, width, stride)
                stop = _elements_before(piece.stop - offset, width, stride)
                if start < stop:
                    line_stride = stride if lines > 1 else width
                    yield _Range(
                        first + start, first + stop, first, width, line_stride, at + offset
                    )
            begin += (high - low) * inner

    def owns_range(self, start: int, stop: int) -> bool:
        owned = 0
        for low, high, _ in self._overlaps(start, stop):
            owned += high - low
        return owned == stop - start

    def read_range(self, own: Tensor, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) from this worker's own."""
        parts = []
        for low, high, part in self._overlaps(start, stop):
            parts.append(own[part.own_places(low, high)])
        return torch.cat(parts)

    def write_range(self, own: Tensor, start: int, content: Tensor) -> None:
        """Write elements from `start` on where they belong among this worker's own."""
        for low, high, part in self._overlaps(start, start + len(content)):
            values = content[low - start : high - start]
            own[part.own_places(low, high)] = values

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, _Range]]:
        """Yield every part [low, high) of a range that this worker owns, and where it is."""
        for part in self._mine:
            low = max(part.start, start)
            high = min(part.stop, stop)
            if high > low:
                yield low, high, part


def _elements_before(end: int, width: int, stride: int) -> int:
    """Count the elements before `end` of lines of `width` that lie `stride` apart."""
    lines, rest = divmod(max(0, end), stride)
    return lines * width + min(rest, width)


class _Route:
    """What one worker sends to, and receives from, another replica."""

    def __init__(self, space: _Space, topology: Topology, other: int) -> None:
        rank = topology.rank
        mine = space.parts[topology.replica_index]
        theirs = space.parts[other]
        out, _ = plan_reshard(mine, theirs, topology.site)
        into, spread = plan_reshard(theirs, mine, topology.site)
        # In the order of elements: what `_most_ahead` counts holds for that alone.
        by_start = operator.attrgetter("start")
        self.sends = sorted((send for send in out if send.source == rank), key=by_start)
        self.receives = sorted((send for send in into if send.target == rank), key=by_start)
        #: Workers of this replica that send to the other one.
        self.senders = max(1, len({send.source for send in out}))
        self.ahead = _most_ahead(self.sends, self.receives)
        self.handed = [send for send in spread if send.target == rank]
        self.hands = [send for send in spread if send.source == rank]
        #: The ranges that are rounded together, of those that this worker owns.
        ranges = dict.fromkeys((send.start, send.stop) for send in out)
        self.chunks = tuple(chunk for chunk in ranges if space.owns_range(*chunk))


def _most_ahead(sends: Sequence[Send], receives: Sequence[Send]) -> int:
    """Return the most elements, over all places in their order, that a worker sends before a place
    and has not received before it. A worker that may have more than these under way can always send
    the first element that someone still waits for: whoever waits for it has all before it, so this
    worker has what comes to it from before, too."""
    changes = Counter[int]()
    for sign, ranges in ((1, sends), (-1, receives)):
        for send in ranges:
            changes[send.start] += sign
            changes[send.stop] -= sign
    most = 0
    ahead = 0
    slope = 0
    before = 0
    for place in sorted(changes):
        ahead += slope * (place - before)
        before = place
        slope += changes[place]
        most = max(most, ahead)
    return most
