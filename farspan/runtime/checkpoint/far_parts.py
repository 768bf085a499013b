"""Parts of a checkpoint of workers that do not see rank 0's folder: sent there over a connection of
their own.

The bytes are those of the file, so that a part never lies on the disk of a host that may vanish
with it. Each piece is signed with the secret of the run (`comm.sealed`).
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from farspan.domain.codec import write_atomically
from farspan.domain.own_files import open_own
from farspan.runtime.checkpoint import checkpoint
from farspan.runtime.checkpoint.stored import OwnedSlice, put_slices
from farspan.runtime.comm import sealed, tcp
from farspan.runtime.comm.sealed import sign

#: No byte for this long: the other side is gone.
QUIET_S = 30.0


def send_part(to: tuple[str, int], secret: bytes, rank: int, slices: Sequence[OwnedSlice]) -> None:
    """Send a worker's part to rank 0, and wait until it lies on the disk there. Raises OSError."""
    name = checkpoint.part_name(rank)
    try:
        with (
            socket.create_connection(to, timeout=QUIET_S) as connection,
            connection.makefile("rb") as stream,
        ):
            key = sealed.greet(connection, stream, secret, f"part {rank}")
            writer = sealed.Writer(connection, key)
            listing = put_slices(slices, name, lambda content: writer.write(bytes(content)))
            writer.close()
            writer.write(msgspec.json.encode(listing))
            writer.close()
            if sealed.Reader(stream, sign(secret, b"reply", key)).read(1) != b"+":
                raise OSError(f"rank 0 could not write the part of rank {rank}")
    except sealed.Forged as error:
        raise OSError(f"rank 0 could not write the part of rank {rank}: {error}") from None


class PartReceiver:
    """Rank 0's end: writes what comes beside its own part of the checkpoint at `path`."""

    def __init__(self, secret: bytes) -> None:
        self._secret, self.path = secret, Path()
        self._closed = False
        self._socket = socket.create_server((tcp.listening(os.environ["MASTER_ADDR"]), 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            with suppress(OSError):  # Closed; or who called has gone.
                connection, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        # Who sends hears by the end of the connection that its part was not written.
        with suppress(OSError, ValueError, sealed.Forged), connection:
            connection.settimeout(QUIET_S)
            question, key = sealed.asked_for(connection, self._secret)
            word, _, number = question.partition(" ")
            if word != "part":
                return
            answer = sealed.Writer(connection, sign(self._secret, b"reply", key))
            with connection.makefile("rb") as stream:
                sealed.invite(connection)
                reader = sealed.Reader(stream, key)
                file = checkpoint.unfinished(self.path) / checkpoint.part_name(int(number))
                with open_own(file, "wb") as target:
                    while piece := reader.read(sealed.PIECE):
                        target.write(piece)
                    target.flush()
                    os.fsync(target.fileno())
                reader.again()
                listing = bytearray()
                while piece := reader.read(sealed.PIECE):
                    listing += piece
                write_atomically(file.with_suffix(".json"), bytes(listing))
                answer.write(b"+")
                answer.close()

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):  # macOS refuses it to a socket that nobody is connected to.
            self._socket.shutdown(
                socket.SHUT_RDWR
            )  # Who waits in `accept` is not woken by `close`.
        self._socket.close()
