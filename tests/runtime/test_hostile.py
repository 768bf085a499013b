"""What others on the network can do to a run, and a worker of it to the others: nothing but be
refused."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from farspan.domain.problems import Refusal
from farspan.domain.results import Finished, Step, read_events
from farspan.runtime.comm import ship, tcp
from farspan.runtime.comm.notices import Notices
from farspan.runtime.comm.sealed import PIECE, Forged, Reader, Writer, answer, asked_for
from farspan.runtime.comm.ship import NAMES, ShipmentOffer
from tests import tiny
from tests.runtime import jobs
from tests.runtime.fleet import Failed, Fleet
from tests.runtime.plans import HAND_PICKED
from tests.runtime.test_by_hand import LIMIT_S, SOON, TRAIN, by_hand, named, wait_for
from tests.runtime.verify import Case

SECRET = b"the secret of this run"


def test_a_hostile_peer_runs_nothing_on_the_others(fleet: Fleet, folder: Path):
    plan, marker = HAND_PICKED["zero 3"], folder / "ran"
    case = Case(folder, plan)
    with pytest.raises(Failed, match="rank 0"):
        fleet.run(jobs.build_beside_a_hostile_peer, case.world, plan, case.path, marker)
    assert not marker.exists()


# -- the store
#   ------------------------------------------------------------------------------------------------


@pytest.fixture
def notices(tmp_path: Path) -> Notices:
    return Notices(dist.FileStore(str(tmp_path / "store"), 1), SECRET)


def test_notices_without_a_signature_by_the_secret_are_ignored(notices: Notices, tmp_path: Path):
    other = Notices(dist.FileStore(str(tmp_path / "store"), 1), b"another secret of theirs")
    other.say("lost", "1 silence")
    assert notices.heard("lost") is None
    notices.say("beats", "7")
    for name in notices.store.list_keys():
        if notices.store.get(name) == notices._signed("beats", "7").encode():
            for garbage in (b"", b"\xff\x00", b"8", b"f" * 64 + b" 8"):
                notices.store.set(name, garbage)
                assert notices.heard("beats") is None
                assert notices.missing(["beats"]) == ["beats"]
            break
    else:
        raise AssertionError("the key is not there")
    with pytest.raises(TimeoutError):
        notices.wait(["beats"], 0.1)
    # Of another key it is no better than garbage, and who says something first is not held up by
    # it.
    notices.store.set(notices._name("lost"), notices._signed("beats", "7"))
    assert notices.heard("lost") is None
    assert notices.say_first("lost", "2 connection") == b"2 connection"
    assert notices.say_first("lost", "3 connection") == b"2 connection"


def attack(store: dist.TCPStore, until: float) -> None:
    """All that somebody who reaches the store may think of, over and over."""
    while time.monotonic() < until:
        for key in ("farspan/lost", "farspan/beats/0", "farspan/beats/1", *store.list_keys()):
            for value in (b"1 silence", b"", b"\xff\xfe", b"0" * 500, str(10**9).encode()):
                store.set(key, value)
            if "beats" in key:
                store.delete_key(key)
        time.sleep(0.05)


@pytest.mark.slow
def test_hostile_client_of_the_store_neither_ends_the_run_nor_blames_a_worker(tmp_path: Path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN, rows=(3, 3)))
    ports = tmp_path / "port"
    note = f"open({str(ports)!r}, 'w').write(os.environ['MASTER_PORT'])"
    with by_hand(run, 2, f"{SOON}\n{note}") as workers:
        wait_for(run, Step)
        for worker in workers:
            listening = {
                at.laddr.ip
                for at in psutil.Process(worker.pid).net_connections("tcp")
                if at.status == "LISTEN"
            }
            assert listening.isdisjoint({"0.0.0.0", "::"}), "open to all interfaces"
        store = dist.TCPStore(
            "127.0.0.1", int(ports.read_text()), None, False, timedelta(seconds=LIMIT_S)
        )
        with pytest.raises(RuntimeError):
            # Torch's server drops who adds to garbage: the workers' own connections must not be
            # those.
            store.set("x", b"garbage")
            store.add("x", 1)
        store = dist.TCPStore(
            "127.0.0.1", int(ports.read_text()), None, False, timedelta(seconds=LIMIT_S)
        )
        attack(store, time.monotonic() + 15)  # SOON makes 6 s of silence a loss.
        before = [event for event in read_events(run.events) if isinstance(event, Step)][-1].step
        wait_for(run, Step, after=before)
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        assert [worker.wait(LIMIT_S) for worker in workers] == [0, 0]
    *_, finished = read_events(run.events)
    assert isinstance(finished, Finished) and finished.reason == "interrupted"


@pytest.mark.slow
def test_a_worker_that_is_lost_while_somebody_writes_into_the_store_is_still_named(tmp_path: Path):
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN, rows=(3, 3)))
    ports = tmp_path / "port"
    with by_hand(
        run, 2, f"{SOON}\nopen({str(ports)!r}, 'w').write(os.environ['MASTER_PORT'])"
    ) as workers:
        wait_for(run, Step)
        store = dist.TCPStore(
            "127.0.0.1", int(ports.read_text()), None, False, timedelta(seconds=LIMIT_S)
        )
        store.set("farspan/lost", b"0 silence")
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
    assert tcp.listening("127.0.0.1") == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    assert tcp.listening("127.0.0.1") == "127.0.0.1", "workers of one host, whatever its interface"
    assert tcp.listening(own) == own
    assert tcp.listening("localhost") == own, "a name that leads its own host to loopback"
    assert tcp.listening("192.0.2.7") == own, "behind address translation"


# -- shipping
#   ------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    run = tiny.run_folder(tmp_path / "run", tiny.plan(TRAIN))
    with ship._Server(run, tmp_path / "corpus", SECRET) as made:
        yield made


def offer(port: int) -> ShipmentOffer:
    return ShipmentOffer(plan="", corpus="", address="127.0.0.1", port=port)


def test_plan_and_tokens_are_sent_to_a_peer_with_the_secret(server: ship._Server, tmp_path: Path):
    for part in NAMES:
        ship._fetch(offer(server.port), part, tmp_path / f"got-{part}", SECRET)
    assert (tmp_path / "got-corpus" / "train.bin").read_bytes() == (
        tmp_path / "corpus" / "train.bin"
    ).read_bytes()
    assert (tmp_path / "got-run" / "plan.json").read_bytes() == (
        tmp_path / "run" / "plan.json"
    ).read_bytes()
    assert server._socket.getsockname()[0] == "127.0.0.1"
    assert server.sent > 0


def test_peer_without_the_secret_receives_nothing_and_stops_no_server_thread(
    server: ship._Server, tmp_path: Path
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
            ship._fetch(offer(server.port), part, tmp_path / "got", secret)
    ship._fetch(offer(server.port), "run", tmp_path / "got", SECRET)
    assert (tmp_path / "got" / "plan.json").exists()


def test_a_shipment_that_was_changed_on_its_way_is_refused(server: ship._Server, tmp_path: Path):
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
            ship._fetch(offer(between.getsockname()[1]), "corpus", tmp_path / "got", SECRET)
        assert not any((tmp_path / "got").glob("*"))
    between.close()


def test_authenticated_stream_written_in_pieces_is_read_complete():
    ours, theirs = socket.socketpair()
    content = os.urandom(3 * PIECE + 17)

    def give() -> None:
        what, key = asked_for(theirs, SECRET)
        assert what == "it"
        with theirs:
            writer = Writer(theirs, key)
            for start in range(0, len(content), 100_003):
                writer.write(content[start : start + 100_003])
            writer.close()

    giver = threading.Thread(target=give)
    giver.start()
    with answer(ours, SECRET, "it") as reader:
        found = b"".join(iter(lambda: reader.read(70_001), b""))
    giver.join(LIMIT_S)
    assert found == content
    with pytest.raises(Forged):
        Reader(ours.makefile("rb"), b"key").read(1)
    ours.close()


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
