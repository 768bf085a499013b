"""How true the lab is: round trips, throughput, what the relay costs, speed shares, and how long up
and down take.

`python benchmarks/lab.py` takes two minutes and writes results/lab.json. Round trips are UDP
echoes, throughput is one TCP stream from Python to Python through `farspan lab exec`; the first
seconds of a stream, until its window is full, are left out. It needs a Linux machine that allows
labs, and root for the speed shares.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FARSPAN = [sys.executable, "-m", "farspan", "lab"]
NAME = "bench"
PORT = 5000
STREAM_S = 6.0
FILL_S = 2.5
SHARE_S = 2.0
ECHOES = 50
SHARES = (0.05, 0.161, 0.25, 0.45, 0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--repeat", type=int, default=3, help="times that each stream and each up is measured"
    )
    options = parser.parse_args()
    if options.part:
        print(json.dumps(PARTS[options.part]()), flush=True)
        return
    load = os.getloadavg()[0]
    rows = [link(rtt_ms, "1Gbit/s", options.repeat) for rtt_ms in (20, 57, 103)]
    rows.append(link(57, None, options.repeat))
    rows += [lifetime(sites, options.repeat) for sites in (2, 8)]
    rows += shares()
    report(rows, load)


def lab(*words: str) -> dict[str, Any]:
    """Return the answer of `farspan lab WORDS`."""
    done = subprocess.run([*FARSPAN, *words, "--json"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return dict(json.loads(done.stdout))


def up(text: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(f"name: {NAME}\n{text}")
        file.flush()
        return lab("up", file.name)


def begin(site: str, part: str, *words: str) -> subprocess.Popen[str]:
    """Start a part of this file in a site; it has said `ready` when this returns, if it listens."""
    command = [
        *FARSPAN,
        "exec",
        "--lab",
        NAME,
        site,
        *words,
        "--",
        sys.executable,
        __file__,
        "--part",
        part,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    if part in ("echo", "sink"):
        assert process.stdout is not None
        process.stdout.readline()
    return process


def result(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.read())


def link(rtt_ms: float, cap: str | None, repeat: int) -> dict[str, Any]:
    """Round trip and throughput of one link between two sites, and what the relay took
    meanwhile."""
    rate = f", bandwidth: {cap}" if cap else ""
    status = up(
        f"sites: {{a: {{}}, b: {{}}}}\nlinks: [{{between: [a, b], rtt: {rtt_ms}ms{rate}}}]\n"
    )
    try:
        echo = begin("b", "echo")
        trips = result(begin("a", "ping"))
        echo.terminate()
        streams = [stream() for _ in range(repeat)]
    finally:
        lab("down", "--lab", NAME)
    return {
        "figure": "link",
        "rtt_ms": rtt_ms,
        "bandwidth": cap,
        "congestion": status["lab"]["congestion"],
        "window": status["lab"]["window"],
        "realtime": status["realtime"],
        "streams": streams,
        "measured_rtt_ms": [round(1e3 * trip, 3) for trip in trips],
    }


def stream() -> dict[str, Any]:
    """One TCP stream from a to b: bit/s when its window is full, and the relay's share of a core
    all along."""
    sink = begin("b", "sink")
    before = lab("status", "--lab", NAME)
    source = begin("a", "pour")
    arrived = result(sink)
    source.wait()
    after = lab("status", "--lab", NAME)
    full = [(at, total) for at, total in arrived if FILL_S <= at <= STREAM_S]
    return {
        "bits_per_s": 8 * (full[-1][1] - full[0][1]) / (full[-1][0] - full[0][0]),
        "relay_share": (after["relay_cpu_s"] - before["relay_cpu_s"]) / arrived[-1][0],
        "dropped": sum(one["dropped"] for one in after["traffic"])
        - sum(one["dropped"] for one in before["traffic"]),
    }


def lifetime(sites: int, repeat: int) -> dict[str, Any]:
    """Seconds from the command to a lab of so many sites, each joined to each, and back to
    nothing."""
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        up(
            f"sites: {{{', '.join(f'site{number}: {{}}' for number in range(sites))}}}\n"
            f"default_link: {{rtt: 20ms}}\n"
        )
        made = time.perf_counter()
        lab("down", "--lab", NAME)
        times.append({"up_s": made - began, "down_s": time.perf_counter() - made})
    return {"figure": "lifetime", "sites": sites, "times": times}


def shares() -> list[dict[str, Any]]:
    """Processor time over time of a process that only computes, for devices of some speeds, one
    after the other."""
    up(f"sites: {{a: {{devices: [{', '.join(f'{{speed: {share:.1%}}}' for share in SHARES)}]}}}}\n")
    try:
        got = [result(begin("a", "busy", "--device", str(number))) for number in range(len(SHARES))]
    finally:
        lab("down", "--lab", NAME)
    return [
        {"figure": "share", "asked": share, "got": one}
        for share, one in zip(SHARES, got, strict=True)
    ]


def echo() -> None:
    here = socket.socket(type=socket.SOCK_DGRAM)
    here.bind(("", PORT))
    print("ready", flush=True)
    while True:
        here.sendto(*here.recvfrom(100))


def ping() -> list[float]:
    here = socket.socket(type=socket.SOCK_DGRAM)
    trips = []
    for _ in range(ECHOES):
        began = time.perf_counter()
        here.sendto(b"x", ("b", PORT))
        here.recv(100)
        trips.append(time.perf_counter() - began)
        time.sleep(0.005)
    return trips


def sink() -> list[tuple[float, int]]:
    """Bytes that have come, at some times after the first."""
    here = socket.create_server(("", PORT))
    block = bytearray(2**20)
    total = 0
    found = []
    print("ready", flush=True)
    connection, _ = here.accept()
    began = time.perf_counter()
    while size := connection.recv_into(block):
        total += size
        if (now := time.perf_counter() - began) > 0.1 * len(found):
            found.append((now, total))
    return found


def pour() -> None:
    block = bytes(2**20)
    until = time.perf_counter() + STREAM_S
    with socket.create_connection(("b", PORT)) as connection:
        while time.perf_counter() < until:
            connection.sendall(block)


def busy() -> float:
    began = time.perf_counter()
    used = time.process_time()
    while time.perf_counter() - began < SHARE_S:
        pass
    return (time.process_time() - used) / (time.perf_counter() - began)


PARTS: dict[str, Any] = {"echo": echo, "ping": ping, "sink": sink, "pour": pour, "busy": busy}


def report(rows: list[dict[str, Any]], load: float) -> None:
    """Print the figures and write them, with what they were measured on, to results/lab.json."""
    for row in rows:
        print(words(row))
    environment = {
        "date": time.strftime("%Y-%m-%d"),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "load_before": load,
        "nice": os.nice(0),
        "python": platform.python_version(),
        "commit": subprocess.check_output(
            ["git", "rev-parse", "--short", "HEAD"], text=True
        ).strip(),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "lab.json").write_text(
        json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n"
    )


def words(row: dict[str, Any]) -> str:
    if row["figure"] == "link":
        rates = [
            f"{stream['bits_per_s'] / 1e6:.0f} ({stream['relay_share']:.0%})"
            for stream in row["streams"]
        ]
        trip = statistics.median(row["measured_rtt_ms"])
        return (
            f"{row['rtt_ms']} ms, {row['bandwidth'] or 'no cap'}: {trip:.2f} ms; Mbit/s (relay) "
            f"{', '.join(rates)}"
        )
    if row["figure"] == "lifetime":
        medians = {
            key: statistics.median(one[key] for one in row["times"]) for key in ("up_s", "down_s")
        }
        return (
            f"{row['sites']} sites: up in {medians['up_s']:.2f} s, down in "
            f"{medians['down_s']:.2f} s"
        )
    return (
        f"speed {row['asked']:.1%}: {row['got']:.2%}, off by "
        f"{abs(row['got'] / row['asked'] - 1):.1%}"
    )


if __name__ == "__main__":
    main()
