"""Ray nodes on loopback, started as a user would start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from farspan.launch.launchers.ray import HEAD_WAIT
from tests.waiting import LIMIT_S, wait_for

TOKEN = "0123456789abcdef" * 4
#: What `ray start` prints of the port that the head took.
ADDRESS = re.compile(rb"--address='[^']*:(\d+)'")
OPTIONS = ("--node-ip-address=127.0.0.1", "--num-cpus=1", "--disable-usage-stats")


def ray_environment(folder: Path) -> dict[str, str]:
    """Of nodes and of their users, without the token."""
    return {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_worker_niceness": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        **HEAD_WAIT,
        "FARSPAN_CACHE": str(folder / "cache"),
    }


def start_node(words: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "farspan.launch.ray_node", *words, *OPTIONS],
            env=environment,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    assert process.stdin is not None
    process.stdin.write(f"{TOKEN}\n".encode())
    return process


def start_head(
    words: list[str], environment: dict[str, str], log: Path
) -> tuple[subprocess.Popen[bytes], str]:
    """The first node of a cluster, and its address: a port that was free."""
    head = ["--head", "--port=0", "--include-dashboard=false"]
    process = start_node([*head, *words], environment, log)
    found = wait_for(lambda: ADDRESS.search(log.read_bytes()), "the head has a port", process)
    return process, f"127.0.0.1:{found[1].decode()}"


def end_node(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait(timeout=LIMIT_S)
