"""Watches for the notice by which a cloud announces that it takes this worker's host away."""

from __future__ import annotations

import os
import subprocess
import threading
import time

from farspan.runtime.stop_and_preemption import NOTICE_SIGNAL

#: The command is run this often: clouds give notice 30 s before, at least (Google Cloud, Azure).
NOTICE_POLL_S = 5.0
#: One that has not ended by then has no notice.
NOTICE_TIMEOUT_S = 10.0


def watch_notice(command: str | None) -> None:
    """Run a shell command repeatedly, in a thread, until it succeeds: then signal that to this
    process. Without a command do nothing."""
    if command is not None:
        threading.Thread(target=_wait_for_notice, args=(command,), daemon=True).start()


def _wait_for_notice(command: str) -> None:
    while not _has_notice(command):
        time.sleep(NOTICE_POLL_S)
    os.kill(os.getpid(), NOTICE_SIGNAL)


def _has_notice(command: str) -> bool:
    nothing = subprocess.DEVNULL
    try:
        done = subprocess.run(
            ["sh", "-c", command],
            stdin=nothing,
            stdout=nothing,
            stderr=nothing,
            timeout=NOTICE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
