"""Messages to all workers of one run: over a sealed connection from each to rank 0, which relays
them.

The workers meet at the address and the port of rank 0, which all are given. A caller proves that it
holds the secret of the run, which is never sent. PyTorch's store authenticates nobody: no value of
farspan's is kept there.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing

import msgspec

from farspan.domain.decoding import msgpack_decoder
from farspan.domain.problems import Refusal
from farspan.domain.run import ON_STDIN, SECRET_VARIABLE
from farspan.domain.standard_input import first_line
from farspan.runtime.comm.sealed import Forged, SealedConnection, SealedServer, SealedStream

#: Between two calls of rank 0, which may not listen yet.
CALL_INTERVAL_S = 0.1
#: A secret has at least this many characters; a launcher's has 64.
LEAST_SECRET = 16
#: The key of a beat, which is for the other end of the connection alone and is not kept.
BEAT = "farspan/beat"
#: The first word of a worker's question to rank 0, before its rank.
NOTICES_QUESTION = "notices"


def run_secret(world: int) -> bytes:
    """Take the secret of the run, which a launcher gives in the environment or as the first line of
    standard input. A worker alone needs none.

    Raises Refusal (launcher-unusable) where there is none.
    """
    given = os.environ.pop(SECRET_VARIABLE, "")
    if given == ON_STDIN:
        given = first_line()
    given = given.strip()
    if world > 1 and len(given) < LEAST_SECRET:
        raise Refusal(
            "launcher-unusable",
            what="this worker has no secret to know the others by",
            where=f"variable {SECRET_VARIABLE}",
            fact=f"it has {len(given)} characters of {LEAST_SECRET} at least; without it anybody "
            "on the network could "
            "end the run",
            remedy=f'on one host: {SECRET_VARIABLE}=$(python3 -c "import secrets; '
            'print(secrets.token_hex(32))"), and the same '
            "value on the others",
        )
    return given.encode()


class Message(msgspec.Struct, array_like=True, frozen=True):
    """A value under its key; one that is `first` gives way to a value that is there."""

    key: str
    value: bytes
    first: bool = False


_encode = msgspec.msgpack.encode
_decode = msgpack_decoder(Message).decode


class Notices:
    """One worker's end. Values are bytes; all workers see them in the order that rank 0 does."""

    def __init__(self, secret: bytes, rank: int) -> None:
        self.secret = secret
        self.rank = rank
        #: Called with the rank at the other end and each beat from there.
        self.on_beat: Callable[[int, bytes], None] = lambda peer, content: None
        #: The ranks whose connection to this worker has ended.
        self.ended: set[int] = set()
        self._connections = dict[int, SealedConnection]()
        self._values = dict[str, bytes]()
        self._changed = threading.Condition()

    def rendezvous(self, world: int, port: int, seconds: float) -> None:
        """Connect all workers of the run, at a port of rank 0.

        Raises TimeoutError where they do not all come within `seconds`, ConnectionError where
        rank 0 has ended, and OSError where it cannot listen there.
        """
        end = time.monotonic() + seconds
        everyone = [came(rank) for rank in range(world)]
        if self.rank == 0:
            with closing(SealedServer(self.secret, self._accept_worker, port)):
                self.send_to_all(came(0), b"1")
                self.wait(everyone, seconds)
        else:
            connection = self._call_rank_0(port, end)
            self._add_connection(0, connection)
            arguments = 0, connection
            threading.Thread(target=self._receive_messages, args=arguments, daemon=True).start()
            self.send_to_all(came(self.rank), b"1")
            self.wait(everyone, end - time.monotonic())

    def send_to_all(self, key: str, value: bytes | str) -> None:
        """Send a value to all workers. Raises ConnectionError if rank 0 has ended."""
        self._send_message(Message(key, _to_bytes(value)))

    def send_first(self, key: str, value: bytes | str, seconds: float = math.inf) -> bytes:
        """Send a value to all workers unless there is one under this key; return the one that is
        there. Raises like `wait`."""
        self._send_message(Message(key, _to_bytes(value), first=True))
        return self.wait([key], seconds)[0]

    def agree_to_leave(self, world: int) -> None:
        """Wait until all workers want to leave: from then on their connections end as planned.
        Raises ConnectionError where one that this worker is connected to has ended before."""
        self.send_to_all(leaving(self.rank), b"1")
        keys = [leaving(rank) for rank in range(world)]

        def is_decided() -> bool:
            return not self.missing(keys) or any(map(self.is_broken, self.ended))

        with self._changed:
            self._changed.wait_for(is_decided)
        if self.missing(keys):
            raise ConnectionError("a worker has ended before it was to leave")

    def is_broken(self, peer: int) -> bool:
        """Return whether the connection of a worker has ended, and not as planned."""
        return peer in self.ended and leaving(peer) not in self._values

    def value_of(self, key: str) -> bytes | None:
        return self._values.get(key)

    def wait(self, keys: Sequence[str], seconds: float = math.inf) -> list[bytes]:
        """Return the values of all keys, once all are there.

        Raises TimeoutError after `seconds`, and ConnectionError where rank 0 has ended.
        """
        timeout = None if math.isinf(seconds) else max(0.0, seconds)
        with self._changed:
            self._changed.wait_for(lambda: 0 in self.ended or not self.missing(keys), timeout)
            if not self.missing(keys):
                return [self._values[key] for key in keys]
        self._require_rank_0()
        raise TimeoutError(f"not all have come within {seconds:.0f} s")

    def missing(self, keys: Iterable[str]) -> list[str]:
        return [key for key in keys if key not in self._values]

    def beat(self, peer: int, content: bytes) -> None:
        """Send a beat to the worker at the other end of a connection, if that is there."""
        if (connection := self._connections.get(peer)) is not None:
            connection.send(_encode(Message(BEAT, content)))

    def close(self) -> None:
        for connection in list(self._connections.values()):
            connection.close()

    # -- over the connections

    def _send_message(self, message: Message) -> None:
        if self.rank == 0:
            self._hand_on(message)
        else:
            self._require_rank_0()
            self._connections[0].send(_encode(message))

    def _require_rank_0(self) -> None:
        if 0 in self.ended:
            raise ConnectionError("the connection to rank 0 has ended")

    def _hand_on(self, message: Message) -> None:
        """Relay a message on rank 0 to all workers, itself last: what it knows then is on its way
        to all."""
        key = message.key
        value = message.value
        with self._changed:
            if message.first:
                value = self._values.get(key, value)
            for connection in self._connections.values():
                connection.send(_encode(Message(key, value)))
            self._set_value(key, value)

    def _set_value(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def _add_connection(self, peer: int, connection: SealedConnection) -> None:
        """Keep the connection of a worker that has just connected; rank 0 sends it all earlier
        values."""
        with self._changed:
            if self.rank == 0:
                for key, value in self._values.items():
                    connection.send(_encode(Message(key, value)))
            self._connections[peer] = connection
            self.ended.discard(peer)

    def _receive_messages(self, peer: int, connection: SealedConnection) -> None:
        for content in connection.messages():
            message = _decode(content)
            if message.key == BEAT:
                self.on_beat(peer, message.value)
            elif self.rank == 0:
                self._hand_on(message)
            else:
                self._set_value(message.key, message.value)
        with self._changed:
            if self._connections[peer] is connection:  # It may have called again.
                self.ended.add(peer)
                self._changed.notify_all()

    # -- meeting

    def _accept_worker(self, question: str, stream: SealedStream) -> None:
        word, _, number = question.partition(" ")
        if word == NOTICES_QUESTION:
            peer = int(number)
            connection = SealedConnection(stream)
            self._add_connection(peer, connection)
            self._receive_messages(peer, connection)

    def _call_rank_0(self, port: int, end: float) -> SealedConnection:
        """Call until rank 0 answers. Raises TimeoutError."""
        reason = "too late"
        question = f"{NOTICES_QUESTION} {self.rank}"
        while time.monotonic() < end:
            address = os.environ["MASTER_ADDR"], port
            try:
                return SealedConnection(SealedStream.call(address, self.secret, question))
            except (OSError, Forged) as error:
                reason = str(error)
            time.sleep(CALL_INTERVAL_S)
        raise TimeoutError(f"rank 0 has not answered: {reason}")


def came(rank: int) -> str:
    return f"farspan/came/{rank}"


def leaving(rank: int) -> str:
    return f"farspan/leaving/{rank}"


def _to_bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value
