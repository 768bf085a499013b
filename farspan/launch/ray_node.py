"""One Ray node that lives no longer than its launcher: `python -m farspan.launch.ray_node
RAY-START-OPTIONS`.

The first line of its standard input is the token: everybody on the machine can read a command line.
It ends Ray when it gets SIGTERM, or when its standard input ends, as it does when the launcher is
gone. Ray would take the workers along that are saving then: they go first.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

import psutil

from farspan.domain.interpreter import module_command
from farspan.launch.stop_on_stdin import run_command
from farspan.launch.workers import SAVE_TIMEOUT_S, WORKER_POLL_S


def let_workers_end() -> None:
    """Wait for the workers that this node's actors have started."""
    deadline = time.monotonic() + SAVE_TIMEOUT_S
    while time.monotonic() < deadline:
        family = psutil.Process().children(recursive=True)
        if not any(map(_is_worker, family)):
            break
        time.sleep(WORKER_POLL_S)


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "farspan.runtime.worker" in process.cmdline()
    except psutil.Error:  # It has ended.
        return False


def main() -> int:
    token = sys.stdin.readline().strip()
    # Not below a run or $TMPDIR: Ray's sockets lie there, and a socket's path has 107 bytes at
    # most.
    with tempfile.TemporaryDirectory(
        prefix="fr-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        options = ["start", "--block", f"--temp-dir={folder}", *sys.argv[1:]]
        words = module_command(sys.executable, "ray.scripts.scripts", *options)
        environment = {**os.environ, "RAY_AUTH_TOKEN": token}
        return run_command(words, environment, first=let_workers_end)


if __name__ == "__main__":
    raise SystemExit(main())
