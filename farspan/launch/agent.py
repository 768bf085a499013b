"""What doctor and probe run on every host: a conversation about that host and its network, one JSON
line each way.

Sent there as text and run by whatever Python is there, so it uses the standard library only and is
written for Python
3.7: a host that lacks farspan, or has an old Python, must be able to say so. It ends with its
  standard input. Questions are `{"do": NAME, ...}`; an answer is what the function of that name
  returns, or `{"error": text}`.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

BLOCK = 1 << 18
#: Who calls says the server's secret within CALL_S, and is not silent for longer than IDLE_S.
CALL_S = 10
IDLE_S = 60
#: What nvidia-smi is asked for of each GPU; drivers know the first three since ever.
GPU_FIELDS = ("name", "memory.total", "driver_version", "compute_cap", "uuid", "mig.mode.current")
#: Seconds until a driver that does not answer is hung, and until PyTorch is imported on a slow
#: disk.
DRIVER_S = 10.0
IMPORT_S = 90.0
PACKAGES = ("farspan", "torch", "ray", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


class Server:
    """Answers pings, swallows streams and counts datagrams of those who say its secret, on one port
    of an address."""

    def __init__(self, address: str, secret: bytes) -> None:
        self.secret = secret
        self.tcp = socket.socket()
        self.tcp.bind((address, 0))
        self.tcp.listen(64)
        self.port = self.tcp.getsockname()[1]
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind((address, self.port))
        self.received = 0
        self.datagrams: dict[str, int] = {}
        for work in (self.accept, self.listen):
            threading.Thread(target=work, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                connection, _ = self.tcp.accept()
            except OSError:  # Who called has gone, or there are too many.
                time.sleep(0.05)
                continue
            threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection: socket.socket) -> None:
        buffer = bytearray(BLOCK)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(CALL_S)
            if not hmac.compare_digest(exactly(connection, len(self.secret)), self.secret):
                return
            connection.settimeout(IDLE_S)
            if connection.recv(1) == b"p":
                while connection.recv(1):
                    connection.sendall(struct.pack("!d", time.time()))
                return
            while True:
                count = connection.recv_into(buffer)
                if not count:
                    # The last byte has arrived: say so, for who times a transfer.
                    connection.sendall(b"e")
                    return
                self.received += count
        except OSError:
            pass
        finally:
            connection.close()

    def listen(self) -> None:
        while True:
            try:
                said = self.udp.recv(256)
            except OSError:
                continue
            if said[: len(self.secret)] == self.secret:
                tag = said[len(self.secret) :].decode(errors="replace").strip()
                self.datagrams[tag] = self.datagrams.get(tag, 0) + 1


SERVER: list[Server] = []
SENDERS: list[threading.Thread] = []


def exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or those that came before the end."""
    content = b""
    while len(content) < size:
        part = connection.recv(size - len(content))
        if not part:
            break
        content += part
    return content


def hello() -> dict[str, Any]:
    return {}


def serve(address: str, secret: str) -> dict[str, Any]:
    if not SERVER:
        SERVER.append(Server(listening(address), secret.encode()))
    return {"port": SERVER[0].port}


def listening(address: str) -> str:
    """The address to listen on for those who know this host by one. Behind address translation no
    interface has that, and a name may lead its own host to loopback: then it is all addresses, and
    the secret alone guards them."""
    try:
        ip = socket.gethostbyname(address)
        with socket.socket() as probe:
            probe.bind((ip, 0))
    except OSError:
        return ""
    return "" if ip.startswith("127.") and ip != address else ip


def free_ports(count: int) -> dict[str, Any]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("", 0))
        return {"ports": [probe.getsockname()[1] for probe in probes]}
    finally:
        for probe in probes:
            probe.close()


def received() -> dict[str, Any]:
    """Bytes swallowed so far, at this host's own time; seconds that the machine's cores were busy,
    of each."""
    return {"bytes": SERVER[0].received, "at": time.monotonic(), "busy": busy()}


def busy() -> float | None:
    """Seconds that a core of this machine was busy so far, on average; None where the kernel does
    not say so."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq = map(int, lines[0].split()[1:8])
    cores = sum(line.startswith("cpu") for line in lines) - 1
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK") / cores


def datagrams(tag: str) -> dict[str, Any]:
    return {"count": SERVER[0].datagrams.get(tag, 0) if SERVER else 0}


def facts() -> dict[str, Any]:
    return {
        "hostname": platform.node(),
        "python": platform.python_version(),
        "system": platform.system(),
        "packages": {name: version(name) for name in PACKAGES},
        "interfaces": interfaces(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "disk_free": shutil.disk_usage(Path.home()).free,
        "nvidia": nvidia(),
    }


def version(name: str) -> str | None:
    try:
        from importlib import metadata
    except ImportError:
        return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def nvidia() -> dict[str, Any]:
    """The NVIDIA GPUs that their driver lists, in the order of its numbers, or why it lists
    none."""
    answer = asked_of_driver(GPU_FIELDS)
    # Older drivers refuse a question whose fields they do not all know.
    return asked_of_driver(GPU_FIELDS[:3]) if "not a valid field" in answer["failure"] else answer


def asked_of_driver(fields: tuple[str, ...]) -> dict[str, Any]:
    words = ["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=DRIVER_S,
        )
    except FileNotFoundError:
        return {"gpus": [], "failure": ""}
    except subprocess.TimeoutExpired:
        return {"gpus": [], "failure": f"it has not answered within {DRIVER_S:g} s"}
    except OSError as error:
        return {"gpus": [], "failure": str(error)}
    lines = [
        line.strip() for line in done.stdout.decode(errors="replace").splitlines() if line.strip()
    ]
    rows = [[value.strip() for value in line.split(",")] for line in lines]
    gpus = [
        gpu({field: row[i] for i, field in enumerate(fields)})
        for row in rows
        if len(row) == len(fields)
    ]
    # Exit code 6: no GPU is there, which is no failure.
    failure = (
        ""
        if gpus or done.returncode in (0, 6)
        else " ".join(lines)[:300] or f"exit code {done.returncode}"
    )
    return {"gpus": gpus, "failure": failure}


def gpu(said: dict[str, str]) -> dict[str, Any]:
    """A row of nvidia-smi; what it does not know it writes as "[N/A]"."""
    memory = said["memory.total"]
    capability = said.get("compute_cap", "").split(".")
    return {
        "name": said["name"],
        "memory": int(float(memory) * 2**20) if memory.replace(".", "", 1).isdigit() else 0,
        "driver": said["driver_version"],
        "capability": [int(part) for part in capability]
        if all(map(str.isdigit, capability))
        else None,
        "uuid": said.get("uuid", ""),
        "mig": said.get("mig.mode.current") == "Enabled",
    }


def wheel() -> dict[str, Any]:
    """What the PyTorch of this interpreter is built for and sees; None where it, or farspan, is not
    there."""
    try:
        done = subprocess.run(
            ["env", "PYTHONSAFEPATH=1", sys.executable, "-m", "farspan.runtime.probe"],
            input=b'{"type": "installed"}\n',
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=IMPORT_S,
        )
        return {"wheel": json.loads(done.stdout.decode())["answer"]}
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError):
        return {"wheel": None}


def interfaces() -> dict[str, str]:
    """IPv4 addresses by interface; Linux only, elsewhere empty."""
    addresses: dict[str, str] = {}
    try:
        import fcntl
    except ImportError:
        return addresses
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                packed = fcntl.ioctl(
                    probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15])
                )
            except OSError:
                continue
            addresses[name] = socket.inet_ntoa(packed[20:24])
    return addresses


def route(address: str) -> dict[str, Any]:
    """The interface and the own address that packets to `address` leave by."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((socket.gethostbyname(address), 9))
            own = probe.getsockname()[0]
    except OSError:
        return {"interface": None, "address": None}
    return {
        "interface": next((name for name, ip in interfaces().items() if ip == own), None),
        "address": own,
    }


def reach(address: str, port: int, secret: str, deadline: float, pings: int) -> dict[str, Any]:
    """Connect and ping. `failed` is name, route, port or timeout."""
    try:
        ip = socket.gethostbyname(address)
    except OSError as error:
        return {"failed": "name", "fact": str(error)}
    try:
        connection = socket.create_connection((ip, port), timeout=deadline)
    except OSError as error:
        return failure(error, f"no answer within {deadline:g} s")
    rtts = []
    offsets = []
    failed = {"failed": "timeout", "fact": "connected, then no answer"}
    with connection:
        end = time.monotonic() + deadline
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(secret.encode() + b"p")
            for _ in range(pings):
                began = time.perf_counter()
                sent = time.time()
                connection.sendall(b".")
                answer = connection.recv(8)
                rtt = time.perf_counter() - began
                if len(answer) < 8:
                    break
                rtts.append(rtt)
                offsets.append(struct.unpack("!d", answer)[0] - sent - rtt / 2)
                if time.monotonic() > end:
                    break
        except OSError as error:
            failed = failure(error, failed["fact"])
    if not rtts:
        return failed
    return {"failed": None, "rtts": rtts, "clock_offset": offsets[rtts.index(min(rtts))]}


def failure(error: OSError, silent: str) -> dict[str, Any]:
    """What a connection failed at; `silent` says that nothing came. Before 3.10 socket.timeout is
    no TimeoutError."""
    if isinstance(error, TimeoutError) or str(error) == "timed out":
        return {"failed": "timeout", "fact": silent}
    refused = error.errno == errno.ECONNREFUSED
    return {"failed": "port" if refused else "route", "fact": error.strerror or str(error)}


def say(address: str, port: int, secret: str, tag: str, count: int, gap: float) -> dict[str, Any]:
    """Send datagrams, which need no way back."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
            target = (socket.gethostbyname(address), port)
            for _ in range(count):
                out.sendto((secret + tag).encode(), target)
                time.sleep(gap)
    except OSError as error:
        return {"error": str(error)}
    return {"sent": count}


def stream(address: str, port: int, secret: str, streams: int, seconds: float) -> dict[str, Any]:
    """Send as fast as the network takes it, in the background, over so many connections."""
    end = time.monotonic() + seconds
    for _ in range(streams):
        sender = threading.Thread(target=pour, args=(address, port, secret, end), daemon=True)
        sender.start()
        SENDERS.append(sender)
    return {"streams": streams}


def pour(address: str, port: int, secret: str, end: float) -> None:
    block = bytes(BLOCK)
    try:
        with socket.create_connection((address, port), timeout=10) as out:
            out.sendall(secret.encode() + b"s")
            while time.monotonic() < end:
                out.sendall(block)
            # What is still queued would go on after the end and disturb the next measurement.
            out.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        pass


def settle() -> dict[str, Any]:
    """Wait until every stream has ended."""
    while SENDERS:
        SENDERS.pop().join(15)
    return {}


def transfer(address: str, port: int, secret: str, size: int, repeats: int) -> dict[str, Any]:
    """Seconds to send `size` bytes and learn that the last one arrived, over one warm connection
    each."""
    times = []
    for _ in range(repeats):
        with socket.create_connection((address, port), timeout=30) as out:
            out.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            out.sendall(secret.encode() + b"s")
            began = time.perf_counter()
            out.sendall(bytes(size))
            out.shutdown(socket.SHUT_WR)
            out.recv(1)
            times.append(time.perf_counter() - began)
    return {"seconds": times}


DO = (
    hello,
    serve,
    free_ports,
    received,
    datagrams,
    facts,
    wheel,
    route,
    reach,
    say,
    stream,
    settle,
    transfer,
)


def main() -> None:
    functions = {function.__name__: function for function in DO}
    for line in sys.stdin.buffer:
        question = json.loads(line.decode())
        try:
            answer = functions[question.pop("do")](**question)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
