"""How fast the connections to other sites may send: what all workers of a site send at once must not overflow the queue
of the line that they share, as every packet lost there costs round trips.

The connections are gloo's, which has no setting for it, so they are found among what this process has open. The kernel
paces each (SO_MAX_PACING_RATE, Linux); elsewhere nothing is held back.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

#: asm-generic/socket.h.
SO_MAX_PACING_RATE = 47
#: `tcpi_rtt` in struct tcp_info (linux/tcp.h), microseconds: after 8 single bytes and 15 words.
_INFO = struct.Struct("8x60xI")
#: Connections with a shorter round trip stay inside a site.
SITE_S = 1e-3


def limit(rate: int) -> None:
    """Let every connection that this process has open now, and that leaves its site, send so many bytes a second."""
    for one in _connections() if sys.platform == "linux" else ():
        if _rtt_s(one) > SITE_S:
            one.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)


def _connections() -> Iterator[socket.socket]:
    """The TCP connections that this process has open."""
    for path in list(Path("/proc/self/fd").iterdir()):
        try:
            own = os.dup(int(path.name))
        except OSError:  # The one that the folder was read by.
            continue
        try:
            one = socket.socket(fileno=own)
        except OSError:
            os.close(own)
            continue
        with one:
            try:
                one.getpeername()
            except OSError:
                continue
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                yield one


def _rtt_s(one: socket.socket) -> float:
    return float(_INFO.unpack(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))[0]) / 1e6
