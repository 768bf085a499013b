"""Rank 0's host sends plan and tokens to hosts that lack them: no shared disk is assumed.

Rank 0's run folder is the run. A worker whose own run folder holds another plan, or none, fetches
the files that a worker reads; one that lacks the corpus (known by its hash) fetches the token files
into its cache, where every worker of that host finds them by that hash: no worker writes the record
of a run, which may be rank 0's. One worker a host fetches, the others wait for it. The stream is a
tar over TCP, signed with the secret of the run both ways (`sealed`).
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import socket
import tarfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from farspan.corpus import find, tokens
from farspan.domain.codec import ContentHash, load
from farspan.domain.corpus import TOKEN_FILES, CorpusManifest
from farspan.domain.own_files import open_own, refuse_link
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder, RunRecord, make_cache_folder
from farspan.runtime.comm import sealed, tcp
from farspan.runtime.comm.notices import Notices

#: Keys of what the workers tell each other.
OFFER, SHARED = "farspan/offer", "farspan/shared"
#: The files of each part: of a run folder those that a worker reads, and of a corpus.
NAMES = {
    "run": ("plan.json", "run.json", "corpus.json", "tokenizer.json", "estimate.json"),
    "corpus": ("corpus.json", *TOKEN_FILES),
}
#: No byte for this long: the receiver is gone.
QUIET_S = 30.0
POLL_S = 0.05


class ShipmentOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells the others."""

    plan: ContentHash
    corpus: ContentHash
    address: str
    port: int


def share(notices: Notices, rank: int, world: int, run: RunFolder) -> None:
    """Returns when every worker has plan and tokens on its own disk, however long sending them over
    a slow link takes. Raises Refusal (worker-lost) for a silent one, and on rank 0 (path-missing,
    corpus-damaged) where it has no corpus to send."""
    if rank == 0:
        _give(notices, world, run)
    else:
        _take(notices, rank, run)
    notices.wait([SHARED])


def _give(notices: Notices, world: int, run: RunFolder) -> None:
    plan = load(run.plan, Plan)
    corpus = find.require_corpus(run, plan.inputs.corpus)
    with _Server(run, corpus, notices.secret) as server:
        address = os.environ["MASTER_ADDR"]
        offer = ShipmentOffer(
            plan=plan.hash, corpus=plan.inputs.corpus, address=address, port=server.port
        )
        notices.say(OFFER, msgspec.json.encode(offer))
        waiting, seen, deadline = set(range(1, world)), 0, time.monotonic() + QUIET_S
        while waiting:
            if server.damage is not None:
                raise server.damage
            done = {rank for rank in waiting if notices.heard(_has(rank)) is not None}
            waiting -= done
            if done or server.sent != seen:
                seen, deadline = server.sent, time.monotonic() + QUIET_S
            if waiting and time.monotonic() > deadline:
                lost = min(waiting)
                raise Refusal(
                    "worker-lost",
                    what=f"rank {lost} on {plan.devices[lost].host} was lost",
                    where=f"rank {lost}",
                    fact=f"it has taken nothing of plan and tokens for {QUIET_S:.0f} s",
                    remedy=run.resume(),
                )
            time.sleep(POLL_S)
    notices.say(SHARED, b"1")


def _take(notices: Notices, rank: int, run: RunFolder) -> None:
    offer = msgspec.json.decode(notices.wait([OFFER])[0], type=ShipmentOffer)
    run.make()
    with open_own(run.fetch_lock, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_plan(run.plan, offer.plan):
            _fetch(offer, "run", run.path, notices.secret)
        recorded = load(run.record, RunRecord).corpus_folder
        if find.find_corpus(recorded, offer.corpus) is None:
            folder = make_cache_folder(find.CORPORA) / find.sent_name(offer.corpus)
            refuse_link(folder)
            _fetch(offer, "corpus", folder, notices.secret)
            _require_sent(folder, offer)
    notices.say(_has(rank), b"1")


def _has(rank: int) -> str:
    return f"farspan/has/{rank}"


def _is_plan(path: Path, digest: str) -> bool:
    with suppress(Refusal):
        return path.exists() and load(path, Plan).hash == digest
    return False


def _require_sent(folder: Path, offer: ShipmentOffer) -> None:
    """Raises Refusal (worker-lost) where rank 0 has not sent every file of the corpus."""
    if not find.is_corpus(folder, offer.corpus):
        raise Refusal(
            "worker-lost",
            what="the corpus from rank 0 did not come whole",
            where=f"{offer.address}:{offer.port}",
            fact=f"what came is not corpus {offer.corpus}",
            remedy="see what rank 0 says itself: logs/rank-0.log of the run",
        )


def _fetch(offer: ShipmentOffer, part: str, folder: Path, secret: bytes) -> None:
    """Receive a part beside `folder`, then move its files there. Raises Refusal (worker-lost) where
    what comes is not rank 0's."""
    own = f".{folder.name}.{platform.node()}"  # The folder may lie on a disk that hosts share.
    for left in folder.parent.glob(f"{own}.*.tmp"):  # By a worker that was killed while it fetched.
        if not psutil.pid_exists(int(left.name.split(".")[-2])):
            shutil.rmtree(left, ignore_errors=True)
    temporary = folder.with_name(f"{own}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        with (
            socket.create_connection((offer.address, offer.port), timeout=QUIET_S) as connection,
            sealed.answer(connection, secret, part) as stream,
            tarfile.open(fileobj=stream, mode="r|") as archive,
        ):
            for member in archive:
                if not member.isreg() or member.name not in NAMES[part]:
                    raise sealed.Forged(f"it holds {member.name!r}")
                archive.extract(member, temporary, filter="data")
            while stream.read(sealed.PIECE):  # To the piece that says that this is all.
                continue
        folder.mkdir(exist_ok=True)
        # The file that says what the folder is comes last: without it the folder counts as empty.
        for file in sorted(
            temporary.iterdir(), key=lambda file: file.name in ("plan.json", "corpus.json")
        ):
            os.replace(file, folder / file.name)
    except (sealed.Forged, tarfile.TarError) as error:
        raise Refusal(
            "worker-lost",
            what="the plan and tokens from rank 0 did not come whole",
            where=f"{offer.address}:{offer.port}",
            fact=str(error),
            remedy="see what rank 0 says itself: logs/rank-0.log of the run",
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class _Server:
    """Sends the parts of one run to who holds its secret, as long as the `with` lasts."""

    def __init__(self, run: RunFolder, corpus: Path, secret: bytes) -> None:
        self._secret, self._writers, self._closed = secret, list[sealed.Writer](), False
        self._run, self._folders = run, {"run": run.path, "corpus": corpus}
        #: Why the corpus is not sent: a block of it is damaged.
        self.damage: Refusal | None = None
        self._socket = socket.create_server((tcp.listening(os.environ["MASTER_ADDR"]), 0))
        self.port = int(self._socket.getsockname()[1])

    @property
    def sent(self) -> int:
        """Bytes so far; that it grows shows that a receiver lives."""
        return sum(writer.sent for writer in self._writers)

    def __enter__(self) -> _Server:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except (
                OSError
            ):  # Closed at the end of the `with`; or who called has gone, or there are too many.
                time.sleep(POLL_S)
                continue
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        # A receiver that goes away ends its own fetch with a message; others may say what they
        # like.
        with suppress(OSError, sealed.Forged), connection:
            connection.settimeout(QUIET_S)
            part, key = sealed.asked_for(connection, self._secret)
            if part not in NAMES or (part == "corpus" and not self._is_sound()):
                return
            self._writers.append(writer := sealed.Writer(connection, key))
            with tarfile.open(fileobj=writer, mode="w|", bufsize=sealed.PIECE) as archive:
                for name in NAMES[part]:
                    if (path := self._folders[part] / name).exists():
                        archive.add(path.resolve(), arcname=name)
            writer.close()

    def _is_sound(self) -> bool:
        """Whether every block of the corpus is what was prepared."""
        folder = self._folders["corpus"]
        try:
            manifest = load(folder / "corpus.json", CorpusManifest)
            tokens.verify(folder, manifest, find.mending_command(self._run, folder))
        except Refusal as refusal:
            self.damage = refusal
        return self.damage is None

    def __exit__(self, *error: object) -> None:
        self._closed = True
        with suppress(OSError):  # macOS refuses it to a socket that nobody is connected to.
            self._socket.shutdown(
                socket.SHUT_RDWR
            )  # Who waits in `accept` is not woken by `close`.
        self._socket.close()
