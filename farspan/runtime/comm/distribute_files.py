"""Rank 0's host sends plan and tokens to hosts that lack them: no shared disk is assumed.

Rank 0's run folder is the run. A worker that has another plan in its own run folder, or none,
fetches the files that a worker reads; one that lacks the corpus (known by its hash) fetches the
token files into its cache, where every worker of that host finds them by that hash: no worker
writes the record of a run, which may be rank 0's. One worker a host fetches, the others wait for
it. The files come as `file_transfer` sends them, over a connection that is signed with the secret
of the run.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import time
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import psutil

from farspan.corpus import find_prepared, token_files
from farspan.domain.corpus import TOKEN_FILES, CorpusManifest
from farspan.domain.decoding import decode_json
from farspan.domain.file_transfer import Unexpected, receive_files, send_files
from farspan.domain.own_files import open_own, refuse_link
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder, RunRecord, make_cache_folder
from farspan.domain.struct_files import ContentHash, load
from farspan.runtime.comm.control_channel import Notices
from farspan.runtime.comm.sealed import PIECE_BYTES, QUIET_S, SealedServer, SealedStream

#: Keys of notices.
OFFER = "farspan/offer"
SHARED_NOTICE = "farspan/shared"
#: The files of each part: of a run folder those that a worker reads, and of a corpus.
PART_FILES = {
    "run": ("plan.json", "run.json", "corpus.json", "tokenizer.json", "estimate.json"),
    "corpus": ("corpus.json", *TOKEN_FILES),
}
SHIP_POLL_S = 0.05


class ShipmentOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The notice of rank 0 to the others: what it sends, and where."""

    plan: ContentHash
    corpus: ContentHash
    address: str
    port: int


def share_files(notices: Notices, rank: int, world: int, run: RunFolder) -> None:
    """Wait until every worker has plan and tokens on its own disk, however long sending them over
    a slow link takes. Raises Refusal (worker-lost) for a silent one, and on rank 0 (path-missing,
    corpus-damaged) where it has no corpus to send."""
    if rank == 0:
        _send_to_all(notices, world, run)
    else:
        _fetch_missing(notices, rank, run)
    notices.wait([SHARED_NOTICE])


def _send_to_all(notices: Notices, world: int, run: RunFolder) -> None:
    plan = load(run.plan, Plan)
    corpus = find_prepared.require_corpus(run, plan.inputs.corpus)
    shipment = Shipment(run, corpus)
    with closing(SealedServer(notices.secret, shipment.answer)) as server:
        address = os.environ["MASTER_ADDR"]
        hash_ = plan.inputs.corpus
        offer = ShipmentOffer(plan=plan.hash, corpus=hash_, address=address, port=server.port)
        notices.send_to_all(OFFER, msgspec.json.encode(offer))
        waiting = set(range(1, world))
        seen = 0
        deadline = time.monotonic() + QUIET_S
        while waiting:
            if shipment.damage is not None:
                raise shipment.damage
            done = {rank for rank in waiting if not notices.missing([_has_key(rank)])}
            waiting -= done
            if done or shipment.sent != seen:
                seen = shipment.sent
                deadline = time.monotonic() + QUIET_S
            if waiting and time.monotonic() > deadline:
                lost = min(waiting)
                raise Refusal(
                    "worker-lost",
                    what=f"rank {lost} on {plan.devices[lost].host} was lost",
                    where=f"rank {lost}",
                    fact=f"it has taken nothing of plan and tokens for {QUIET_S:.0f} s",
                    remedy=run.resume_command(),
                )
            time.sleep(SHIP_POLL_S)
    notices.send_to_all(SHARED_NOTICE, b"1")


def _fetch_missing(notices: Notices, rank: int, run: RunFolder) -> None:
    (content,) = notices.wait([OFFER])
    offer = decode_json(content, ShipmentOffer)
    run.make()
    with open_own(run.fetch_lock, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        has_plan = False
        with suppress(Refusal):
            has_plan = run.plan.exists() and load(run.plan, Plan).hash == offer.plan
        if not has_plan:
            _fetch_part(offer, "run", run.path, notices.secret)
        recorded = load(run.record, RunRecord).corpus_folder
        if find_prepared.find_corpus(recorded, offer.corpus) is None:
            folder = make_cache_folder(find_prepared.CORPORA) / find_prepared.sent_name(
                offer.corpus
            )
            refuse_link(folder)
            _fetch_part(offer, "corpus", folder, notices.secret)
            if not find_prepared.is_corpus(folder, offer.corpus):
                raise Refusal(
                    "worker-lost",
                    what="the corpus from rank 0 did not come whole",
                    where=f"{offer.address}:{offer.port}",
                    fact=f"what came is not corpus {offer.corpus}",
                    remedy="see what rank 0 says itself: logs/rank-0.log of the run",
                )
    notices.send_to_all(_has_key(rank), b"1")


def _has_key(rank: int) -> str:
    return f"farspan/has/{rank}"


def _fetch_part(offer: ShipmentOffer, part: str, folder: Path, secret: bytes) -> None:
    """Receive a part next to `folder`, then move its files there. Raises Refusal (worker-lost)
    where what comes is not rank 0's."""
    own = f".{folder.name}.{platform.node()}"  # The folder may lie on a disk that hosts share.
    # Remove the folders of workers that were killed while they fetched.
    for unfinished in folder.parent.glob(f"{own}.*.tmp"):
        pid = int(unfinished.name.split(".")[-2])
        if not psutil.pid_exists(pid):
            shutil.rmtree(unfinished, ignore_errors=True)
    temporary = folder.with_name(f"{own}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        address = offer.address, offer.port
        with closing(SealedStream.call(address, secret, part)) as stream:
            receive_files(stream, temporary, lambda name: name in PART_FILES[part])
            while stream.read(PIECE_BYTES):  # Up to the last piece.
                continue
        folder.mkdir(exist_ok=True)
        files = list(temporary.iterdir())
        # The file that identifies the folder comes last: without it the folder counts as empty.
        files.sort(key=lambda file: file.name in ("plan.json", "corpus.json"))
        for file in files:
            os.replace(file, folder / file.name)
    except Unexpected as error:
        raise Refusal(
            "worker-lost",
            what="the plan and tokens from rank 0 did not come whole",
            where=f"{offer.address}:{offer.port}",
            fact=str(error),
            remedy="see what rank 0 says itself: logs/rank-0.log of the run",
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class Shipment:
    """The parts of one run, sent to workers that ask for them."""

    def __init__(self, run: RunFolder, corpus: Path) -> None:
        self._run = run
        self._folders = {"run": run.path, "corpus": corpus}
        self._streams = list[SealedStream]()
        #: Why the corpus is not sent: a block of it is damaged.
        self.damage: Refusal | None = None

    @property
    def sent(self) -> int:
        """Bytes so far; that it grows shows that a receiver lives."""
        return sum(stream.sent for stream in self._streams)

    def answer(self, part: str, stream: SealedStream) -> None:
        if part not in PART_FILES:
            return
        folder = self._folders[part]
        if part == "corpus":
            # Only a corpus whose every block is what was prepared.
            try:
                manifest = load(folder / "corpus.json", CorpusManifest)
                token_files.verify_corpus(
                    folder, manifest, find_prepared.mending_command(self._run, folder)
                )
            except Refusal as refusal:
                self.damage = refusal
            if self.damage is not None:
                return
        self._streams.append(stream)
        paths = [folder / name for name in PART_FILES[part]]
        send_files(stream, [(path, path.name) for path in paths if path.exists()])
        stream.end()
