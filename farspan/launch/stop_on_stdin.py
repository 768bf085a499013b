"""A command that stops with its standard input: `python -m farspan.launch.stop_on_stdin
COMMAND...`.

Clients such as ssh pass input on to a host, but no signals: there STOP, or the end of the input, is
the request to stop, and KILL ends the command at once. The input also ends where the launcher is
gone, however that happened. The input begins with a line, the secret of the run, which the command
finds in its environment. STOP is passed on to the command's own standard input before the signal:
one that this process gets from elsewhere is passed on without it.

On Linux the command is also asked to stop where this process itself is killed, and what a killed
command leaves behind, as torchrun does its workers, is waited for.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import psutil

from farspan.domain.run import SECRET_VARIABLE
from farspan.domain.standard_input import KILL, LED, STOP, first_line

#: Of Linux's prctl.h: the signal that a process gets when its parent ends; whether a process adopts
#: what its descendants leave.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def follow_input(
    *, stop: Callable[[], None], ended: Callable[[], None], kill: Callable[[], None] = lambda: None
) -> None:
    """Call `stop` at each STOP on standard input, `kill` at KILL, and `ended` when it has ended
    without."""

    def read_input() -> None:
        while (command := os.read(0, 1)) not in (b"", KILL):
            if command == STOP:
                stop()
        if command == KILL:
            kill()
        else:
            ended()

    threading.Thread(target=read_input, daemon=True).start()


def run_command(
    words: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    leads: bool = False,
    first: Callable[[], None] = lambda: None,
) -> int:
    """Run a command until it ends, asked to (SIGTERM) or not; return its exit code, as a shell
    does.

    With `leads` the command gets STOP on its standard input, which ends with this process, and this
    runs until all have ended that the command leaves behind. Before it is asked, `first` is called.
    """
    asked = threading.Event()
    killed = threading.Event()
    linux = sys.platform == "linux"
    parent = os.getpid()

    def end_with_parent() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # Killed in between.
            os._exit(128 + signal.SIGTERM)

    def stop() -> None:
        if process.stdin is not None:
            with suppress(BrokenPipeError):  # It has ended already.
                process.stdin.write(STOP)
        asked.set()

    def kill() -> None:
        killed.set()
        asked.set()

    signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    if leads and linux:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Before any other thread runs here, which could hold a lock while the process is made.
    process = subprocess.Popen(
        words,
        env=environment,
        bufsize=0,
        stdin=subprocess.PIPE if leads else subprocess.DEVNULL,
        preexec_fn=end_with_parent if linux else None,
        # It inherits what this process was given to keep open, as the lock of a run.
        close_fds=False,
    )
    follow_input(stop=stop, ended=asked.set, kill=kill)

    def end_command() -> None:
        asked.wait()
        first()
        if not killed.is_set():
            process.terminate()
        killed.wait()
        family = psutil.Process().children(recursive=True)
        process.kill()
        for member in family if leads else ():
            with suppress(psutil.NoSuchProcess):
                member.kill()

    threading.Thread(target=end_command, daemon=True).start()
    code = process.wait()
    with suppress(ChildProcessError):  # None is left.
        while leads:
            os.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    led = {**os.environ, SECRET_VARIABLE: first_line(), LED: "1"}
    raise SystemExit(run_command(sys.argv[1:], led, leads=True))
