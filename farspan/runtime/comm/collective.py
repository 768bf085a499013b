"""The workers of one run as a group: where they meet, who is alive, and the few exchanges beside
gradients."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from farspan.domain.problems import Refusal
from farspan.domain.run import SECRET, STORE_PORT
from farspan.runtime.comm import tcp
from farspan.runtime.comm.heartbeat import RTTS, SILENCE_S, Heartbeat, How
from farspan.runtime.comm.notices import Notices, came

#: Workers may come so far apart: some import torch from a slow disk, or were started by hand.
START_S = 300.0
#: An exchange waits this long for a worker that is alive but busy with a long step or with writing
#: a checkpoint: 24 GB (2 B parameters) at 5 MB/s take 80 minutes. Beyond that the workers wait for
#: each other.
BUSY_S = 2 * 3600.0
#: What carries the messages of a group: gloo, or NCCL what GPUs hold, where each worker of the
#: group has one: what some send by NCCL the others cannot receive by gloo.
GLOO = "gloo"
NCCL = "cpu:gloo,cuda:nccl"
#: Rank 0's notice of the port of PyTorch's store.
STORE = "farspan/store"


def backend(kinds: Iterable[str]) -> str:
    """What carries the messages of a group whose workers compute on devices of these kinds."""
    return NCCL if all(kind == "cuda" for kind in kinds) else GLOO


def meet(rank: int, world: int, secret: bytes) -> Notices | None:
    """What all workers of a run tell each other, once they have met at MASTER_ADDR; None for a
    worker alone. Raises Refusal where they do not all come within START_S."""
    if world == 1:
        return None
    notices = Notices(secret, rank)
    # A torchrun that was started by hand has its own store at MASTER_PORT.
    beside = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = int(os.environ.get(STORE_PORT) or int(os.environ["MASTER_PORT"]) + beside)
    try:
        with _asking_rank_0(rank):
            notices.meet(world, port, START_S)
    except OSError as error:  # TimeoutError is one.
        fact = " ".join(str(error).split())[:300]
        missing = [str(peer) for peer in range(world) if notices.missing([came(peer)])]
        if len(missing) < world:  # Who has not reached rank 0 knows of nobody.
            fact = (
                f"{world - len(missing)}/{world} have come, nothing of rank "
                f"{', '.join(missing)}: {fact}"
            )
        raise Refusal(
            "worker-lost",
            what=f"the {world} workers did not meet",
            where=f"rank {rank}",
            fact=fact,
            remedy=(
                "start every rank of the plan, with the same MASTER_ADDR, MASTER_PORT, "
                f"WORLD_SIZE and {SECRET}"
            ),
        ) from None
    tcp.expire(SILENCE_S, RTTS)
    return notices


def _store(notices: Notices) -> dist.Store:
    """Return the store through which gloo and NCCL connect. Rank 0 listens where the others have
    met it, and nowhere else."""
    address = os.environ["MASTER_ADDR"]
    start = timedelta(seconds=START_S)
    if notices.rank != 0:
        port = int(notices.wait([STORE])[0])
        return dist.TCPStore(address, port, None, False, start, wait_for_workers=False)
    own = tcp.listening(address)
    server = socket.create_server((own, 0))
    port = server.getsockname()[1]
    store = dist.TCPStore(
        own, port, None, True, start, wait_for_workers=False, master_listen_fd=server.detach()
    )
    notices.say(STORE, str(port))
    return store


class Group:
    """All workers of a run, met where their `notices` are. With one worker every exchange is a
    no-op. `lost` is that of `watch`, from before the workers connect to each other."""

    def __init__(
        self,
        rank: int,
        world: int,
        device: torch.device,
        notices: Notices | None = None,
        lost: Callable[[int, How], None] | None = None,
    ) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        #: Held while files are written: a worker whose peers are lost ends when the files are
        #: whole, not before.
        self.writing = threading.Lock()
        self._heartbeat: Heartbeat | None = None
        self._notices = notices
        self._ranks = dict[str, int]()
        self._introduced = 0
        if notices is not None:
            with _asking_rank_0(rank):
                self._heartbeat = Heartbeat(notices, world)
                if lost is not None:
                    self.watch(lost)
                kinds = _kinds(notices, rank, world, device)
                store = _store(notices)
            self._heartbeat.opened()
            dist.init_process_group(
                backend(kinds),
                store=store,
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=BUSY_S),
            )

    def watch(self, lost: Callable[[int, How], None]) -> None:
        """From now on call `lost`, in a thread of its own, with the rank of the first worker that
        is lost, to this one or another, and how."""

        def when_written(peer: int, how: How) -> None:
            with self.writing:
                lost(peer, how)

        if self._heartbeat is not None:
            self._heartbeat.watch(when_written)

    def step(self) -> AbstractContextManager[None]:
        """While a step is made, in which all workers wait for each other."""
        return nullcontext() if self._heartbeat is None else self._heartbeat.step()

    def introduce(self) -> None:
        """Whenever connections were made: let none be waited for that is cut, and know whose each
        is."""
        if self._notices is None:
            return
        tcp.expire(SILENCE_S, RTTS)
        self._introduced += 1
        self._notices.say(_ends(self.rank, self._introduced), " ".join(tcp.own()))
        # Without a limit: others may read their checkpoint for long.
        said = self._notices.wait([_ends(peer, self._introduced) for peer in range(self.world)])
        self._ranks = {end: peer for peer, ends in enumerate(said) for end in ends.decode().split()}

    def lost_by(self, error: BaseException) -> tuple[int, How] | None:
        """The worker without which an exchange failed, where gloo's message says at whose address
        it did: of several that go one after another the first that any worker noticed, and how."""
        peers = [self._ranks[end] for end in tcp.named_in(str(error)) if end in self._ranks]
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
        if self.rank == 0 and content:
            packed.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        if self.world > 1:
            dist.broadcast(packed, src=0)
        return bytes(packed.numpy())

    def share_text(self, text: str) -> str:
        """Rank 0's text, on every worker."""
        if not any(self.sum(float(bool(text and self.rank == 0)))):
            return ""
        return self.share(text.encode(errors="backslashreplace")).decode()

    def gather_text(self, text: str) -> list[str]:
        """The text of every worker, by rank."""
        if not any(self.sum(float(bool(text)))):
            return [""] * self.world
        said = gather_bytes(text.encode(errors="backslashreplace"), self.rank, self.world)
        return [part.decode() for part in said]

    @property
    def secret(self) -> bytes:
        """By which the workers of the run know each other."""
        return b"" if self._notices is None else self._notices.secret

    @property
    def rank_0(self) -> str:
        """The address at which the workers met."""
        return os.environ["MASTER_ADDR"]

    def close(self) -> None:
        """Part from the others, once all have come here: who ends first must not look lost."""
        if self._heartbeat is not None:
            self.sum(0.0)
            self.leave()
            dist.destroy_process_group()

    def leave(self) -> None:
        """Part from the others without waiting for them, after an error. Where a worker is lost the
        error came of that: then the `lost` of `watch` says so and ends this process."""
        if self._heartbeat is not None:
            self._heartbeat.end()
        if self._notices is not None:
            self._notices.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.leave()


def gather_bytes(content: bytes, rank: int, world: int) -> list[bytes]:
    """The content of every worker, by rank. Bytes, as torch's own exchange of objects unpickles
    what peers send."""
    if world == 1:
        return [content]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(content)]))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    if content:  # torch makes no tensor of nothing.
        padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    packed = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(packed, padded)
    return [bytes(part[: int(size)].numpy()) for part, size in zip(packed, sizes, strict=True)]


def _kinds(notices: Notices, rank: int, world: int, device: torch.device) -> list[str]:
    """The kinds of device of all workers, which they tell each other: those of a probe have no plan
    that says so."""
    notices.say(_kind(rank), device.type)
    return [kind.decode() for kind in notices.wait([_kind(peer) for peer in range(world)])]


@contextmanager
def _asking_rank_0(rank: int) -> Iterator[None]:
    """Raises Refusal (worker-lost) where rank 0 has ended, and the store with it."""
    try:
        yield
    except (ConnectionError, dist.DistNetworkError):
        raise Refusal(
            "worker-lost",
            what="rank 0 was lost",
            where=f"rank {rank}",
            fact="the others meet at it, and it ended before all had opened their devices",
            remedy="see what it says itself: logs/rank-0.log of the run",
        ) from None


def _ends(rank: int, round_: int) -> str:
    return f"farspan/ends/{rank}/{round_}"


def _kind(rank: int) -> str:
    return f"farspan/kind/{rank}"
