"""A command that stops with its standard input: `python -m farspan.launch.held COMMAND...`.

Clients such as ssh pass input on to a host, but no signals: there STOP, or the end of the input, is the request to
stop, and KILL ends the command at once. The input also ends where the launcher is gone, however that happened.
The input begins with a line, the secret of the run, which the command finds in its environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from farspan.domain.run import SECRET

#: What standard input says.
STOP, KILL = b"s", b"k"


def at_end_of_input(stop: Callable[[], None], kill: Callable[[], None] = lambda: None) -> None:
    """Have `stop` called when standard input says STOP or has ended, and `kill` when it says KILL."""

    def read() -> None:
        while (said := os.read(0, 1)) not in (b"", KILL):
            if said == STOP:
                stop()
        (kill if said == KILL else stop)()

    threading.Thread(target=read, daemon=True).start()


def run(words: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run a command until it ends, asked to (SIGTERM) or not; its exit code, as a shell would give it."""
    asked, killed = threading.Event(), threading.Event()

    def kill() -> None:
        killed.set()
        asked.set()

    signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    at_end_of_input(asked.set, kill)
    process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL)

    def end() -> None:
        asked.wait()
        if not killed.is_set():
            process.terminate()
        killed.wait()
        process.kill()

    threading.Thread(target=end, daemon=True).start()
    code = process.wait()
    return code if code >= 0 else 128 - code


def first_line() -> str:
    """Of standard input, and nothing of what follows it."""
    line = b""
    while (said := os.read(0, 1)) not in (b"", b"\n"):
        line += said
    return line.decode()


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1:], {**os.environ, SECRET: first_line()}))
