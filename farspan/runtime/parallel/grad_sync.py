"""Summing gradients over the batch axes, bucket by bucket, while the backward pass is still
running.

Each bucket goes through the same phases: over the tensor axis (where its gradients are summands
there), inside the site or over all, between sites, and back inside the site. A phase of a bucket
begins after the same phase of the bucket before it, so that every worker starts its collectives in
one order. Phases advance whenever a gradient arrives.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from farspan.runtime.comm import tcp
from farspan.runtime.comm.channels import Channel, tag
from farspan.runtime.comm.collective import NCCL
from farspan.runtime.comm.compress import WHOLE, Codec, ErrorFeedback
from farspan.runtime.comm.messages import Messenger, Posted, Sent
from farspan.runtime.comm.topology import ProcessGroups, Topology
from farspan.runtime.state.train_state import TrainState
from farspan.runtime.state.zero_buckets import Bucket

#: Between two looks at what has arrived: longer while nothing comes, as looking takes from what
#: others compute with.
SHORTEST_S = 5e-5
LONGEST_S = 1e-3
#: Bytes of whole gradients under way where each worker keeps only its part of them, beside the
#: newest: beyond that backward passes wait.
UNDER_WAY = 64 * 2**20
Waits = Sequence["dist.Work | Future[Tensor] | Future[None]"]
Phases = Generator[Waits]


class GradReducer:
    """The sums of one worker's gradients. `arm(last)` before every backward pass; `finish()` at the
    end of the step.

    `passed` is called with a bucket's number when a backward pass has written all of it, `done`
    when it is summed.
    """

    def __init__(
        self, topology: Topology, state: TrainState, groups: ProcessGroups, messenger: Messenger
    ) -> None:
        self._topology = topology
        self._state = state
        self._messenger = messenger
        self._sync = topology.stage.grad_sync
        self._data = topology.group("data")
        self._batch = topology.peers
        self._sites = [tuple(ranks) for ranks in topology.sites(self._batch).values()]
        self._home = next(ranks for ranks in self._sites if topology.rank in ranks)
        self._by_site = self._sync.topology == "hierarchical" and len(self._sites) > 1
        self._connect(groups)
        self._feedback = ErrorFeedback(Codec(self._sync.bits))
        #: Whether the coming step sends in 32 bits, with all that rounding has left of the steps
        #: before.
        self.settles = False
        # Gloo does not say whether a message has come but to who waits for it; those of a phase
        # come in order.
        self._waiters = {
            channel: ThreadPoolExecutor(1) for channel in (Channel.SCATTER, Channel.ACROSS)
        }
        self._missing: list[int] = []
        self._last = True
        self._rounds = itertools.count()
        self._round = 0
        #: By bucket and sender: receives of sums over sites, posted before the backward pass.
        self._coming: dict[int, dict[int, Posted]] = {}
        self._active: list[_Running] = []
        self.passed: Callable[[int], None] = lambda bucket: None
        self.done: Callable[[int], None] = lambda bucket: None
        state.on_grad = self._arrived

    def _connect(self, groups: ProcessGroups) -> None:
        """Only the groups that the plan needs: over a long line each takes seconds to make."""
        buckets = self._state.buckets
        topology = self._topology
        whole = any(bucket.ways == 1 for bucket in buckets)

        def group(needed: bool, ranks: Sequence[int], purpose: str) -> dist.ProcessGroup | None:
            return groups.of(ranks, purpose) if needed else None

        self._tensor = group(
            any(bucket.partial for bucket in buckets), topology.group("tensor"), "partial"
        )
        # Made on all ranks of the stage or on none, as all who share a group must have made as many
        # before it.
        nccl = any(topology.backend(ranks) == NCCL for ranks in topology.mesh.groups("data"))
        scatter = group(topology.zero > 0 and nccl, self._data, "scatter")
        self._scatter = scatter if topology.backend(self._data) == NCCL else None
        self._all = group(whole and not self._by_site and self._sync.bits == 32, self._batch, "sum")
        self._inside = group(whole and self._by_site, self._home, "inside")
        self._back = group(whole and self._by_site, self._home, "back")
        if self._sync.wan_rate is not None and len(self._sites) > 1:
            tcp.pace(self._sync.wan_rate)

    @property
    def _codec(self) -> Codec:
        return WHOLE if self.settles else self._feedback.codec

    def forget(self) -> None:
        """Drop what rounding left of gradients: it is not to be added to the next ones."""
        self._feedback.residuals.clear()

    def arm(self, last: bool) -> None:
        """The next backward pass is coming; the step's last one if `last`."""
        divided = self._state.division.zero >= 2
        if not last and not divided:
            self._missing = []
            return
        self._last, self._round = last, next(self._rounds)
        if last:
            self._post()
        self._missing = [
            len(bucket.members) if last or bucket.ways > 1 else -1 for bucket in self._state.buckets
        ]

    def _post(self) -> None:
        """Post all receives of the round's sums over sites: what the others send then travels at
        once."""
        for b, bucket in enumerate(self._state.buckets):
            size = self._codec.encoded_size(bucket.own.stop - bucket.own.start)
            self._coming[b] = {
                rank: self._messenger.post(size, torch.uint8, rank, self._number(b))
                for rank in self._others(bucket, b)
            }

    def _others(self, bucket: Bucket, b: int) -> list[int]:
        """Who sums a bucket over sites with this worker, straight: nobody where another worker of
        its site does."""
        if bucket.ways > 1:
            ranks: Sequence[int] = self._topology.group("site")
        elif self._by_site:
            ranks = [ranks[b % len(ranks)] for ranks in self._sites]
        else:
            ranks = self._batch if self._sync.bits < 32 else ()
        return (
            [rank for rank in ranks if rank != self._topology.rank]
            if self._topology.rank in ranks
            else []
        )

    def _number(self, b: int) -> int:
        return tag(Channel.ACROSS, self._round * len(self._state.buckets) + b)

    def _arrived(self, index: int) -> None:
        if self._missing:
            bucket = self._state.home[index][0]
            self._missing[bucket] -= 1
            if self._missing[bucket] == 0:
                self.passed(bucket)
                self._active.append(_Running(bucket, self._phases(bucket, self._last, self._round)))
        self.progress()
        if self._state.division.zero >= 2:
            self._wait(
                lambda: (
                    4 * sum(self._state.buckets[sync.bucket].size for sync in self._active[:-1])
                    > UNDER_WAY
                )
            )

    def progress(self) -> bool:
        """Let every bucket go as far as what it waits for has come; whether any went on."""
        before: _Running | None = None
        went = False
        for running in self._active:
            while not running.ended and (
                before is None or before.ended or running.phase < before.phase
            ):
                if not running.ready():
                    break
                running.advance()
                went = True
                if running.ended:
                    self.done(running.bucket)
            before = running
        while self._active and self._active[0].ended:
            self._active.pop(0)
        return went

    def finish(self) -> None:
        """Wait until the sums of all buckets are complete."""
        if any(count > 0 for count in self._missing):
            raise RuntimeError("a parameter got no gradient: its bucket was never sent")
        self._wait(lambda: bool(self._active))
        self._missing = []

    def _wait(self, needed: Callable[[], bool]) -> None:
        """Look after what is under way as long as it is needed."""
        pause = SHORTEST_S
        while needed():
            if self.progress():
                pause = SHORTEST_S
            else:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_S)

    # -- the phases of one bucket: each yields what the next one waits for
    #   ---------------------------------------------

    def _phases(self, b: int, last: bool, count: int) -> Phases:
        state = self._state
        bucket = self._state.buckets[b]
        full = state.collected[b]
        assert full is not None
        if bucket.ways > 1 and state.division.zero >= 2:
            state.collected[b] = None  # The next microbatch begins a gradient of its own.
        yield [_all_reduce(full, self._tensor)] if bucket.partial and self._tensor else []
        if bucket.ways > 1:
            whole = [full]
            del full
            yield from self._divided(b, whole, last, count)
        elif self._by_site:
            yield from self._hierarchical(b, full)
        elif self._sync.bits < 32:
            yield []
            yield from self._across(b, full)
            yield []
        else:
            yield [_all_reduce(full, self._all)] if self._all else []
            yield []
            yield []

    def _divided(self, b: int, whole: list[Tensor], last: bool, count: int) -> Phases:
        """This worker's part of the sum over the data axis, added to earlier microbatches'; then
        over sites. `whole` is left empty: its memory goes when it is no longer needed."""
        state = self._state
        own = self._state.buckets[b].own
        if self._scatter is not None:
            part = torch.empty(own.stop - own.start, device=state.device)
            yield [
                _work(
                    dist.reduce_scatter_tensor(part, whole[0], group=self._scatter, async_op=True)
                )
            ]
            whole.clear()
        else:
            part = yield from self._scattered(b, whole.pop(), count)
        if state.division.zero >= 2:
            state.grad[b].add_(part)
        else:
            state.grad[b].copy_(part)
        yield from self._across(b, state.grad[b]) if last else ([],)
        yield []

    def _scattered(self, b: int, full: Tensor, count: int) -> Generator[Waits, None, Tensor]:
        """A sum of parts sent straight to their owner, in the order of ranks: gloo's own scatters
        the sum of all."""
        size = full.numel() // len(self._data)
        number = tag(Channel.SCATTER, count * len(self._state.buckets) + b)
        posted: dict[int, Posted] = {}
        leaving: list[Sent] = []
        for k, rank in enumerate(self._data):
            if rank != self._topology.rank:
                posted[k] = self._messenger.post(size, full.dtype, rank, number)
                leaving += self._messenger.send(full[k * size : (k + 1) * size], rank, number)
        # Neither may it change nor does it stay in memory: it is waited for until it has left, too.
        yield [
            self._waiters[Channel.SCATTER].submit(message.wait)
            for message in (*posted.values(), *leaving)
        ]
        mine = self._data.index(self._topology.rank)
        parts = [
            full[k * size : (k + 1) * size] if k == mine else posted[k].buffer
            for k in range(len(self._data))
        ]
        total = parts[0].to(full.device, copy=True)
        for part in parts[1:]:
            total += part.to(full.device)
        return total

    def _hierarchical(self, b: int, full: Tensor) -> Phases:
        """Summed by one worker of each site, another one for each bucket; between these; and spread
        inside the site."""
        leader = self._home[b % len(self._home)]
        yield (
            [_work(dist.reduce(full, leader, group=self._inside, async_op=True))]
            if self._inside
            else []
        )
        yield from self._across(b, full)
        yield (
            [_work(dist.broadcast(full, leader, group=self._back, async_op=True))]
            if self._back
            else []
        )

    def _across(self, b: int, full: Tensor) -> Phases:
        """Sum `full` with the same of the others, straight, each byte over the line once a pair.
        Everyone adds the same numbers in the order of ranks, so all end with the same bits."""
        posted = self._coming.pop(b)
        mine = full.reshape(-1)
        own = self._topology.rank
        if not posted:
            yield []
            return
        codec = self._codec
        sent = self._feedback.settle_(b, mine) if self.settles else self._feedback.encode_(b, mine)
        for rank in posted:
            self._messenger.send(sent, rank, self._number(b))
        del sent
        yield [self._waiters[Channel.ACROSS].submit(receive.wait) for receive in posted.values()]
        contents = {rank: receive.buffer.to(full.device) for rank, receive in posted.items()}
        order = sorted([*contents, own])
        # The first two of a sum may change places, so that most begin with what is here already.
        first = own if own in order[:2] else order[0]
        total = mine if first == own else codec.decode(contents[first], len(mine))
        for rank in order:
            if rank == own != first:
                total.add_(mine)
            elif rank != first:
                codec.add(total, contents[rank])
        if total is not mine:
            mine.copy_(total)


class _Running:
    """A bucket under way."""

    def __init__(self, bucket: int, phases: Phases) -> None:
        self.bucket = bucket
        self.phase = 0
        self.ended = False
        self._phases = phases
        self._waits: Waits = next(phases)

    def ready(self) -> bool:
        return all(
            work.done() if isinstance(work, Future) else work.is_completed() for work in self._waits
        )

    def advance(self) -> None:
        for work in self._waits:
            work.result() if isinstance(work, Future) else work.wait()
        self.phase += 1
        try:
            self._waits = next(self._phases)
        except StopIteration:
            self.ended = True
            self._waits = ()


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    return _work(dist.all_reduce(tensor, group=group, async_op=True))


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work
