"""What others on the network can do to a run, and a worker of it to the others: nothing but be
refused."""

from __future__ import annotations

import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
import torch.distributed as dist

from farspan.domain.problems import Refusal
from farspan.domain.run_events import Finished, Step, read_events
from farspan.runtime.comm import distribute_files, tcp
from farspan.runtime.comm.control_channel import Notices
from farspan.runtime.comm.distribute_files import PART_FILES, Shipment, ShipmentOffer
from farspan.runtime.comm.sealed import (
    NONCE,
    PIECE_BYTES,
    Forged,
    SealedConnection,
    SealedServer,
    SealedStream,
)
from tests import tiny, waiting
from tests.ports import reserved_port
from tests.runtime import jobs
from tests.runtime.fleet import Failed, Fleet
from tests.runtime.plans import HAND_PICKED
from tests.runtime.test_by_hand import LIMIT_S, SOON, TRAIN, by_hand, named, wait_for
from tests.runtime.test_worker_group import members
from tests.runtime.verify import Case

SECRET = b"the secret of this run"
Value = TypeVar("Value")


def test_a_hostile_peer_runs_nothing_on_the_others(fleet: Fleet, folder: Path):
    plan = HAND_PICKED["zero 3"]
    marker = folder / "ran"
    case = Case(folder, plan)
    with pytest.raises(Failed, match="rank 0"):
        fleet.run(jobs.build_beside_a_hostile_peer, case.world, plan, case.path, marker)
    assert not marker.exists()


# -- the store
#   ------------------------------------------------------------------------------------------------


class Intruder(threading.Thread):
    """Somebody who reaches the store and lacks the secret: `deed` is done to every key, over and
    over, as long as the `with` lasts."""

    def __init__(self, port: int, deed: str) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._deed = deed
        self._over = threading.Event()
        #: What each key has held, oldest first.
        self.seen: dict[str, list[bytes]] = {}
        self.rounds = 0

    def run(self) -> None:
        with suppress(dist.DistError):  # The run has ended, and its store.
            self._disturb(client_of(self._port))

    def _disturb(self, store: dist.TCPStore) -> None:
        while not self._over.is_set():
            for key in {*store.list_keys(), *self.seen}:
                value = store.compare_set(key, "", "")
                seen = self.seen.setdefault(key, [])
                if value and value not in seen:
                    seen.append(value)
                if self._deed in ("deletion", "both"):
                    store.delete_key(key)
                if self._deed in ("replay", "both"):
                    store.set(key, random.choice(seen) if seen else b"")
                if self._deed == "garbage":
                    store.set(key, random.choice((b"", b"\xff\xfe", b"0" * 500, b"1 silence")))
            self.rounds += 1
            time.sleep(0.005)

    def after_rounds(self, count: int) -> None:
        before = self.rounds
        waiting.wait_for(lambda: self.rounds >= before + count, f"{count} rounds of {self._deed}")

    def __enter__(self) -> Intruder:
        self.start()
        self.after_rounds(1)
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.join()


#: Has rank 0 write down the port of PyTorch's store.
NOTE = """
from farspan.runtime.comm import worker_group
made = worker_group._connect_store
def noted(notices):
    store = made(notices)
    if notices.rank == 0:
        open({!r}, "w").write(str(store.port))
    return store
worker_group._connect_store = noted
"""
DEEDS = pytest.mark.parametrize("deed", ["garbage", "replay", "deletion", "both"])


def client_of(port: int) -> dist.TCPStore:
    return dist.TCPStore(
        "127.0.0.1", port, None, False, timedelta(seconds=LIMIT_S), wait_for_workers=False
    )


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Where workers may meet."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with reserved_port() as port:
        yield port


def by_all(ends: Sequence[Notices], do: Callable[[Notices], Value]) -> list[Value]:
    """What all workers do at once returns."""
    with ThreadPoolExecutor(len(ends)) as pool:
        return list(pool.map(do, ends))


@pytest.mark.parametrize(
    "deed",
    ["both", *(pytest.param(deed, marks=pytest.mark.slow) for deed in ("replay", "deletion"))],
)
def test_worker_that_stands_still_is_named_whatever_is_done_to_the_store(deed: str):
    program = """
if rank == 0:
    store = torch.distributed.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    print(store.port, flush=True)
while True:
    group.all_reduce_sum(1.0)
    time.sleep(0.01)
"""
    with members(2, program) as (first, second):
        assert first.stdout is not None
        with Intruder(int(first.stdout.readline()), deed) as intruder:
            intruder.after_rounds(20)
            second.send_signal(signal.SIGSTOP)
            assert first.wait(LIMIT_S) == 3
        assert first.stdout.read().split() == ["lost", "1"]


def test_what_is_said_first_is_what_all_workers_hear(port: int):
    ends = [Notices(SECRET, rank) for rank in range(3)]
    by_all(ends, lambda end: end.rendezvous(3, port, LIMIT_S))

    def exchange(end: Notices) -> tuple[list[bytes], bytes]:
        end.send_to_all(f"place/{end.rank}", f"of {end.rank}")
        first = end.send_first("lost", f"named by {end.rank}")
        return end.wait([f"place/{rank}" for rank in range(3)]), first

    (places, first), *others = by_all(ends, exchange)
    assert places == [b"of 0", b"of 1", b"of 2"]
    assert first in (b"named by 0", b"named by 1", b"named by 2")
    assert others == [(places, first)] * 2
    assert by_all(ends, lambda end: end.send_first("lost", "another")) == [first] * 3
    by_all(ends, lambda end: end.close())


def test_callers_without_the_secret_do_not_keep_workers_from_meeting(port: int):
    first = Notices(SECRET, 0)
    second = Notices(SECRET, 1)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(first.rendezvous, 2, port, LIMIT_S)
        waiting.wait_for(lambda: connects(port), "rank 0 listens")
        for said in (b"", b"\xff" * 500, b"0" * 48 + b"notices 1\n"):
            with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as caller:
                caller.sendall(said)
        with pytest.raises(TimeoutError, match="rank 0 has not answered"):
            Notices(b"the secret of another run", 1).rendezvous(2, port, 0.5)
        other = pool.submit(second.rendezvous, 2, port, LIMIT_S)
        one.result()
        other.result()
    by_all((first, second), lambda end: end.close())


def connects(port: int) -> bool:
    with suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_who_repeats_what_a_worker_has_sent_is_refused(port: int):
    """Every byte of its greeting and its messages, on a connection of their own."""
    first = Notices(SECRET, 0)
    second = Notices(SECRET, 1)
    between = socket.create_server(("127.0.0.1", 0))
    recorded = bytearray()
    with closing(SealedServer(SECRET, first._accept_worker, port)):

        def pass_on() -> None:
            caller, _ = between.accept()
            with caller, socket.create_connection(("127.0.0.1", port)) as real:
                answers = (real, caller, bytearray())
                threading.Thread(target=copy, args=answers, daemon=True).start()
                copy(caller, real, recorded)

        threading.Thread(target=pass_on, daemon=True).start()
        second._add_connection(0, second._call_rank_0(between.getsockname()[1], math.inf))
        second.send_to_all("lost", "1 silence")
        assert first.wait(["lost"], LIMIT_S) == [b"1 silence"]
        first._values.clear()
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as connection:
            replies = connection.makefile("rb")
            with suppress(ConnectionError):  # What was not read is thrown away with a reset.
                connection.sendall(recorded)
                connection.shutdown(socket.SHUT_WR)
                assert len(replies.read()) <= NONCE, "more than a random number"
        second.send_to_all("version", "1")
        assert first.wait(["version"], LIMIT_S) == [b"1"]
        assert first.value_of("lost") is None
    for end in (first, second):
        end.close()
    between.close()


@pytest.mark.parametrize("change", ["repeated", "left out", "changed"])
def test_message_that_is_repeated_left_out_or_changed_on_its_way_ends_the_connection(change: str):
    """And what came before it stands."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    sent, kept = socket.socketpair()
    writer = SealedStream(sent, sent.makefile("rb"), b"key", b"")
    pieces = []
    for number in range(3):
        writer.write(b"message %d" % number)
        pieces.append(kept.recv(2**16))
    if change == "repeated":
        pieces[1:1] = pieces[:1]
    elif change == "left out":
        del pieces[1]
    else:
        pieces[1] = pieces[1][:-1] + b"9"
    line = SealedConnection(SealedStream(ours, ours.makefile("rb"), b"other key", b"key"))
    theirs.sendall(b"".join(pieces))
    assert list(line.messages()) == [b"message 0"]
    for connection in (theirs, sent, kept):
        connection.close()


def copy(source: socket.socket, target: socket.socket, recorded: bytearray) -> None:
    with suppress(OSError):
        while content := source.recv(2**16):
            recorded += content
            target.sendall(content)


@pytest.mark.slow
@DEEDS
def test_intruder_in_the_store_neither_ends_the_run_nor_blames_a_worker(tmp_path: Path, deed: str):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN, rows=(3, 3)))
    ports = tmp_path / "port"
    with by_hand(run, 2, f"{SOON}\n{NOTE.format(str(ports))}") as workers:
        wait_for(run, Step)
        for worker in workers:
            listening = {
                at.laddr.ip
                for at in psutil.Process(worker.pid).net_connections("tcp")
                if at.status == "LISTEN"
            }
            assert listening.isdisjoint({"0.0.0.0", "::"}), "open to all interfaces"
        store = client_of(int(ports.read_text()))
        with pytest.raises(RuntimeError):
            # Torch's server drops who adds to garbage: the workers' own connections must not be
            # those.
            store.set("x", b"garbage")
            store.add("x", 1)
        with Intruder(int(ports.read_text()), deed):
            time.sleep(30)  # SOON makes 6 s of silence a loss.
            before = [event for event in read_events(run.events) if isinstance(event, Step)][-1]
            wait_for(run, Step, after=before.step)
        # Each has it before any acts: a signal to some of them is a preemption.
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
            for worker in workers:
                worker.send_signal(number)
        assert [worker.wait(LIMIT_S) for worker in workers] == [0, 0]
    *_, finished = read_events(run.events)
    assert isinstance(finished, Finished) and finished.reason == "interrupted"


@pytest.mark.slow
def test_a_worker_that_is_lost_while_somebody_writes_into_the_store_is_still_named(tmp_path: Path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN, rows=(3, 3)))
    ports = tmp_path / "port"
    with by_hand(run, 2, f"{SOON}\n{NOTE.format(str(ports))}") as workers:
        wait_for(run, Step)
        with Intruder(int(ports.read_text()), "both") as intruder:
            intruder.after_rounds(20)
            workers[1].kill()
            assert workers[0].wait(LIMIT_S) == 24
        assert "rank 1" in named(run)


def test_a_worker_without_the_secret_is_refused(tmp_path: Path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN, rows=(3, 3)))
    environment = {key: value for key, value in os.environ.items() if key != "FARSPAN_SECRET"}
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for secret in ({}, {"FARSPAN_SECRET": "short"}, {"FARSPAN_SECRET": "-"}):
        done = subprocess.run(
            [sys.executable, "-m", "farspan.runtime.worker", str(run.plan), str(run.path)],
            env={**environment, **place, **secret},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 39
        assert "FARSPAN_SECRET" in done.stderr


def test_rank_0_listens_where_the_others_call_it(monkeypatch: pytest.MonkeyPatch):
    by_name = {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    name, own = next(
        (name, ips[0]) for name, ips in by_name.items() if ips and not ips[0].startswith("127.")
    )
    assert tcp.listen_address("127.0.0.1") == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    assert tcp.listen_address("127.0.0.1") == "127.0.0.1", (
        "workers of one host, whatever its interface"
    )
    assert tcp.listen_address(own) == own
    assert tcp.listen_address("localhost") == own, "a name that leads its own host to loopback"
    assert tcp.listen_address("192.0.2.7") == own, "behind address translation"


# -- shipping
#   ------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN))
    with closing(SealedServer(SECRET, Shipment(run, tmp_path / "corpus").answer)) as made:
        yield made


def offer(port: int) -> ShipmentOffer:
    return ShipmentOffer(plan="", corpus="", address="127.0.0.1", port=port)


def test_plan_and_tokens_are_sent_to_a_peer_with_the_secret(server: SealedServer, tmp_path: Path):
    for part in PART_FILES:
        distribute_files._fetch_part(offer(server.port), part, tmp_path / f"got-{part}", SECRET)
    assert (tmp_path / "got-corpus" / "train.bin").read_bytes() == (
        tmp_path / "corpus" / "train.bin"
    ).read_bytes()
    assert (tmp_path / "got-run" / "plan.json").read_bytes() == (
        tmp_path / "run" / "plan.json"
    ).read_bytes()
    assert server._socket.getsockname()[0] == "127.0.0.1"


def test_peer_without_the_secret_receives_nothing_and_stops_no_server_thread(
    server: SealedServer, tmp_path: Path
):
    for garbage in (b"", b"\xff" * 300, b"0" * 64 + b"run\n", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S) as connection:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            assert len(connection.makefile("rb").read()) == 16, (
                "more than the random number of the greeting"
            )
    for part, secret in (("run", b"another secret of theirs"), ("no such part", SECRET)):
        with pytest.raises(Refusal, match="worker-lost"):
            distribute_files._fetch_part(offer(server.port), part, tmp_path / "got", secret)
    distribute_files._fetch_part(offer(server.port), "run", tmp_path / "got", SECRET)
    assert (tmp_path / "got" / "plan.json").exists()


def test_a_shipment_that_was_changed_on_its_way_is_refused(server: SealedServer, tmp_path: Path):
    """By somebody in between, who flips one bit of it."""
    between = socket.create_server(("127.0.0.1", 0))

    def serve(at: int) -> None:
        caller, _ = between.accept()
        with caller, socket.create_connection(("127.0.0.1", server.port)) as real:
            caller.sendall(real.recv(16))
            real.sendall(caller.recv(200))
            content = bytearray(real.makefile("rb").read())
            content[at % len(content)] ^= 1
            caller.sendall(content)

    for at in (0, 5, 40, 5000, -5):  # The last is of the empty piece at the end.
        threading.Thread(target=serve, args=(at,), daemon=True).start()
        with pytest.raises(Refusal, match="worker-lost"):
            distribute_files._fetch_part(
                offer(between.getsockname()[1]), "corpus", tmp_path / "got", SECRET
            )
        assert not any((tmp_path / "got").glob("*"))
    between.close()


def test_authenticated_stream_written_in_pieces_is_read_complete(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    content = os.urandom(3 * PIECE_BYTES + 17)

    def give(question: str, stream: SealedStream) -> None:
        assert question == "it"
        for start in range(0, len(content), 100_003):
            stream.write(content[start : start + 100_003])
        stream.end()

    with closing(SealedServer(SECRET, give)) as server:
        stream = SealedStream.call(("127.0.0.1", server.port), SECRET, "it")
        with closing(stream):
            found = b"".join(iter(lambda: stream.read(70_001), b""))
    assert found == content


def test_bytes_that_are_signed_with_another_key_are_refused():
    ours, theirs = socket.socketpair()
    with closing(SealedStream(theirs, theirs.makefile("rb"), b"another key", b"")) as stranger:
        stranger.write(b"content")
        with (
            closing(SealedStream(ours, ours.makefile("rb"), b"", b"key")) as stream,
            pytest.raises(Forged),
        ):
            stream.read(1)


# -- what may be seen
#   ------------------------------------------------------------------------------------------------


def test_the_secret_stands_on_no_command_line(tmp_path: Path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN, rows=(3, 3)))
    with tiny.workers(run) as workers:
        for event in workers:
            if isinstance(event, Step):
                lines = [psutil.Process(process.pid).cmdline() for process in workers.processes]
                children = psutil.Process().children(recursive=True)
                lines += [child.cmdline() for child in children if child.is_running()]
                workers.interrupt()
                break
        list(workers)
    assert lines
    assert not [line for line in lines if re.search(r"\b[0-9a-f]{64}\b", " ".join(line))]
