"""Which workers see rank 0's folder of checkpoints: they read and write there. The others send rank
0 their parts, and are sent what they need.

The bytes of a part that is sent are those of its file, so that it never lies on the disk of a host
that may vanish with it. They go over a connection that is signed with the secret of the run.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import msgspec

from farspan.domain.codec import write_atomically
from farspan.domain.own_files import open_own
from farspan.runtime.checkpoint import checkpoint
from farspan.runtime.checkpoint.stored import OwnedSlice, put_slices
from farspan.runtime.comm.collective import Group
from farspan.runtime.comm.sealed import Forged, SealedStream, Server

#: What a worker asks rank 0 to take, before its rank; and rank 0's word that it lies on its disk.
QUESTION, WRITTEN = "part", b"+"


class SharedFolder:
    """The folder as one worker has it; `meet` is called by all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: The ranks that see it.
        self.near = frozenset([0])
        #: On rank 0, the checkpoint that parts of the others belong to.
        self.receiving = path
        self._server: Server | None = None
        self._rank_0 = "", 0
        self._met = False

    def meet(self, group: Group) -> None:
        """Find out, once, which workers see rank 0's folder of checkpoints: they read and write
        there themselves."""
        if group.world == 1 or self._met:
            return
        self._met, mark = True, b""
        if group.rank == 0:
            mark = f".here-{secrets.token_hex(8)}".encode()
            with suppress(OSError):  # Then nobody sees it, and the first save says why.
                self.path.mkdir(exist_ok=True)
                (self.path / mark.decode()).touch(exist_ok=False)
        path = self.path / group.share(mark).decode()
        sees = group.rank == 0 or path.exists()
        self.near = frozenset(rank for rank, seen in enumerate(group.gather(float(sees))) if seen)
        if group.rank == 0:
            path.unlink(missing_ok=True)
        if len(self.near) < group.world:
            if group.rank == 0:
                self._server = Server(group.secret, self._receive)
            port = group.sum(float(self._server.port) if self._server else 0.0)[0]
            self._rank_0 = group.rank_0, int(port)

    def send_part(self, group: Group, slices: Sequence[OwnedSlice]) -> None:
        """Send a worker's part to rank 0, and wait until it lies on the disk there. Raises
        OSError."""
        failed = f"rank 0 could not write the part of rank {group.rank}"
        try:
            stream = SealedStream.call(self._rank_0, group.secret, f"{QUESTION} {group.rank}")
            with closing(stream):
                name = checkpoint.part_name(group.rank)
                listing = put_slices(slices, name, lambda content: stream.write(bytes(content)))
                stream.end()
                stream.write(msgspec.json.encode(listing))
                stream.end()
                if stream.read(1) != WRITTEN:
                    raise OSError(failed)
        except Forged as error:
            raise OSError(f"{failed}: {error}") from None

    def _receive(self, question: str, stream: SealedStream) -> None:
        """Write a part that comes beside rank 0's own."""
        word, _, number = question.partition(" ")
        if word != QUESTION:
            return
        file = checkpoint.unfinished(self.receiving) / checkpoint.part_name(int(number))
        with open_own(file, "wb") as target:
            target.writelines(stream.pieces())
            target.flush()
            os.fsync(target.fileno())
        write_atomically(file.with_suffix(".json"), b"".join(stream.pieces()))
        stream.write(WRITTEN)
        stream.end()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
