"""A connection between two workers that both hold the secret of the run: who calls proves it, and
each piece of what comes back carries its signature.

The server sends a random number, the client one of its own and what it asks for, signed over both.
The answer is a series of pieces: a length, a signature over the piece's number and content, the
content; an empty one is the last. The numbers are new for each connection, so nothing that went
over an earlier one can be repeated, left out or put in another place.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import BinaryIO

#: Bytes of a random number, of a signature, of a length, and of a piece at most.
NONCE, SIGNATURE, LENGTH, PIECE = 16, 32, 4, 2**20
#: A greeting takes at most so long, also over a line whose queue is full.
GREETING_S = 30.0


class Forged(Exception):
    """What came is not signed by a worker of this run, or is not whole."""


def sign(secret: bytes, *parts: bytes) -> bytes:
    """32 bytes that only a holder of the secret can make for these parts (HMAC-SHA256, RFC
    2104)."""
    content = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(secret, content, hashlib.sha256)


def asked_for(connection: socket.socket, secret: bytes) -> tuple[str, bytes]:
    """The server's end of a greeting: what is asked for, and the key of the answer. Raises
    Forged."""
    ours = os.urandom(NONCE)
    connection.sendall(ours)
    with connection.makefile("rb") as stream:
        theirs, signature = _exactly(stream, NONCE), _exactly(stream, SIGNATURE)
        question = stream.readline(200)
    if not hmac.compare_digest(signature, sign(secret, b"ask", ours, theirs, question)):
        raise Forged("what was asked for is not signed with this run's secret")
    return question.decode(errors="replace").strip(), sign(
        secret, b"answer", ours, theirs, question
    )


#: What a server that takes files says when it is ready: before, what comes would be lost in the
#: greeting.
READY = b"!"


def greet(connection: socket.socket, stream: BinaryIO, secret: bytes, question: str) -> bytes:
    """The client's end of a greeting to a server that will `invite` it to send: the key of what
    both then say. Raises Forged."""
    theirs, ours, line = _exactly(stream, NONCE), os.urandom(NONCE), f"{question}\n".encode()
    connection.sendall(ours + sign(secret, b"ask", theirs, ours, line) + line)
    if _exactly(stream, 1) != READY:
        raise Forged("the server does not take it")
    return sign(secret, b"answer", theirs, ours, line)


def invite(connection: socket.socket) -> None:
    """The server's word that it takes what the client sends."""
    connection.sendall(READY)


@contextmanager
def answer(connection: socket.socket, secret: bytes, question: str) -> Iterator[Reader]:
    """The client's end: ask, and read what comes."""
    with connection.makefile("rb") as stream:
        theirs, ours, line = _exactly(stream, NONCE), os.urandom(NONCE), f"{question}\n".encode()
        connection.sendall(ours + sign(secret, b"ask", theirs, ours, line) + line)
        yield Reader(stream, sign(secret, b"answer", theirs, ours, line))


class Writer:
    """A file to write to; `close` says that all was sent."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self._connection, self._key = connection, key
        #: Bytes that went through: while it grows the receiver lives.
        self.sent, self._count = 0, 0

    def write(self, content: bytes) -> int:
        for start in range(0, len(content), PIECE):
            self._send(content[start : start + PIECE])
        return len(content)

    def close(self) -> None:
        self._send(b"")

    def _send(self, piece: bytes) -> None:
        head = len(piece).to_bytes(LENGTH, "big") + sign(self._key, b"%d" % self._count, piece)
        self._connection.sendall(head + piece)
        self.sent, self._count = self.sent + len(piece), self._count + 1


class Reader:
    """A file to read from, whose every byte was signed. Raises Forged."""

    def __init__(self, stream: BinaryIO, key: bytes) -> None:
        self._stream, self._key = stream, key
        self._count, self._held, self._ended = 0, bytearray(), False

    def read(self, size: int) -> bytes:
        while len(self._held) < size and not self._ended:
            piece = self.piece()
            self._held += piece
            self._ended = not piece
        content = bytes(self._held[:size])
        del self._held[:size]
        return content

    def again(self) -> None:
        """Go on to what was sent after an end."""
        self._ended = False

    def piece(self) -> bytes:
        """Wait for the next piece, and return it."""
        length = int.from_bytes(_exactly(self._stream, LENGTH), "big")
        if length > PIECE:
            raise Forged(f"a piece of {length} bytes")
        signature, piece = _exactly(self._stream, SIGNATURE), _exactly(self._stream, length)
        if not hmac.compare_digest(signature, sign(self._key, b"%d" % self._count, piece)):
            raise Forged(f"piece {self._count} is not signed with this run's secret")
        self._count += 1
        return piece


class SealedConnection:
    """A connection that carries messages of up to PIECE bytes both ways.

    A send never waits for the other side: what that does not take yet is kept.
    """

    def __init__(
        self, connection: socket.socket, stream: BinaryIO, send_key: bytes, receive_key: bytes
    ) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._stream = connection, stream
        self._reader, self._writer = Reader(stream, receive_key), Writer(connection, send_key)
        #: An empty one is the last.
        self._unsent: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=self._send_all, daemon=True).start()

    @classmethod
    def call(cls, to: tuple[str, int], secret: bytes, question: str) -> SealedConnection:
        """Connect to a server that will `take` the call. Raises OSError or Forged."""
        connection = socket.create_connection(to, timeout=GREETING_S)
        stream = connection.makefile("rb")
        try:
            key = greet(connection, stream, secret, question)
        except BaseException:
            stream.close()
            connection.close()
            raise
        return cls(connection, stream, send_key=key, receive_key=sign(secret, b"reply", key))

    @classmethod
    def take(cls, connection: socket.socket, secret: bytes, key: bytes) -> SealedConnection:
        """The server's end, after `asked_for` has returned the key. Raises OSError."""
        invite(connection)
        stream = connection.makefile("rb")
        return cls(connection, stream, send_key=sign(secret, b"reply", key), receive_key=key)

    def send(self, message: bytes) -> None:
        self._unsent.put(message)

    def messages(self) -> Iterator[bytes]:
        """Yield what the other side sends until the connection ends, which a piece that is not
        signed for its place ends, too."""
        try:
            with suppress(OSError, Forged):
                while message := self._reader.piece():
                    yield message
        finally:
            self.close()
            self._stream.close()

    def close(self) -> None:
        self._unsent.put(b"")
        with suppress(OSError):  # It has ended already.
            self._connection.shutdown(socket.SHUT_RDWR)  # Wakes whoever waits in `messages`.
        self._connection.close()

    def _send_all(self) -> None:
        with suppress(OSError):  # The other side is gone, which `messages` notices.
            while message := self._unsent.get():
                self._writer.write(message)


def _exactly(stream: BinaryIO, size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise Forged("the connection ended early")
    return content
