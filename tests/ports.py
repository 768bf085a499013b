"""Ports of this machine for servers that cannot be given port 0."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of this machine at which nothing listens, and that the system gives to nobody else.

    A server that asks for this very port with SO_REUSEADDR, as servers do, can listen at it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
