"""Waiting for an event, with one limit that no machine is too busy for.

The limit ends a test that hangs; no test is about how long something takes.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

#: Seconds after which whatever is waited for is said never to happen.
LIMIT_S = 300.0
POLL_S = 0.02
Value = TypeVar("Value")


def wait_for(
    event: Callable[[], Value],
    what: str,
    process: subprocess.Popen[str] | subprocess.Popen[bytes] | None = None,
) -> Value:
    """The first true value of `event()`.

    Fails after LIMIT_S, or as soon as `process`, which should bring it about, has ended without.
    """
    end = time.monotonic() + LIMIT_S
    while True:
        over = process is not None and process.poll() is not None
        if value := event():
            return value
        assert not over, f"the process ended before: {what}"
        assert time.monotonic() < end, f"never happened in {LIMIT_S:.0f} s: {what}"
        time.sleep(POLL_S)
