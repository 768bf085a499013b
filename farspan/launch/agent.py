"""The agent that doctor and probe run on every host: a conversation about that host and its
network, one JSON line each way.

Sent there as text and run by whatever Python is there, so it uses the standard library only and is
written for Python 3.7: a host that lacks farspan, or has an old Python, must be able to report
that. It ends with its standard input. Questions are `{"do": NAME, ...}`; an answer is what the
function of that name returns, or `{"error": text}`.
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
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from farspan.launch.agent_loop import answer_questions

SEND_BYTES = 1 << 18
#: A caller sends the server's secret within CALL_S, and is not silent for longer than IDLE_S.
CALL_S = 10
IDLE_S = 60
#: What nvidia-smi is asked for of each GPU; drivers know the first three since ever.
GPU_FIELDS = ("name", "memory.total", "driver_version", "compute_cap", "uuid", "mig.mode.current")
#: Seconds until a driver that does not answer is hung, and until PyTorch is imported on a slow
#: disk.
DRIVER_S = 10.0
IMPORT_S = 90.0
#: Linux's request for the address of an interface.
SIOCGIFADDR = 0x8915
VERSIONED_PACKAGES = ("farspan", "torch", "ray", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


class LinkServer:
    """Answers pings, swallows streams and counts datagrams of callers that know its secret, on one
    port of an address."""

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
        buffer = bytearray(SEND_BYTES)
        with connection, suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(CALL_S)
            if not hmac.compare_digest(receive_exactly(connection, len(self.secret)), self.secret):
                return
            connection.settimeout(IDLE_S)
            if connection.recv(1) == b"p":
                while connection.recv(1):
                    connection.sendall(struct.pack("!d", time.time()))
                return
            while True:
                count = connection.recv_into(buffer)
                if not count:
                    # The last byte has arrived: answer, for a caller that times a transfer.
                    connection.sendall(b"e")
                    return
                self.received += count

    def listen(self) -> None:
        while True:
            try:
                datagram = self.udp.recv(256)
            except OSError:
                continue
            if datagram.startswith(self.secret):
                tag = datagram[len(self.secret) :].decode(errors="replace")
                self.datagrams[tag] = self.datagrams.get(tag, 0) + 1


SERVER: list[LinkServer] = []
SENDERS: list[threading.Thread] = []


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Receive `size` bytes, or those that came before the end."""
    content = b""
    while len(content) < size:
        part = connection.recv(size - len(content))
        if not part:
            break
        content += part
    return content


def serve(address: str, secret: str) -> dict[str, Any]:
    if not SERVER:
        SERVER.append(LinkServer(listen_address(address), secret.encode()))
    return {"port": SERVER[0].port}


def listen_address(address: str) -> str:
    """Return where to listen for callers that know this host by `address`.

    Behind address translation no interface has that, and a name may lead its own host to loopback:
    then it is all addresses, and the secret alone guards them.
    """
    try:
        ip = socket.gethostbyname(address)
        with socket.socket() as probe:
            probe.bind((ip, 0))
    except OSError:
        return ""
    return "" if ip.startswith("127.") and ip != address else ip


def free_ports(count: int) -> dict[str, Any]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        return {"ports": [probe.getsockname()[1] for probe in probes]}


def received() -> dict[str, Any]:
    """Return the bytes swallowed so far, this host's own time, and seconds that each of the
    machine's cores was busy."""
    return {"bytes": SERVER[0].received, "at": time.monotonic(), "busy": cpu_busy_s()}


def cpu_busy_s() -> float | None:
    """Return the seconds that a core of this machine was busy so far, on average; None where the
    kernel does not count them."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    # Of user, nice, system, idle, iowait, irq and softirq.
    ticks = [int(count) for count in lines[0].split()[1:8]]
    del ticks[3:5]
    cores = sum(line.startswith("cpu") for line in lines) - 1
    return sum(ticks) / os.sysconf("SC_CLK_TCK") / cores


def claim(path: str, epoch: int, holder: str, state: str = "trains") -> dict[str, Any]:
    """Record that an epoch of a run begins here, by this holder, or what its state is: "trains",
    "stopped" or "finished". Not where a later one has begun, or another holder's of that number.
    Return the claim that was there before, its age, and another's workers of the run."""
    import fcntl

    file = Path(path).expanduser()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(str(file) + ".lock", "a") as lock:
        with suppress(OSError):  # A file system without locks.
            fcntl.flock(lock, fcntl.LOCK_EX)
        before: dict[str, Any] = {"epoch": 0, "holder": "", "state": "stopped"}
        age = 0.0
        # There is none, or power was lost while it was written.
        with suppress(OSError, ValueError):
            before = json.loads(file.read_text())
            age = time.time() - file.stat().st_mtime
        is_own = epoch == before["epoch"] and holder == before["holder"]
        claimed = is_own or epoch > before["epoch"]
        if claimed:
            new = Path(str(file) + ".new")
            new.write_text(json.dumps({"epoch": epoch, "holder": holder, "state": state}))
            new.replace(file)
    workers = [] if is_own else run_workers(path)
    return {"claimed": claimed, "age": age, "workers": workers, **before}


def run_workers(path: str) -> list[int]:
    """Return the processes of this user that hold the workers' lock of a run: they have the file
    open."""
    pids = []
    with suppress(OSError):
        lock = Path(path + ".workers").expanduser().stat()
        for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):  # It has ended, or is another user's.
                if os.path.samestat(descriptor.stat(), lock):
                    pids.append(int(descriptor.parts[2]))
    return sorted(set(pids))


def signal_workers(path: str, number: int) -> dict[str, Any]:
    """Send a signal to the workers of a run that are here, 0 sends none; return which there
    were."""
    pids = run_workers(path)
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)
    return {"workers": pids}


def datagrams(tag: str) -> dict[str, Any]:
    return {"count": SERVER[0].datagrams.get(tag, 0) if SERVER else 0}


def facts() -> dict[str, Any]:
    cpus = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    packages = {name: package_version(name) for name in VERSIONED_PACKAGES}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    disk_free = shutil.disk_usage(Path.home()).free
    return {
        "hostname": platform.node(),
        "python": platform.python_version(),
        "system": platform.system(),
        "packages": packages,
        "interfaces": interfaces(),
        "cpus": cpus,
        "memory": memory,
        "disk_free": disk_free,
        "nvidia": nvidia(),
    }


def versions() -> dict[str, Any]:
    """Return the versions of Python, farspan and PyTorch here."""
    packages = {name: package_version(name) for name in ("farspan", "torch")}
    return {"python": platform.python_version(), "packages": packages}


def package_version(name: str) -> str | None:
    try:
        from importlib import metadata
    except ImportError:
        return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def nvidia() -> dict[str, Any]:
    """Return the NVIDIA GPUs that their driver lists, in the order of its numbers, or why it lists
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
    output = done.stdout.decode(errors="replace")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    gpus = []
    for line in lines:
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(fields):
            gpus.append(parse_gpu_row({field: values[i] for i, field in enumerate(fields)}))
    failure = ""
    # Exit code 6: no GPU is there, which is no failure.
    if not gpus and done.returncode not in (0, 6):
        failure = " ".join(lines)[:300] or f"exit code {done.returncode}"
    return {"gpus": gpus, "failure": failure}


def parse_gpu_row(row: dict[str, str]) -> dict[str, Any]:
    """Return the GPU of a row of nvidia-smi, which writes what it does not know as "[N/A]"."""
    memory = 0
    mebibytes = row["memory.total"]
    if mebibytes.replace(".", "", 1).isdigit():
        memory = int(float(mebibytes) * 2**20)
    capability = None
    numbers = row.get("compute_cap", "").split(".")
    if all(map(str.isdigit, numbers)):
        capability = [int(number) for number in numbers]
    return {
        "name": row["name"],
        "memory": memory,
        "driver": row["driver_version"],
        "capability": capability,
        "uuid": row.get("uuid", ""),
        "mig": row.get("mig.mode.current") == "Enabled",
    }


def wheel() -> dict[str, Any]:
    """Return the build of this interpreter's PyTorch and its devices; None where it, or farspan, is
    not there."""
    words = ["env", "PYTHONSAFEPATH=1", sys.executable, "-m", "farspan.runtime.probe_process"]
    try:
        done = subprocess.run(
            words,
            input=b'{"type": "installed"}\n',
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=IMPORT_S,
        )
        return {"wheel": json.loads(done.stdout.decode())["answer"]}
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError):
        return {"wheel": None}


def interfaces() -> dict[str, str]:
    """Return IPv4 addresses by interface; Linux only, elsewhere empty."""
    addresses: dict[str, str] = {}
    try:
        import fcntl
    except ImportError:
        return addresses
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # It has none.
                packed = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                addresses[name] = socket.inet_ntoa(packed[20:24])
    return addresses


def route(address: str) -> dict[str, Any]:
    """Return the interface and the own address that packets to `address` leave by."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((socket.gethostbyname(address), 9))
            own = probe.getsockname()[0]
    except OSError:
        return {"interface": None, "address": None}
    interface = next((name for name, ip in interfaces().items() if ip == own), None)
    return {"interface": interface, "address": own}


def reach(address: str, port: int, secret: str, deadline: float, pings: int) -> dict[str, Any]:
    """Connect and ping. `failed` is name, route, port or timeout."""
    try:
        ip = socket.gethostbyname(address)
    except OSError as error:
        return {"failed": "name", "fact": str(error)}
    try:
        connection = socket.create_connection((ip, port), timeout=deadline)
    except OSError as error:
        return {**connection_failure(error, f"no answer within {deadline:g} s"), "ip": ip}
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
                (peer_time,) = struct.unpack("!d", answer)
                offsets.append(peer_time - sent - rtt / 2)
                if time.monotonic() > end:
                    break
        except OSError as error:
            failed = connection_failure(error, failed["fact"])
    if not rtts:
        return failed
    return {"failed": None, "rtts": rtts, "clock_offset": offsets[rtts.index(min(rtts))]}


def connection_failure(error: OSError, silent: str) -> dict[str, Any]:
    """Return why a connection failed, with the fact `silent` where nothing came.

    Before 3.10 socket.timeout is no TimeoutError.
    """
    if isinstance(error, TimeoutError) or str(error) == "timed out":
        return {"failed": "timeout", "fact": silent}
    refused = error.errno == errno.ECONNREFUSED
    return {"failed": "port" if refused else "route", "fact": error.strerror or str(error)}


def send_datagrams(
    address: str, port: int, secret: str, tag: str, count: int, gap: float
) -> dict[str, Any]:
    """Send datagrams, which need no return path."""
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
    """Send as fast as the network takes it, in the background, over `streams` connections."""
    end = time.monotonic() + seconds
    for _ in range(streams):
        sender = threading.Thread(target=send_until, args=(address, port, secret, end), daemon=True)
        sender.start()
        SENDERS.append(sender)
    return {"streams": streams}


def send_until(address: str, port: int, secret: str, end: float) -> None:
    block = bytes(SEND_BYTES)
    with suppress(OSError), socket.create_connection((address, port), timeout=10) as out:
        out.sendall(secret.encode() + b"s")
        while time.monotonic() < end:
            out.sendall(block)
        # What is still queued would be sent after the end and disturb the next measurement.
        out.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def settle() -> dict[str, Any]:
    """Wait until every stream has ended."""
    while SENDERS:
        SENDERS.pop().join(15)
    return {}


def transfer(address: str, port: int, secret: str, size: int, repeats: int) -> dict[str, Any]:
    """Time sending `size` bytes and learning that the last one arrived, over one warm connection
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
    serve,
    free_ports,
    received,
    claim,
    signal_workers,
    datagrams,
    facts,
    versions,
    wheel,
    route,
    reach,
    send_datagrams,
    stream,
    settle,
    transfer,
)


if __name__ == "__main__":
    answer_questions(DO)
