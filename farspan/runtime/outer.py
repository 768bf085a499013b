"""Replicas that keep optimizer state of their own and meet now and then (DiLoCo, arXiv 2311.08105).

Every H steps the mean of what all replicas changed becomes the gradient of an outer Nesterov step on the parameters of
the last meeting. With `overlap` the exchange goes on during the next H steps; what a replica learns meanwhile is added
to its result (arXiv 2501.18512, section 2.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from farspan.domain.layout import Part, Send, transfer
from farspan.domain.problems import Refusal
from farspan.runtime.compress import Codec, ErrorFeedback
from farspan.runtime.place import Place
from farspan.runtime.state import TrainState
from farspan.runtime.whole import Manifest, Whole
from farspan.runtime.wire import Posted, Wire, tag

#: Channels of messages (`wire.tag`): one for each replica that sends, and what is handed on inside a site.
OUTER, HANDED = 32, 512


class Outer:
    """One worker's part of the meetings: `meet` every H steps, `resume` after the state was restored at a meeting."""

    def __init__(self, place: Place, state: TrainState, whole: Whole, wire: Wire) -> None:
        assert place.plan.sync is not None
        self._state, self._wire, self._sync = state, wire, place.plan.sync
        self._replica, self._replicas = place.replica_index, len(place.plan.replicas)
        #: By bucket: parameters of the last meeting, the outer momentum, and what the exchange under way left from.
        self.anchor = [master.clone() for master in state.master]
        self.momentum = [torch.zeros_like(master) for master in state.master]
        self._left: list[Tensor] | None = None
        self._feedback = ErrorFeedback(Codec(self._sync.bits))
        self._space = _Space(whole.manifests, place.rank)
        self._routes = {r: _Route(self._space, place, r) for r in range(self._replicas) if r != self._replica}
        if self._sync.bits < 32 and not self._alike():
            raise Refusal(
                "cannot-plan", what=f"replicas of unlike shape cannot meet in {self._sync.bits} bits",
                where="plan.json",
                fact="every replica must round the same numbers together", remedy="set the plan's sync.bits to 32",
            )  # fmt: skip
        self._count = 0
        self._coming: dict[int, list[tuple[Send, Posted]]] = {}
        self._own: Tensor | None = None

    def _alike(self) -> bool:
        """Whether what this worker owns goes to every other replica in the same parts."""
        parts = {route.chunks for route in self._routes.values()}
        return len(parts) == 1 and sum(stop - start for start, stop in next(iter(parts))) == self._space.size

    def meet(self, last: bool) -> None:
        """The replicas have made H steps. Without overlap, and at the end of the run, all go on from one model."""
        if self._left is not None:
            self._take()
        if self._sync.overlap and not last:
            self._left = [master.clone() for master in self._state.master]
            self._send()
            return
        self._send()
        self._take()

    def start(self) -> None:
        """The masters are those of a meeting, the first."""
        for anchor, master in zip(self.anchor, self._state.master, strict=True):
            anchor.copy_(master)

    def resume(self) -> None:
        """The masters, the anchor and the momentum are those of a meeting: what was under way then is sent again."""
        self._left = None
        if self._sync.overlap and any(
            not torch.equal(*pair) for pair in zip(self.anchor, self._state.master, strict=True)
        ):
            self._left = [master.clone() for master in self._state.master]
            self._send()

    def _send(self) -> None:
        """Send what this replica changed, and post receives for what the others did."""
        number, self._count = self._count, self._count + 1
        for r, route in self._routes.items():
            self._coming[r] = [
                (one, self._wire.post(self._feedback.codec.encoded_size(one.stop - one.start), torch.uint8, one.source,
                                      tag(OUTER + r, number))) for one in route.receives
            ] + [
                (one, self._wire.post(one.stop - one.start, torch.float32, one.source, tag(OUTER + HANDED + r, number)))
                for one in route.handed
            ]  # fmt: skip
        pairs = zip(self.anchor, self._state.master, strict=True)
        self._own = own = torch.cat([anchor - master for anchor, master in pairs]).cpu()
        encoded: dict[tuple[int, int], Tensor] = {}
        for start, stop in {chunk: None for route in self._routes.values() for chunk in route.chunks}:
            encoded[start, stop] = self._feedback.encode((start, stop), self._space.read(own, start, stop))
            # Everyone adds what went over the line, this replica too.
            self._space.put(own, start, self._feedback.codec.decode(encoded[start, stop], stop - start))
        for route in self._routes.values():
            for one in route.sends:
                self._wire.send(encoded[one.start, one.stop], one.target, tag(OUTER + self._replica, number))

    def _take(self) -> None:
        """The outer step on what all replicas changed, and this replica's parameters after it."""
        assert self._own is not None
        changes = {self._replica: self._own} | {r: self._received(r, route) for r, route in self._routes.items()}
        total = torch.zeros(self._space.size)
        for r in sorted(changes):
            total += changes[r]
        gradients = self._space.by_bucket(total / self._replicas, self._state.master)
        left = self._left or self._state.master
        for master, anchor, momentum, gradient, before in zip(
            self._state.master, self.anchor, self.momentum, gradients, left, strict=True
        ):
            # Nesterov's momentum as torch.optim.SGD has it.
            momentum.mul_(self._sync.momentum).add_(gradient)
            anchor.sub_(gradient.add(momentum, alpha=self._sync.momentum), alpha=self._sync.lr)
            master.copy_(anchor if self._left is None else anchor + (master - before))
        self._left = self._own = None
        self._state.publish()

    def _received(self, r: int, route: _Route) -> Tensor:
        """What replica `r` changed, of what this worker owns; handed on to those of its site that own it too."""
        found = torch.empty(self._space.size)
        coming = self._coming.pop(r)
        for one, posted in coming[: len(route.receives)]:
            self._space.put(found, one.start, self._feedback.codec.decode(posted.wait(), one.stop - one.start))
        for one in route.hands:
            content = self._space.read(found, one.start, one.stop)
            self._wire.send(content, one.target, tag(OUTER + HANDED + r, self._count - 1))
        for one, posted in coming[len(route.receives) :]:
            self._space.put(found, one.start, posted.wait())
        return found


class _Range(NamedTuple):
    """Elements [start, stop) of all parameters together that a worker owns, and where they begin among its own."""

    start: int
    stop: int
    at: int


class _Space:
    """All parameters one after another, as one range of elements, and what each worker owns of it."""

    def __init__(self, manifests: Sequence[Manifest], rank: int) -> None:
        sizes = {(p.name, p.slice): math.prod(p.shape) for m in manifests for pieces in m.pieces for p in pieces}
        self._offsets: dict[object, int] = {}
        end = 0
        for key in sorted(sizes, key=repr):
            self._offsets[key], end = end, end + sizes[key]
        self.parts = [[Part(r, one.start, one.stop) for one in self._ranges(m)] for r, m in enumerate(manifests)]
        self.replicas = [m.replica for m in manifests]
        self._mine, self._lengths = self._ranges(manifests[rank]), manifests[rank].sizes
        self.size = sum(self._lengths)

    def _ranges(self, manifest: Manifest) -> list[_Range]:
        found, before = [], 0
        for pieces, size in zip(manifest.pieces, manifest.sizes, strict=True):
            for piece in pieces:
                start = self._offsets[piece.name, piece.slice] + piece.start
                found.append(_Range(start, start + piece.stop - piece.start, before + piece.at))
            before += size
        return sorted(found)

    def of(self, replica: int) -> list[Part]:
        """What the workers of a replica own."""
        return [part for r, parts in zip(self.replicas, self.parts, strict=True) if r == replica for part in parts]

    def owns(self, start: int, stop: int) -> bool:
        return sum(max(0, min(one.stop, stop) - max(one.start, start)) for one in self._mine) == stop - start

    def read(self, own: Tensor, start: int, stop: int) -> Tensor:
        """Elements [start, stop) from this worker's own."""
        return torch.cat([own[at : at + n] for _, at, n in self._overlaps(start, stop)])

    def put(self, own: Tensor, start: int, content: Tensor) -> None:
        """Write elements from `start` on where they belong among this worker's own."""
        for offset, at, n in self._overlaps(start, start + len(content)):
            own[at : at + n] = content[offset : offset + n]

    def by_bucket(self, own: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        return [part.to(flat.device) for part, flat in zip(own.split(self._lengths), like, strict=True)]

    def _overlaps(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(offset in [start, stop), place among this worker's own, elements) of what it owns of a range."""
        found = []
        for one in self._mine:
            low, high = max(one.start, start), min(one.stop, stop)
            if high > low:
                found.append((low - start, one.at + low - one.start, high - low))
        return found


class _Route:
    """What one worker sends to, and receives from, another replica."""

    def __init__(self, space: _Space, place: Place, other: int) -> None:
        mine, theirs = space.of(place.replica_index), space.of(other)
        out, _ = transfer(mine, theirs, place.site)
        into, spread = transfer(theirs, mine, place.site)
        self.sends = [one for one in out if one.source == place.rank]
        self.receives = [one for one in into if one.target == place.rank]
        self.handed = [one for one in spread if one.target == place.rank]
        self.hands = [one for one in spread if one.source == place.rank]
        #: The ranges that are rounded together, of those that this worker owns.
        self.chunks = tuple(dict.fromkeys((one.start, one.stop) for one in out if space.owns(one.start, one.stop)))
