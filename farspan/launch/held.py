"""A command that stops with its standard input: `python -m farspan.launch.held COMMAND...`.

Clients such as ssh pass input on to a host, but no signals: there the end of the input is the request to stop. It also
ends where the launcher is gone, however that happened.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence


def at_end_of_input(stop: Callable[[], None]) -> None:
    """Have `stop` called when standard input has ended."""

    def read() -> None:
        while os.read(0, 1):
            continue
        stop()

    threading.Thread(target=read, daemon=True).start()


def run(words: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run a command until it ends, asked to (SIGTERM) or not; its exit code, as a shell would give it."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    at_end_of_input(asked.set)
    process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL)

    def stop() -> None:
        asked.wait()
        process.terminate()

    threading.Thread(target=stop, daemon=True).start()
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:]))
