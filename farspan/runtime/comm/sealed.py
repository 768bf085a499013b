"""A connection between two workers that both hold the secret of the run: who calls proves it, and
each piece of what comes back carries its signature.

The server sends a random number, the client one of its own and what it asks for, signed over both.
The answer is a series of pieces: a length, a signature over the piece's number and content, the
content; an empty one is the last.
"""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from farspan.runtime.comm.notices import sign

#: Bytes of a random number, of a signature, of a length, and of a piece at most.
NONCE, SIGNATURE, LENGTH, PIECE = 16, 32, 4, 2**20


class Forged(Exception):
    """What came is not signed by a worker of this run, or is not whole."""


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
            self._receive()
        content = bytes(self._held[:size])
        del self._held[:size]
        return content

    def again(self) -> None:
        """Go on to what was sent after an end."""
        self._ended = False

    def _receive(self) -> None:
        length = int.from_bytes(_exactly(self._stream, LENGTH), "big")
        if length > PIECE:
            raise Forged(f"a piece of {length} bytes")
        signature, piece = _exactly(self._stream, SIGNATURE), _exactly(self._stream, length)
        if not hmac.compare_digest(signature, sign(self._key, b"%d" % self._count, piece)):
            raise Forged(f"piece {self._count} is not signed with this run's secret")
        self._held += piece
        self._count, self._ended = self._count + 1, not piece


def _exactly(stream: BinaryIO, size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise Forged("the connection ended early")
    return content
