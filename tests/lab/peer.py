"""What a process does in a site: `python peer.py PART WORDS...` prints `ready`, then its result as
JSON."""

from __future__ import annotations

import hashlib
import json
import random
import select
import socket
import sys
import time

PORT = 5000


def names(*wanted: str) -> object:
    ready()
    return {"me": socket.gethostname(), **{name: socket.gethostbyname(name) for name in wanted}}


def echo() -> object:
    """Send back each datagram until the input ends; how many came."""
    here = listening()
    count = 0
    while arrived(here):
        data, sender = here.recvfrom(2000)
        here.sendto(data, sender)
        count += 1
    return count


def collect() -> object:
    """Number and time of arrival of each datagram until the input ends."""
    here = listening()
    found = []
    while arrived(here):
        found.append((int(here.recv(2000)[:8]), time.monotonic()))
    return found


def listening() -> socket.socket:
    here = socket.socket(type=socket.SOCK_DGRAM)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 10**7)
    here.bind(("", PORT))
    ready()
    return here


def arrived(here: socket.socket) -> bool:
    """Wait until there is a datagram, or the input has ended and there is none."""
    return here in select.select([here, sys.stdin], [], [])[0]


def ready() -> None:
    print("ready", flush=True)


def scatter(host: str, count: str, gap_s: str, size: str) -> object:
    """Send numbered datagrams; when each left."""
    here = socket.socket(type=socket.SOCK_DGRAM)
    left = []
    ready()
    for number in range(int(count)):
        left.append(time.monotonic())
        here.sendto(b"%08d" % number + bytes(int(size) - 8), (host, PORT))
        time.sleep(float(gap_s))
    return left


def ping(host: str, count: str, patience_s: str = "10") -> object:
    """Round trips in seconds, None for what did not come back in time."""
    here = socket.socket(type=socket.SOCK_DGRAM)
    found = []
    here.settimeout(float(patience_s))
    ready()
    for number in range(int(count)):
        began = time.perf_counter()
        try:
            here.sendto(b"%d" % number, (host, PORT))
            while here.recv(2000) != b"%d" % number:
                continue
            found.append(time.perf_counter() - began)
        except TimeoutError:
            found.append(None)
        except OSError as error:
            return {"error": error.strerror}
    return found


def sink() -> object:
    """Receive one stream; its bytes, their hash, and seconds from the first to the last."""
    here = socket.create_server(("", PORT))
    ready()
    stream, _ = here.accept()
    digest = hashlib.sha256()
    total = 0
    first = None
    while data := stream.recv(2**20):
        first = first or time.monotonic()
        digest.update(data)
        total += len(data)
    return {
        "bytes": total,
        "sha256": digest.hexdigest(),
        "seconds": time.monotonic() - (first or 0),
    }


def pour(host: str, size: str) -> object:
    """Send a stream of random bytes; their hash."""
    data = random.Random(0).randbytes(int(size))
    ready()
    with socket.create_connection((host, PORT)) as stream:
        stream.sendall(data)
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
