"""Summing gradients over the batch axes, bucket by bucket, while the backward pass is still
running.

Each bucket goes through the same phases: over the tensor axis (where its gradients are summands
there), inside the site or over all, between sites, and back inside the site. A phase of a bucket
begins after the same phase of the bucket before it, so that every worker starts its collectives in
one order. Phases advance whenever a gradient arrives.

NCCL asks for more: collectives of different communicators start in one order, too. So a collective
there follows one of another communicator without the host looking whether that has ended, and what
the sites have summed is spread once the step's last bucket has begun. When a bucket's collectives
start is then decided by the backward pass alone, which is the same on all ranks of a stage.

The host never waits for a GPU here. While the backward pass runs it looks whether NCCL's sums have
ended; when they are wanted the device's stream waits for them, bucket after bucket. What goes
through the host's memory is copied during the passes (`host_staging`).
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from farspan.runtime.comm import tcp
from farspan.runtime.comm.message_tags import MessageChannel, tag
from farspan.runtime.comm.messages import Messenger, Posted, Sent
from farspan.runtime.comm.quantize import FP32_CODEC, Codec, ErrorFeedback
from farspan.runtime.comm.topology import ProcessGroups, Topology
from farspan.runtime.comm.worker_group import NCCL
from farspan.runtime.state.train_state import TrainState
from farspan.runtime.state.zero_buckets import Bucket, owned_length

#: Between two looks at what has arrived: longer while nothing comes, as looking takes from what
#: others compute with.
SHORTEST_S = 5e-5
MAX_POLL_S = 1e-3
#: Bytes of whole gradients under way where each worker keeps only its part of them, without the
#: newest: beyond that backward passes wait.
UNDER_WAY = 64 * 2**20


@dataclass(frozen=True)
class _StreamWait:
    """A collective of NCCL, for which the device's stream waits and the host does not: at once, or
    when its result is wanted, as what is computed until then need not wait."""

    work: dist.Work
    at_once: bool = False


Wait = dist.Work | Future[Tensor] | Future[None] | _StreamWait
Waits = Sequence[Wait]
Phases = Generator[Waits]


class GradReducer:
    """The sums of one worker's gradients. `prepare_backward(last)` before every backward pass;
    `finish_sums()` at the end of the step.

    `on_bucket_ready` is called with a bucket's number when a backward pass has written all of it,
    `on_bucket_reduced` when it is summed.
    """

    def __init__(
        self, topology: Topology, state: TrainState, groups: ProcessGroups, messenger: Messenger
    ) -> None:
        self._topology = topology
        self._rank = topology.rank
        self._state = state
        self._messenger = messenger
        self._sync = topology.stage.grad_sync
        self._data = topology.group("data")
        self._batch = topology.peers
        self._sites = [tuple(ranks) for ranks in topology.sites(self._batch).values()]
        self._home = next(ranks for ranks in self._sites if self._rank in ranks)
        self._by_site = self._sync.topology == "hierarchical" and len(self._sites) > 1
        self._make_groups(groups)
        self._feedback = ErrorFeedback(Codec(self._sync.bits))
        #: Whether the coming step sends in 32 bits, with the quantization residuals of the steps
        #: before.
        self.flush_residuals = False
        # Gloo reports that a message has come only to the thread that waits for it; those of a
        # phase come in order.
        self._scatter_waiter = ThreadPoolExecutor(1)
        self._across_waiter = ThreadPoolExecutor(1)
        self._missing: list[int] = []
        self._last = True
        self._rounds = itertools.count()
        self._round = 0
        #: By bucket and sender: receives of sums over sites, posted before the backward pass.
        self._coming: dict[int, dict[int, Posted]] = {}
        self._active: list[_Running] = []
        #: Done once the sums of all buckets of a backward pass have begun.
        self._all_begun: Future[None] = Future()
        self.on_bucket_ready: Callable[[int], None] = lambda bucket: None
        self.on_bucket_reduced: Callable[[int], None] = lambda bucket: None
        state.on_grad = self._on_grad

    def _make_groups(self, groups: ProcessGroups) -> None:
        """Make only the groups that the plan needs: over a long link each takes seconds."""
        buckets = self._state.buckets
        topology = self._topology
        sync = self._sync
        whole = any(bucket.ways == 1 for bucket in buckets)
        partial = any(bucket.partial for bucket in buckets)

        def make_group(
            needed: bool, ranks: Sequence[int], purpose: str
        ) -> dist.ProcessGroup | None:
            return groups.of(ranks, purpose) if needed else None

        self._tensor = make_group(partial, topology.group("tensor"), "partial")
        # Made on all ranks of the stage or on none, as all who share a group must have made as many
        # before it.
        nccl = any(topology.backend(ranks) == NCCL for ranks in topology.mesh.groups("data"))
        scatter = make_group(topology.zero > 0 and nccl, self._data, "scatter")
        self._scatter = scatter if topology.backend(self._data) == NCCL else None
        plain = whole and not self._by_site and sync.bits == 32
        self._all = make_group(plain, self._batch, "sum")
        self._has_nccl_all = topology.backend(self._batch) == NCCL
        self._inside = make_group(whole and self._by_site, self._home, "inside")
        # The two kinds of collectives may interleave otherwise on each rank, which needs a group
        # for each; under NCCL they do not.
        self._has_nccl_home = topology.backend(self._home) == NCCL
        self._back = self._inside
        if not self._has_nccl_home:
            self._back = make_group(whole and self._by_site, self._home, "back")
        self._has_nccl_tensor = topology.backend(topology.group("tensor")) == NCCL
        if sync.wan_rate is not None and len(self._sites) > 1:
            tcp.limit_rate(sync.wan_rate)

    @property
    def _codec(self) -> Codec:
        return FP32_CODEC if self.flush_residuals else self._feedback.codec

    def drop_residuals(self) -> None:
        """Drop the quantization residuals of gradients: they are not to be added to the next
        ones."""
        self._feedback.residuals.clear()

    def prepare_backward(self, last: bool) -> None:
        """Prepare for the next backward pass; the step's last one if `last`."""
        self._missing = []
        if not last and self._state.division.zero < 2:
            return
        self._last = last
        self._all_begun = Future()
        self._round = next(self._rounds)
        if last:
            self._post_receives()
        for bucket in self._state.buckets:
            summed = last or bucket.ways > 1
            self._missing.append(len(bucket.members) if summed else -1)

    def _post_receives(self) -> None:
        """Post all receives of the round's sums over sites: what the others send then travels at
        once."""
        for b, bucket in enumerate(self._state.buckets):
            size = self._codec.encoded_size(owned_length(bucket))
            number = self._across_tag(b)
            posted: dict[int, Posted] = {}
            self._coming[b] = posted
            for rank in self._cross_site_peers(bucket, b):
                posted[rank] = self._messenger.post(size, torch.uint8, rank, number, uploaded=True)

    def _cross_site_peers(self, bucket: Bucket, b: int) -> list[int]:
        """Return the workers that sum a bucket over sites with this one, straight: none where
        another worker of its site does."""
        ranks: Sequence[int] = ()
        if bucket.ways > 1:
            ranks = self._topology.group("site")
        elif self._by_site:
            ranks = [ranks[b % len(ranks)] for ranks in self._sites]
        elif self._sync.bits < 32:
            ranks = self._batch
        if self._rank not in ranks:
            return []
        return [rank for rank in ranks if rank != self._rank]

    def _across_tag(self, b: int) -> int:
        return tag(MessageChannel.ACROSS, self._round * len(self._state.buckets) + b)

    def _on_grad(self, index: int) -> None:
        if self._missing:
            bucket = self._state.home[index][0]
            self._missing[bucket] -= 1
            if self._missing[bucket] == 0:
                self.on_bucket_ready(bucket)
                phases = self._reduce_bucket(bucket, self._last, self._round)
                self._active.append(_Running(bucket, phases))
        self.progress_buckets()
        if self._state.division.zero >= 2:
            # The stream waits for one bucket after another, until few are under way.
            self._progress_while(self._holds_too_much, 1)

    def _holds_too_much(self) -> bool:
        elements = 0
        for running in self._active[:-1]:
            elements += self._state.buckets[running.bucket].size
        return 4 * elements > UNDER_WAY

    def progress_buckets(self, wanted: int = 0) -> bool:
        """Advance every bucket as far as what it waits for has come; whether any advanced. The
        device's stream waits for NCCL's collectives of the first `wanted` buckets under way."""
        advanced = False
        # The phase that a bucket may enter last: that of the bucket before it.
        limit = sys.maxsize
        for place, running in enumerate(self._active):
            in_stream = place < wanted
            while not running.ended and running.phase < limit and running.is_ready(in_stream):
                running.next_phase()
                advanced = True
                if running.ended:
                    self.on_bucket_reduced(running.bucket)
            limit = sys.maxsize if running.ended else running.phase
        self._note_all_begun()
        while self._active and self._active[0].ended:
            self._active.pop(0)
        return advanced

    def _note_all_begun(self) -> None:
        """Open what waits for the first collective of the pass's last bucket."""
        if self._all_begun.done() or any(count > 0 for count in self._missing):
            return
        if all(running.phase > 0 for running in self._active):
            self._all_begun.set_result(None)

    def finish_sums(self) -> None:
        """Wait until the sums of all buckets are complete."""
        if any(count > 0 for count in self._missing):
            raise RuntimeError("a parameter got no gradient: its bucket was never sent")
        self._progress_while(lambda: bool(self._active), len(self._active))
        self._missing = []

    def _progress_while(self, needed: Callable[[], bool], wanted: int) -> None:
        """Look after what is under way as long as it is needed, `wanted` buckets first."""
        pause = SHORTEST_S
        while needed():
            if self.progress_buckets(wanted):
                pause = SHORTEST_S
            else:
                time.sleep(pause)
                pause = min(2 * pause, MAX_POLL_S)

    # -- the phases of one bucket: each yields what the next one waits for
    #   ---------------------------------------------

    def _reduce_bucket(self, b: int, last: bool, round_: int) -> Phases:
        state = self._state
        bucket = state.buckets[b]
        full = state.collected[b]
        assert full is not None
        if bucket.ways > 1 and state.division.zero >= 2:
            state.collected[b] = None  # The next microbatch begins a gradient of its own.
        waits: list[Wait] = []
        if bucket.partial and self._tensor:
            work = _all_reduce(full, self._tensor)
            # Its sum goes into the next collective at once.
            waits.append(_StreamWait(work, at_once=True) if self._has_nccl_tensor else work)
        yield waits
        if bucket.ways > 1:
            whole = [full]
            del full
            yield from self._reduce_scatter(b, whole, last, round_)
        elif self._by_site:
            yield from self._hierarchical_all_reduce(b, full)
        elif self._sync.bits < 32:
            yield []
            yield from self._cross_site_all_reduce(b, full)
            yield []
        else:
            if self._all:
                work = _all_reduce(full, self._all)
                yield [_wait_for(work, has_nccl=self._has_nccl_all)]
            else:
                yield []
            yield []
            yield []

    def _reduce_scatter(self, b: int, whole: list[Tensor], last: bool, round_: int) -> Phases:
        """Sum this worker's part over the data axis, and add it to earlier microbatches'; then sum
        over sites. `whole` is left empty: its memory goes when it is no longer needed."""
        state = self._state
        total = state.grad[b]
        if self._scatter is not None:
            part = torch.empty(owned_length(state.buckets[b]), device=state.device)
            work = dist.reduce_scatter_tensor(part, whole[0], group=self._scatter, async_op=True)
            yield [_wait_for(work, has_nccl=True)]
            whole.clear()
        else:
            part = yield from self._sum_sent_parts(b, whole.pop(), round_)
        if state.division.zero >= 2:
            total.add_(part)
        else:
            total.copy_(part)
        if last:
            yield from self._cross_site_all_reduce(b, total)
        else:
            yield []
        yield []

    def _sum_sent_parts(self, b: int, full: Tensor, round_: int) -> Generator[Waits, None, Tensor]:
        """Sum parts sent straight to their owner, in the order of ranks: gloo's own scatters the
        sum of all."""
        size = full.numel() // len(self._data)
        number = tag(MessageChannel.SCATTER, round_ * len(self._state.buckets) + b)
        parts = list(full.split(size))
        arriving: dict[int, Posted] = {}
        leaving: list[Sent] = []
        for k, rank in enumerate(self._data):
            if rank != self._rank:
                arriving[k] = self._messenger.post(size, full.dtype, rank, number, uploaded=True)
                leaving += self._messenger.send(parts[k], rank, number)
        # What leaves may neither change nor stay in memory: it is waited for, too.
        arrivals = [self._scatter_waiter.submit(message.wait) for message in arriving.values()]
        departures = [self._scatter_waiter.submit(message.wait) for message in leaving]
        yield [*arrivals, *departures]
        for k, message in arriving.items():
            parts[k] = message.upload()
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def _hierarchical_all_reduce(self, b: int, full: Tensor) -> Phases:
        """Sum on one worker of each site, another one for each bucket; between these; and spread
        inside the site."""
        leader = self._home[b % len(self._home)]
        works: list[Wait] = []
        if self._inside:
            work = dist.reduce(full, leader, group=self._inside, async_op=True)
            works.append(_wait_for(work, has_nccl=self._has_nccl_home))
        yield works
        # What the sites have summed waits here: its broadcast would else start at another place
        # among the other buckets' sums on each rank.
        gate: list[Wait] = [self._all_begun] if self._back and self._has_nccl_home else []
        yield from self._cross_site_all_reduce(b, full, gate)
        works = []
        if self._back:
            work = dist.broadcast(full, leader, group=self._back, async_op=True)
            works.append(_wait_for(work, has_nccl=self._has_nccl_home))
        yield works

    def _cross_site_all_reduce(self, b: int, full: Tensor, gate: Sequence[Wait] = ()) -> Phases:
        """Sum `full` with the same of the others, straight, each byte over the link once a pair.
        Everyone adds the same numbers in the order of ranks, so all end with the same bits. The
        phase ends when `gate` is open, too."""
        posted = self._coming.pop(b)
        if not posted:
            yield gate
            return
        mine = full.reshape(-1)
        own = self._rank
        codec = self._codec
        quantize_ = (
            self._feedback.flush_residual_ if self.flush_residuals else self._feedback.quantize_
        )
        content = quantize_(b, mine)
        number = self._across_tag(b)
        for rank in posted:
            self._messenger.send(content, rank, number)
        del content
        arrivals = [self._across_waiter.submit(receive.wait) for receive in posted.values()]
        yield [*arrivals, *gate]
        contents = {rank: receive.upload() for rank, receive in posted.items()}
        order = sorted([*contents, own])
        # The first two of a sum may change places, so that most begin with what is here already.
        first = own if own in order[:2] else order[0]
        total = mine if first == own else codec.dequantize(contents[first], len(mine))
        for rank in order:
            if rank == own != first:
                total.add_(mine)
            elif rank != first:
                codec.add_dequantized(total, contents[rank])
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

    def is_ready(self, in_stream: bool) -> bool:
        return all(_is_complete(wait, in_stream) for wait in self._waits)

    def next_phase(self) -> None:
        for wait in self._waits:
            if isinstance(wait, Future):
                wait.result()
            elif isinstance(wait, _StreamWait):
                wait.work.wait()
            else:
                wait.wait()
        self.phase += 1
        try:
            self._waits = next(self._phases)
        except StopIteration:
            self.ended = True
            self._waits = ()


def _is_complete(wait: Wait, in_stream: bool) -> bool:
    """Return whether what follows a wait may be launched; that of NCCL's collectives always may be
    where the stream waits (`in_stream`)."""
    if isinstance(wait, Future):
        return wait.done()
    if isinstance(wait, _StreamWait):
        return in_stream or wait.at_once or wait.work.is_completed()
    return wait.is_completed()


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    return work


def _wait_for(work: dist.Work | None, *, has_nccl: bool) -> Wait:
    """Return the wait for a collective of a group."""
    assert work is not None
    return _StreamWait(work) if has_nccl else work
