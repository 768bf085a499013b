"""The TCP connections of this process: how fast they may send, when one is lost, and where others
reach it.

They are gloo's, which has no setting for any of it, so they are found among what the process has
open (Linux; elsewhere nothing is set, and a line that is cut without a word is noticed by
heartbeats alone).
"""

from __future__ import annotations

import os
import re
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

#: asm-generic/socket.h.
SO_MAX_PACING_RATE = 47
#: `tcpi_rtt` in struct tcp_info (linux/tcp.h), microseconds: after 8 single bytes and 15 words.
_INFO = struct.Struct("8x60xI")
#: Connections with a shorter round trip stay inside a site.
SITE_S = 1e-3


def limit_rate(rate: int) -> None:
    """Limit every connection that this process has open now, and that leaves its site, to `rate`
    bytes a second: what all workers of a site send at once must not overflow the queue of the link
    that they share, as every packet lost there costs round trips. A rate that the option cannot
    hold, 2 GB/s and more, needs no pacing."""
    if rate >= 2**31:
        return
    for connection in _open_connections():
        if _rtt_s(connection) > SITE_S:
            connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)


def set_timeouts(seconds: float, rtts: int) -> None:
    """Let every connection that this process has open now fail once the other side's machine has
    not answered for `seconds` and `rtts` of its round trips, idle or not: by itself the kernel
    tries for a quarter of an hour, and for ever where nothing is to be sent."""
    for connection in _open_connections():
        limit_s = seconds + rtts * _rtt_s(connection)
        interval_s = max(1, round(limit_s / 3))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1e3 * limit_s))


def listen_address(address: str) -> str:
    """Return the IPv4 address that rank 0 listens on for workers that know it by this one. They may
    differ: behind address translation no interface has it, and a name may lead its own host to
    loopback. Then the interface counts by which the workers meet."""
    ip = socket.gethostbyname(address)
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if name is None:
        return ip
    assigned = set[str]()
    by_name = list[str]()
    for interface, entries in psutil.net_if_addrs().items():
        addresses = [entry.address for entry in entries if entry.family == socket.AF_INET]
        assigned.update(addresses)
        if interface == name:
            by_name = addresses
    # Workers of one host meet on its loopback, if they are given its address.
    known = ip == address if ip.startswith("127.") else ip in assigned
    return ip if known or not by_name else by_name[0]


def own_addresses() -> list[str]:
    """Return the addresses of this process's ends, as gloo's messages on the other side name them,
    `[10.0.0.5]:41235`: the bytes of a port as they go over the line, which most machines read the
    other way round."""
    ends = dict.fromkeys(sock.getsockname()[:2] for sock in _open_sockets())
    return [f"[{host}]:{socket.htons(port)}" for host, port in ends]


def named_in(text: str) -> list[str]:
    """Return the addresses that one of gloo's messages names."""
    return re.findall(r"\[[\w.:%]+\]:\d+", text)


def _open_connections() -> Iterator[socket.socket]:
    """Yield the TCP connections that this process has open."""
    for sock in _open_sockets():
        try:
            sock.getpeername()
        except OSError:
            continue
        yield sock


def _open_sockets() -> Iterator[socket.socket]:
    """Yield the TCP sockets that this process has open."""
    if sys.platform != "linux":
        return
    for path in list(Path("/proc/self/fd").iterdir()):
        try:
            copy = os.dup(int(path.name))
        except OSError:  # The one that the folder was read by.
            continue
        try:
            sock = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with sock:
            is_ip = sock.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and sock.type == socket.SOCK_STREAM:
                yield sock


def _rtt_s(connection: socket.socket) -> float:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    (microseconds,) = _INFO.unpack(info)
    return float(microseconds) / 1e6
