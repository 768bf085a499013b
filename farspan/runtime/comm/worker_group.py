"""The workers of one run as a group: their rendezvous, their liveness, and the few exchanges other
than gradients."""

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
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from farspan.domain.problems import Refusal
from farspan.domain.run import SECRET_VARIABLE, STORE_PORT
from farspan.runtime.comm import tcp
from farspan.runtime.comm.control_channel import Notices, came
from farspan.runtime.comm.heartbeat import RTTS, SILENCE_S, Heartbeat, How

#: Workers may come so far apart: some import torch from a slow disk, or were started by hand.
WORKER_START_S = 300.0
#: An exchange waits this long for a worker that is alive but busy with a long step or with writing
#: a checkpoint: 24 GB (2 B parameters) at 5 MB/s take 80 minutes. Beyond that the workers wait for
#: each other.
BUSY_S = 2 * 3600.0
#: What carries the messages of a group: gloo, or NCCL what GPUs hold, where each worker of the
#: group has one: what some send by NCCL the others cannot receive by gloo.
GLOO = "gloo"
NCCL = "cpu:gloo,cuda:nccl"
#: What PyTorch's watch over NCCL does at an error (docs.pytorch.org, "ProcessGroupNCCL Environment
#: Variables"), and the older name of it. By default it ends the process before the worker whose
#: loss caused the error is named; RECORD_ERRORS leaves that to the heartbeat, which also notices
#: steps that do not end.
NCCL_ERROR_VARIABLES = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
RECORD_ERRORS = "0"
#: Rank 0's notice of the port of PyTorch's store.
STORE_NOTICE = "farspan/store"


def backend(kinds: Iterable[str]) -> str:
    """Return the backend of a group whose workers compute on devices of these kinds."""
    return NCCL if all(kind == "cuda" for kind in kinds) else GLOO


def leave_nccl_errors_to_heartbeat() -> None:
    """Have PyTorch's watch over NCCL end no worker, unless the user has set what it does."""
    if not any(name in os.environ for name in NCCL_ERROR_VARIABLES):
        os.environ[NCCL_ERROR_VARIABLES[0]] = RECORD_ERRORS


def connect_workers(rank: int, world: int, secret: bytes) -> Notices | None:
    """Connect all workers of a run at MASTER_ADDR and return their notices; None for a
    worker alone. Raises Refusal where they do not all come within START_S."""
    if world == 1:
        return None
    notices = Notices(secret, rank)
    if given := os.environ.get(STORE_PORT):
        port = int(given)
    else:
        port = int(os.environ["MASTER_PORT"])
        # A torchrun that was started by hand has its own store at MASTER_PORT.
        port += os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        with _asking_rank_0(rank):
            notices.rendezvous(world, port, WORKER_START_S)
    except OSError as error:  # TimeoutError is one.
        fact = " ".join(str(error).split())[:300]
        missing = [str(peer) for peer in range(world) if notices.missing([came(peer)])]
        num_come = world - len(missing)
        if num_come:  # A worker that has not reached rank 0 knows of no other.
            fact = f"{num_come}/{world} have come, nothing of rank {', '.join(missing)}: {fact}"
        raise Refusal(
            "worker-lost",
            what=f"the {world} workers did not meet",
            where=f"rank {rank}",
            fact=fact,
            remedy=(
                "start every rank of the plan, with the same MASTER_ADDR, MASTER_PORT, "
                f"WORLD_SIZE and {SECRET_VARIABLE}"
            ),
        ) from None
    tcp.set_timeouts(SILENCE_S, RTTS)
    return notices


def _connect_store(notices: Notices) -> Store:
    """Return the store through which gloo and NCCL connect. Rank 0 listens where the others have
    met it, and nowhere else."""
    address = os.environ["MASTER_ADDR"]
    start = timedelta(seconds=WORKER_START_S)
    if notices.rank != 0:
        port = int(notices.wait([STORE_NOTICE])[0])
        return TCPStore(address, port, None, False, start, wait_for_workers=False)
    own = tcp.listen_address(address)
    server = socket.create_server((own, 0))
    _, port = server.getsockname()
    fd = server.detach()
    store = TCPStore(own, port, None, True, start, wait_for_workers=False, master_listen_fd=fd)
    notices.send_to_all(STORE_NOTICE, str(port))
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
        #: Called with the rank of a lost worker before this one ends.
        self.keep_state: Callable[[int], None] = lambda peer: None
        self._lost: Callable[[int, How], None] = lambda peer, how: None
        self._heartbeat: Heartbeat | None = None
        self._notices = notices
        self._ranks = dict[str, int]()
        self._introductions = 0
        if notices is not None:
            with _asking_rank_0(rank):
                self._heartbeat = Heartbeat(notices, world)
                if lost is not None:
                    self.watch(lost)
                # The kinds of device of all workers: those of a probe have no plan that lists them.
                keys = [f"farspan/kind/{peer}" for peer in range(world)]
                notices.send_to_all(keys[rank], device.type)
                kinds = [kind.decode() for kind in notices.wait(keys)]
                store = _connect_store(notices)
            self._heartbeat.end_opening()
            timeout = timedelta(seconds=BUSY_S)
            leave_nccl_errors_to_heartbeat()
            dist.init_process_group(
                backend(kinds), store=store, rank=rank, world_size=world, timeout=timeout
            )

    def watch(self, lost: Callable[[int, How], None]) -> None:
        """Call `lost` from now on, in a thread of its own, with the rank of the first worker that
        is lost, to this one or another, and how."""
        self._lost = lost
        if self._heartbeat is not None:
            self._heartbeat.watch(self.end_after_loss)

    def step(self) -> AbstractContextManager[None]:
        """Mark a step, in which all workers wait for each other."""
        return nullcontext() if self._heartbeat is None else self._heartbeat.step()

    def publish_connections(self) -> None:
        """Publish the addresses of new connections, so that an error names its peer, and let those
        that are cut time out."""
        if self._notices is None:
            return
        tcp.set_timeouts(SILENCE_S, RTTS)
        self._introductions += 1
        keys = [f"farspan/ends/{peer}/{self._introductions}" for peer in range(self.world)]
        self._notices.send_to_all(keys[self.rank], " ".join(tcp.own_addresses()))
        # Without a limit: others may read their checkpoint for long.
        published = self._notices.wait(keys)
        ranks = dict[str, int]()
        for peer, ends in enumerate(published):
            ranks |= dict.fromkeys(ends.decode().split(), peer)
        self._ranks = ranks

    def lost_by(self, error: BaseException) -> tuple[int, How] | None:
        """Return the worker without which an exchange failed, if gloo's message names its address:
        of several that go one after another the first that any worker noticed, and how."""
        ends = tcp.named_in(str(error))
        peers = [self._ranks[end] for end in ends if end in self._ranks]
        if not peers or self._heartbeat is None:
            return None
        return self._heartbeat.report_loss(peers[0], "connection")

    def end_after_loss(self, peer: int, how: How) -> None:
        """End this process, by the `lost` of `watch`, once its files are whole, its last step is
        kept and the others know of the loss."""
        with self.writing:
            self.keep_state(peer)
            if self._heartbeat is not None:
                self._heartbeat.wait_for_reports()
            self._lost(peer, how)

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Sum each value over all workers, in double precision."""
        if self.world == 1:
            return list(values)
        packed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(packed)
        return packed.tolist()

    def all_gather(self, value: float) -> list[float]:
        """Return the value of every worker, by rank."""
        one_hot = [0.0] * self.world
        one_hot[self.rank] = value
        return self.all_reduce_sum(*one_hot)

    def broadcast_bytes(self, content: bytes) -> bytes:
        """Broadcast rank 0's content to every worker."""
        if self.rank != 0:
            content = b""
        size = int(self.all_reduce_sum(len(content))[0])
        packed = torch.zeros(size, dtype=torch.uint8)
        if content:
            packed.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        if self.world > 1:
            dist.broadcast(packed, src=0)
        return bytes(packed.numpy())

    def broadcast_text(self, text: str) -> str:
        """Broadcast rank 0's text to every worker."""
        has_text = bool(text and self.rank == 0)
        if not any(self.all_reduce_sum(float(has_text))):
            return ""
        return self.broadcast_bytes(text.encode(errors="backslashreplace")).decode()

    def all_gather_text(self, text: str) -> list[str]:
        """Return the text of every worker, by rank."""
        if not any(self.all_reduce_sum(float(bool(text)))):
            return [""] * self.world
        content = text.encode(errors="backslashreplace")
        return [part.decode() for part in all_gather_bytes(content, self.rank, self.world)]

    @property
    def secret(self) -> bytes:
        """By which the workers of the run know each other."""
        return b"" if self._notices is None else self._notices.secret

    def close(self) -> None:
        """Part from the others, once all have come here: the first to end must not look lost."""
        if self._heartbeat is not None and self._notices is not None:
            self._notices.agree_to_leave(self.world)
            self.all_reduce_sum(0.0)
            self.announce_exit()
            dist.destroy_process_group()

    def announce_exit(self) -> None:
        """Part from the others without waiting for them, after an error. If a worker is lost, the
        error came of that: then the `lost` of `watch` reports it and ends this process."""
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
            self.announce_exit()


def all_gather_bytes(content: bytes, rank: int, world: int) -> list[bytes]:
    """Return the content of every worker, by rank. Bytes, as torch's own exchange of objects
    unpickles what peers send."""
    if world == 1:
        return [content]
    received = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(received, torch.tensor([len(content)]))
    sizes = [int(size) for size in received]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    if content:  # torch makes no tensor of nothing.
        padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    packed = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(packed, padded)
    return [bytes(part[:size].numpy()) for part, size in zip(packed, sizes, strict=True)]


@contextmanager
def _asking_rank_0(rank: int) -> Iterator[None]:
    """Raise Refusal (worker-lost) if rank 0 has ended, and the store with it."""
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
