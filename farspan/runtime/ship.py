"""Rank 0's host sends plan and tokens to hosts that lack them: no shared disk is assumed.

Rank 0's run folder is the run. A worker whose own run folder holds another plan, or none, fetches the files that a
worker reads; one that lacks the corpus (known by its hash) fetches the token files into its cache. One worker a host
fetches, the others wait for it. The stream is a tar over TCP, opened by a secret that only the workers' store holds.
"""

from __future__ import annotations

import fcntl
import os
import platform
import secrets
import shutil
import socket
import tarfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import torch.distributed as dist

from farspan.corpus.tokens import TokenFile
from farspan.domain.codec import load, save
from farspan.domain.corpus import TOKEN_FILES, CorpusManifest
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder, RunRecord, cache_folder

#: No byte for this long: the receiver is gone.
QUIET_S = 30.0
POLL_S = 0.05


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells the others through the store."""

    plan: str
    corpus: str
    address: str
    port: int
    secret: str


def share(store: dist.Store, rank: int, world: int, run: RunFolder) -> None:
    """Returns when every worker has plan and tokens on its own disk. Raises Refusal (worker-lost) for a silent one."""
    if rank == 0:
        _give(store, world, run)
    else:
        _take(store, rank, run)
    _await(store, "shared")


def _give(store: dist.Store, world: int, run: RunFolder) -> None:
    plan, corpus = load(run.plan, Plan), load(run.record, RunRecord).corpus_folder
    with _Server(run, corpus) as server:
        store.set("offer", msgspec.json.encode(Offer(
            plan=plan.hash, corpus=plan.inputs.corpus, address=os.environ["MASTER_ADDR"], port=server.port,
            secret=server.secret,
        )))  # fmt: skip
        waiting, seen, deadline = set(range(1, world)), 0, time.monotonic() + QUIET_S
        while waiting:
            done = {rank for rank in waiting if store.check([f"has/{rank}"])}
            waiting -= done
            if done or server.sent != seen:
                seen, deadline = server.sent, time.monotonic() + QUIET_S
            if waiting and time.monotonic() > deadline:
                lost = min(waiting)
                raise Refusal(
                    "worker-lost", what=f"rank {lost} on {plan.devices[lost].host} was lost",
                    where=f"rank {lost}", fact=f"it has taken nothing of plan and tokens for {QUIET_S:.0f} s",
                    remedy=run.resume(),
                )  # fmt: skip
            time.sleep(POLL_S)
    store.set("shared", b"1")


def _take(store: dist.Store, rank: int, run: RunFolder) -> None:
    _await(store, "offer")
    offer = msgspec.json.decode(store.get("offer"), type=Offer)
    run.path.mkdir(parents=True, exist_ok=True)
    with open(run.path / ".fetch.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_plan(run.plan, offer.plan):
            _fetch(offer, "run", run.path)
        record = load(run.record, RunRecord)
        if not _is_corpus(record.corpus_folder, offer.corpus):
            folder = cache_folder() / "corpora" / f"sent-{offer.corpus}"
            if not _is_corpus(folder, offer.corpus):
                _fetch(offer, "corpus", folder)
            save(msgspec.structs.replace(record, corpus=str(folder)), run.record)
    store.set(f"has/{rank}", b"1")


def _await(store: dist.Store, key: str) -> None:
    """Wait for a key for as long as the store lives: sending a corpus over a slow link takes what it takes."""
    while not store.check([key]):
        time.sleep(POLL_S)


def _is_plan(path: Path, digest: str) -> bool:
    with suppress(Refusal):
        return path.exists() and load(path, Plan).hash == digest
    return False


def _is_corpus(folder: Path, digest: str) -> bool:
    with suppress(Refusal):
        manifest = load(folder / "corpus.json", CorpusManifest) if (folder / "corpus.json").exists() else None
        if manifest is None or manifest.hash != digest:
            return False
        TokenFile.open(folder, "train", manifest)
        TokenFile.open(folder, "val", manifest)
        return True
    return False


def _fetch(offer: Offer, part: str, folder: Path) -> None:
    """Receive a part beside `folder`, then move its files there."""
    own = f".{folder.name}.{platform.node()}"  # The folder may lie on a disk that hosts share.
    for left in folder.parent.glob(f"{own}.*.tmp"):  # By a worker that was killed while it fetched.
        if not psutil.pid_exists(int(left.name.split(".")[-2])):
            shutil.rmtree(left, ignore_errors=True)
    temporary = folder.with_name(f"{own}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        with socket.create_connection((offer.address, offer.port), timeout=QUIET_S) as connection:
            connection.sendall(f"{offer.secret} {part}\n".encode())
            with connection.makefile("rb") as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
                archive.extractall(temporary, filter="data")
        folder.mkdir(exist_ok=True)
        # The file that says what the folder is comes last: without it the folder counts as empty.
        for file in sorted(temporary.iterdir(), key=lambda file: file.name in ("plan.json", "corpus.json")):
            os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class _Server:
    """Sends the parts of one run to whoever knows the secret, as long as the `with` lasts."""

    def __init__(self, run: RunFolder, corpus: Path) -> None:
        self.secret, self.sent = secrets.token_hex(16), 0
        self._parts = {
            "run": [run.plan, run.record, run.corpus, run.tokenizer, run.estimate],
            "corpus": [corpus / "corpus.json", *(corpus / name for name in TOKEN_FILES)],
        }
        self._socket = socket.create_server(("", 0))
        self.port = int(self._socket.getsockname()[1])

    def __enter__(self) -> _Server:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def _accept(self) -> None:
        with suppress(OSError):  # Closed at the end of the `with`.
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        # A receiver that goes away ends its own fetch with a message.
        with suppress(OSError), connection, connection.makefile("rb") as question:
            connection.settimeout(QUIET_S)
            secret, _, part = question.readline(200).decode(errors="replace").strip().partition(" ")
            if not secrets.compare_digest(secret.encode(), self.secret.encode()):
                return
            with tarfile.open(fileobj=_Counted(connection, self), mode="w|") as archive:
                for path in self._parts[part]:
                    if path.exists():
                        archive.add(path, arcname=path.name)

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # macOS refuses it to a socket that nobody is connected to.
            self._socket.shutdown(socket.SHUT_RDWR)  # Who waits in `accept` is not woken by `close`.
        self._socket.close()


class _Counted:
    """The writing end of a connection; what went through shows that the receiver lives."""

    def __init__(self, connection: socket.socket, server: _Server) -> None:
        self._connection, self._server = connection, server

    def write(self, content: bytes) -> int:
        self._connection.sendall(content)
        self._server.sent += len(content)
        return len(content)
