"""The workers of one run as a group: where they meet, who is alive, and the few exchanges beside gradients."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Literal, cast

import torch
import torch.distributed as dist

from farspan.domain.problems import Refusal
from farspan.domain.run import SECRET, STORE_PORT
from farspan.runtime.comm import connections
from farspan.runtime.comm.notices import Notices

#: Workers may come so far apart: some import torch from a slow disk, or were started by hand.
START_S = 300.0
#: A worker that says nothing for this long is lost; each says every BEAT_S that it is there.
SILENCE_S, BEAT_S = 20.0, 2.0
#: Who has met the others opens its device, and says so for the first time, within this.
OPEN_S = 120.0
#: Where the store does not say within this who is lost, rank 0 is, which keeps it. With SILENCE_S before it and the
#: seconds that rank 0 stays after it, every worker ends within 30 s.
ANSWER_S = 3.0
#: An exchange waits this long for a worker that is alive but busy with a long step or with writing a checkpoint: 24 GB
#: (2 B parameters) at 5 MB/s take 80 minutes. Beyond that the workers wait for each other.
BUSY_S = 2 * 3600.0
#: What carries the messages of a group: gloo, or NCCL what GPUs hold, where each worker of the group has one: what some
#: send by NCCL the others cannot receive by gloo.
GLOO, NCCL = "gloo", "cpu:gloo,cuda:nccl"
#: A connection that the other side's machine has answered nothing on for this long is lost; before heartbeats are, as
#: it says more.
CUT_S = 15.0
#: Beats of a worker that has met the others, and of which nothing was heard since.
MET = 1
#: The rank that was lost and how that was noticed, as the first worker that did has written in the store.
LOST = "farspan/lost"

#: How a worker is noticed to be lost: it says nothing, or a connection to it broke.
How = Literal["silence", "connection"]


def backend(kinds: Iterable[str]) -> str:
    """What carries the messages of a group whose workers compute on devices of these kinds."""
    return NCCL if all(kind == "cuda" for kind in kinds) else GLOO


def meet(rank: int, world: int, secret: bytes) -> Notices | None:
    """What all workers of a run tell each other, in a store at MASTER_ADDR: rank 0's, or that of the torchrun that
    started them by hand; None for a worker alone. Raises Refusal where they do not all come within START_S."""
    if world == 1:
        return None
    notices: Notices | None = None
    try:
        notices = Notices(_store(rank, world), secret)
        with _asking_rank_0(rank):
            notices.say(_beats(rank), str(MET))
            notices.wait([_beats(peer) for peer in range(world)], START_S)
    except (dist.DistError, OSError) as error:  # TimeoutError is one.
        fact = " ".join(str(error).split())[:300]
        with suppress(dist.DistError):  # It may have gone with rank 0.
            missing = [str(peer) for peer in range(world) if notices is not None and notices.missing([_beats(peer)])]
            if missing:
                fact = f"{world - len(missing)}/{world} have come, nothing of rank {', '.join(missing)}: {fact}"
        raise Refusal(
            "worker-lost", what=f"the {world} workers did not meet", where=f"rank {rank}", fact=fact,
            remedy=f"start every rank of the plan, with the same MASTER_ADDR, MASTER_PORT, WORLD_SIZE and {SECRET}",
        ) from None  # fmt: skip
    connections.expire(CUT_S)  # The store's own: who is asked over a line that is cut says so.
    return notices


def _store(rank: int, world: int) -> dist.Store:
    """Rank 0 listens where the others meet it, and nowhere else."""
    start = timedelta(seconds=START_S)
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if agents and STORE_PORT not in os.environ:
        store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=start))
        return store
    address, port = os.environ["MASTER_ADDR"], int(os.environ.get(STORE_PORT) or os.environ["MASTER_PORT"])
    if rank != 0:
        return dist.TCPStore(address, port, None, False, start, wait_for_workers=False)
    own = connections.listening(address)
    descriptor = socket.create_server((own, port)).detach()
    return dist.TCPStore(own, port, None, True, start, wait_for_workers=False, master_listen_fd=descriptor)


def renounce(notices: Notices, rank: int) -> None:
    """Say that this worker, which has met the others, will not join their group."""
    with suppress(dist.DistError):
        notices.say_first(LOST, f"{rank} connection")


class Group:
    """All workers of a run, met where their `notices` are. With one worker every exchange is a no-op. `lost` is that of
    `watch`, from before the workers connect to each other."""

    def __init__(
        self, rank: int, world: int, device: torch.device, notices: Notices | None = None,
        lost: Callable[[int, How], None] | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.world, self.device = rank, world, device
        #: Held while files are written: a worker whose peers are lost ends when the files are whole, not before.
        self.writing = threading.Lock()
        self._heartbeat: Heartbeat | None = None
        self._notices, self._ranks, self._introduced = notices, dict[str, int](), 0
        if notices is not None:
            with _asking_rank_0(rank):
                self._heartbeat = Heartbeat(notices, rank, world)
                if lost is not None:
                    self.watch(lost)
                kinds = _kinds(notices, rank, world, device)
            self._heartbeat.opening.clear()
            dist.init_process_group(
                backend(kinds), store=notices.store, rank=rank, world_size=world, timeout=timedelta(seconds=BUSY_S)
            )

    def watch(self, lost: Callable[[int, How], None]) -> None:
        """From now on call `lost`, in a thread of its own, with the rank of the first worker that is lost, to this one
        or another, and how."""

        def when_written(peer: int, how: How) -> None:
            with self.writing:
                lost(peer, how)

        if self._heartbeat is not None:
            self._heartbeat.watch(when_written)

    def introduce(self) -> None:
        """Whenever connections were made: let none be waited for that is cut, and know whose each is."""
        if self._notices is None:
            return
        connections.expire(CUT_S)
        self._introduced += 1
        self._notices.say(_ends(self.rank, self._introduced), " ".join(connections.own()))
        # Others may read their checkpoint for longer than a store waits.
        said = self._notices.wait([_ends(peer, self._introduced) for peer in range(self.world)])
        self._ranks = {end: peer for peer, ends in enumerate(said) for end in ends.decode().split()}

    def lost_by(self, error: BaseException) -> tuple[int, How] | None:
        """The worker without which an exchange failed, where gloo's message says at whose address it did: of several
        that go one after another the first that any worker noticed, and how."""
        peers = [self._ranks[end] for end in connections.named_in(str(error)) if end in self._ranks]
        if not peers or self._heartbeat is None:
            return None
        lost_peer = self._heartbeat.tell(peers[0], "connection")
        self._heartbeat.stay()
        return lost_peer

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all workers, in double precision."""
        if self.world == 1:
            return list(values)
        packed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(packed)
        return [float(value) for value in packed]

    def gather(self, value: float) -> list[float]:
        """The value of every worker, by rank."""
        one_hot = [0.0] * self.world
        one_hot[self.rank] = value
        return self.sum(*one_hot)

    def share(self, content: bytes) -> bytes:
        """Rank 0's content, on every worker."""
        size = int(self.sum(len(content) if self.rank == 0 else 0)[0])
        packed = torch.zeros(size, dtype=torch.uint8)
        if self.rank == 0:
            packed.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        if self.world > 1:
            dist.broadcast(packed, src=0)
        return bytes(packed.numpy())

    def close(self) -> None:
        """Part from the others, once all have come here: who ends first must not look lost."""
        if self._heartbeat is not None:
            self.sum(0.0)
            self._heartbeat.end()
            dist.destroy_process_group()

    def leave(self) -> None:
        """Part from the others without waiting for them, after an error. Where a worker is lost the error came of that:
        then the `lost` of `watch` says so and ends this process."""
        if self._heartbeat is not None:
            self._heartbeat.end()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.leave()


class Heartbeat:
    """Says in `notices` that this worker is alive, and hears the others: rank 0 all of them, each of them rank 0.

    Where one is lost, who notices tells the others and ends, and they with it. Collectives cannot tell: a lost machine
    closes no connection, and a peer that is busy is as silent in them as one that is gone.
    """

    def __init__(self, notices: Notices, rank: int, world: int) -> None:
        # A store that is gone, with rank 0, would be tried for as long as workers may take to come.
        self._notices, self._rank = notices.clone(SILENCE_S), rank
        self._silent_s = dict.fromkeys(range(1, world) if rank == 0 else (0,), 0.0)
        #: Who may be silent for longer, as its device is opened.
        self.opening = set(self._silent_s)
        self._ended, self._gone = threading.Event(), list[tuple[int, How]]()
        self._talker = threading.Thread(target=self._talk, daemon=True)
        self._counter: threading.Thread | None = None
        self._talker.start()

    def watch(self, lost: Callable[[int, How], None]) -> None:
        self._counter = threading.Thread(target=self._count, args=(lost,), daemon=True)
        self._counter.start()

    def end(self) -> None:
        """Must come before the process ends: an interpreter that stops a thread inside the store aborts. Where a worker
        is lost `lost` has the last word."""
        self._ended.set()
        if self._gone and self._counter is not None:
            self._counter.join()
        self._talker.join(ANSWER_S)

    def _talk(self) -> None:
        """Count up one's own key, see whether the others' grew, and whom another has lost. Ends where the store is
        lost."""
        heard, own = dict.fromkeys(self._silent_s, MET), MET
        with suppress(dist.DistError):  # The store is gone, and rank 0 with it: silence from now on.
            while True:
                own += 1
                self._notices.say(_beats(self._rank), str(own))
                for peer in self._silent_s:
                    said = self._notices.heard(_beats(peer))
                    if said is None:  # Somebody else has deleted or overwritten it, which says nothing of the worker.
                        self._silent_s[peer] = 0.0
                    elif (beats := int(said)) > heard[peer]:  # Also an older one could be there again.
                        heard[peer], self._silent_s[peer] = beats, 0.0
                        self.opening.discard(peer)
                if (loss := self._notices.heard(LOST)) is not None:
                    self._gone.append(_loss(loss))
                if self._ended.wait(BEAT_S):
                    return

    def _count(self, lost: Callable[[int, How], None]) -> None:
        """Seconds are counted, not read from a clock: machines that were suspended together blame nobody."""
        while not self._gone and not self._ended.wait(1.0):
            for peer in self._silent_s:
                self._silent_s[peer] += 1.0
                if self._silent_s[peer] > (OPEN_S if peer in self.opening else SILENCE_S):
                    self._gone.append(self.tell(peer, "silence"))
        if self._gone:
            self.stay()
            lost(*self._gone[0])

    def tell(self, peer: int, how: How) -> tuple[int, How]:
        """Say in the store who is lost and how, unless another was named there before; returns who is: rank 0 where
        the store does not answer and has not said it."""
        named: list[tuple[int, How]] = []

        def write() -> None:
            with suppress(dist.DistError):
                named.append(_loss(self._notices.say_first(LOST, f"{peer} {how}")))

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(ANSWER_S)
        return (named or self._gone or [(0, how)])[0]

    def stay(self) -> None:
        """Where somebody is lost, rank 0 ends when the others have heard of it: their store goes with it."""
        if self._rank == 0:
            time.sleep(BEAT_S + ANSWER_S)


def gather_bytes(content: bytes, rank: int, world: int) -> list[bytes]:
    """The content of every worker, by rank. Bytes, as torch's own exchange of objects unpickles what peers send."""
    if world == 1:
        return [content]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(content)]))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    packed = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(packed, padded)
    return [bytes(part[: int(size)].numpy()) for part, size in zip(packed, sizes, strict=True)]


def _kinds(notices: Notices, rank: int, world: int, device: torch.device) -> list[str]:
    """The kinds of device of all workers, which they tell each other: those of a probe have no plan that says so."""
    notices.say(_kind(rank), device.type)
    return [kind.decode() for kind in notices.wait([_kind(peer) for peer in range(world)])]


@contextmanager
def _asking_rank_0(rank: int) -> Iterator[None]:
    """Raises Refusal (worker-lost) where rank 0 has ended, and the store with it."""
    try:
        yield
    except dist.DistNetworkError:
        raise Refusal(
            "worker-lost", what="rank 0 was lost", where=f"rank {rank}",
            fact="it has kept the store, and ended before all had opened their devices",
            remedy="see what it says itself: logs/rank-0.log of the run",
        ) from None  # fmt: skip


def _loss(said: bytes) -> tuple[int, How]:
    rank, how = said.decode().split()
    return int(rank), cast(How, how)


def _beats(rank: int) -> str:
    return f"farspan/beats/{rank}"


def _ends(rank: int, round_: int) -> str:
    return f"farspan/ends/{rank}/{round_}"


def _kind(rank: int) -> str:
    return f"farspan/kind/{rank}"
