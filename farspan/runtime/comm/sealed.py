"""A connection between two workers that both hold the secret of the run: the caller proves it, and
each piece of what both then send carries its signature.

The server sends a random number, the client one of its own and what it asks for, signed over both;
the server then answers that it is ready. What each sends is a series of pieces: a length, a
signature over the piece's number and content, the content; an empty one is the last. The numbers
are new for each connection, so nothing that went over an earlier one can be repeated, left out or
put in another place.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from queue import SimpleQueue
from typing import BinaryIO

from farspan.domain.file_transfer import Unexpected
from farspan.runtime.comm import tcp

#: Bytes of a random number, of a signature, of a length, and of a piece at most.
NONCE = 16
SIGNATURE = 32
FRAME_LENGTH_BYTES = 4
PIECE_BYTES = 2**20
#: The server's word to a caller that it answers.
ACCEPTED = b"!"
#: No byte for this long, also over a link whose queue is full: the other side is gone.
QUIET_S = 30.0
CONNECT_INTERVAL_S = 0.02


class Forged(Unexpected):
    """What came is not signed by a worker of this run, or is not whole."""


def hmac_sign(secret: bytes, *parts: bytes) -> bytes:
    """Return 32 bytes that only a holder of the secret can make for these parts (HMAC-SHA256, RFC
    2104)."""
    content = bytearray()
    for part in parts:
        content += len(part).to_bytes(8, "big") + part
    return hmac.digest(secret, content, hashlib.sha256)


class SealedStream:
    """One end of a connection whose every piece is signed, for its place, by the other end: a file
    to read from, and one to write to."""

    def __init__(
        self, connection: socket.socket, stream: BinaryIO, send_key: bytes, receive_key: bytes
    ) -> None:
        self.connection = connection
        self._stream = stream
        self._send_key = send_key
        self._receive_key = receive_key
        #: Bytes that went through: while it grows the receiver lives.
        self.sent = 0
        self._sent_pieces = 0
        self._received_pieces = 0
        self._buffered = bytearray()
        self._ended = False

    @classmethod
    def call(cls, to: tuple[str, int], secret: bytes, question: str) -> SealedStream:
        """Connect to a `Server` that answers this. Raises OSError or Forged."""
        connection = socket.create_connection(to, timeout=QUIET_S)
        stream = connection.makefile("rb")
        try:
            theirs = _read_exactly(stream, NONCE)
            ours = os.urandom(NONCE)
            line = f"{question}\n".encode()
            signature = hmac_sign(secret, b"ask", theirs, ours, line)
            connection.sendall(ours + signature + line)
            if _read_exactly(stream, 1) != ACCEPTED:
                raise Forged("the server does not take it")
        except BaseException:
            stream.close()
            connection.close()
            raise
        key = hmac_sign(secret, b"answer", theirs, ours, line)
        return cls(connection, stream, send_key=key, receive_key=hmac_sign(secret, b"reply", key))

    @classmethod
    def take(cls, connection: socket.socket, secret: bytes) -> tuple[str, SealedStream]:
        """Return a caller's request, and the server's end of the connection. Raises OSError or
        Forged."""
        connection.settimeout(QUIET_S)
        ours = os.urandom(NONCE)
        stream = connection.makefile("rb")
        try:
            connection.sendall(ours)
            theirs = _read_exactly(stream, NONCE)
            signature = _read_exactly(stream, SIGNATURE)
            line = stream.readline(200)
            if not hmac.compare_digest(signature, hmac_sign(secret, b"ask", ours, theirs, line)):
                raise Forged("what was asked for is not signed with this run's secret")
            connection.sendall(ACCEPTED)
        except BaseException:
            stream.close()
            raise
        key = hmac_sign(secret, b"answer", ours, theirs, line)
        ends = cls(connection, stream, send_key=hmac_sign(secret, b"reply", key), receive_key=key)
        return line.decode(errors="replace").strip(), ends

    def write(self, content: bytes) -> int:
        for start in range(0, len(content), PIECE_BYTES):
            self._send_piece(content[start : start + PIECE_BYTES])
        return len(content)

    def end(self) -> None:
        """Mark the end of what this side sends."""
        self._send_piece(b"")

    def _send_piece(self, piece: bytes) -> None:
        length = len(piece)
        signature = hmac_sign(self._send_key, b"%d" % self._sent_pieces, piece)
        self.connection.sendall(length.to_bytes(FRAME_LENGTH_BYTES, "big") + signature + piece)
        self.sent += length
        self._sent_pieces += 1

    def read(self, size: int) -> bytes:
        """Return the next bytes, fewer only at the end. Raises Forged."""
        while len(self._buffered) < size and not self._ended:
            piece = self._read_piece()
            self._buffered += piece
            self._ended = not piece
        content = bytes(self._buffered[:size])
        del self._buffered[:size]
        return content

    def pieces(self) -> Iterator[bytes]:
        """Yield the pieces up to the other side's last one. Raises Forged."""
        while piece := self._read_piece():
            yield piece

    def _read_piece(self) -> bytes:
        length = int.from_bytes(_read_exactly(self._stream, FRAME_LENGTH_BYTES), "big")
        if length > PIECE_BYTES:
            raise Forged(f"a piece of {length} bytes")
        signature = _read_exactly(self._stream, SIGNATURE)
        piece = _read_exactly(self._stream, length)
        count = self._received_pieces
        expected = hmac_sign(self._receive_key, b"%d" % count, piece)
        if not hmac.compare_digest(signature, expected):
            raise Forged(f"piece {count} is not signed with this run's secret")
        self._received_pieces += 1
        return piece

    def close(self) -> None:
        self._stream.close()
        self.connection.close()


class SealedServer:
    """Answers callers that hold the secret, at a port where the others reach rank 0.

    Each question is answered on a thread of its own. Its connection ends with the answer, also
    where that fails.
    """

    def __init__(
        self, secret: bytes, answer: Callable[[str, SealedStream], None], port: int = 0
    ) -> None:
        self._secret = secret
        self._answer = answer
        address = tcp.listen_address(os.environ["MASTER_ADDR"])
        self._socket = socket.create_server((address, port))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept_callers, daemon=True).start()

    def _accept_callers(self) -> None:
        while self._socket.fileno() != -1:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # Closed; or the caller has gone, or there are too many.
                time.sleep(CONNECT_INTERVAL_S)
                continue
            threading.Thread(target=self._answer_caller, args=(connection,), daemon=True).start()

    def _answer_caller(self, connection: socket.socket) -> None:
        # A caller may send anything, or go away.
        with suppress(OSError, ValueError, Forged), connection:
            question, stream = SealedStream.take(connection, self._secret)
            with closing(stream):
                self._answer(question, stream)

    def close(self) -> None:
        with suppress(OSError):  # macOS refuses it to a socket that nobody is connected to.
            self._socket.shutdown(socket.SHUT_RDWR)  # `close` does not wake `accept`.
        self._socket.close()


class SealedConnection:
    """Messages of up to PIECE bytes both ways over a stream.

    A send never waits for the other side: what that does not take yet is kept.
    """

    def __init__(self, stream: SealedStream) -> None:
        stream.connection.settimeout(None)
        stream.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = stream
        #: An empty one is the last.
        self._unsent: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=self._send_all, daemon=True).start()

    def send(self, message: bytes) -> None:
        self._unsent.put(message)

    def messages(self) -> Iterator[bytes]:
        """Yield the other side's data until the connection ends, which a piece that is not
        signed for its place ends, too."""
        try:
            with suppress(OSError, Forged):
                yield from self._stream.pieces()
        finally:
            self.close()
            self._stream.close()

    def close(self) -> None:
        self._unsent.put(b"")
        with suppress(OSError):  # It has ended already.
            # Wakes the thread that waits in `messages`.
            self._stream.connection.shutdown(socket.SHUT_RDWR)
        self._stream.connection.close()

    def _send_all(self) -> None:
        with suppress(OSError):  # The other side is gone, which `messages` notices.
            while message := self._unsent.get():
                self._stream.write(message)


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise Forged("the connection ended early")
    return content
