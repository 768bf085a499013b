"""Worker processes that end with the process that started them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.machinery import ModuleSpec
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path

from farspan.domain.interpreter import safe_path_environment
from farspan.domain.library_messages import escape_library_messages

#: One process starts at a time: each changes what the program is called, and its environment, while
#: it does.
_STARTING = threading.Lock()


def usable_cores() -> int:
    """Count the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class ChildProcess(SpawnProcess):
    """A new process that does not import the program's own script again.

    Such an import would run a script without `if __name__ == "__main__":` a second time. Python
    leaves it out where the program is a package's `__main__`
    (`multiprocessing.spawn._fixup_main_from_name`): here any program is called one.
    """

    def start(self) -> None:
        program = sys.modules["__main__"]
        with _STARTING, safe_path_environment():
            before = program.__spec__
            program.__spec__ = ModuleSpec("farspan.__main__", None)
            try:
                super().start()
            finally:
                program.__spec__ = before


class _Context(SpawnContext):
    Process = ChildProcess


def spawn_pool(count: int) -> ProcessPoolExecutor:
    """Open a pool of up to `count` new processes. They end with this one however it ends, also when
    it is killed."""
    with _STARTING, safe_path_environment():  # Its locks start a process of their own.
        return ProcessPoolExecutor(count, mp_context=_Context(), initializer=_start_worker)


class ProcessChannel:
    """One end of a connection between two processes, which send each other bytes."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._stream = end.makefile("rb")

    def send(self, content: bytes) -> None:
        """Send bytes. Raises OSError where the other end is gone."""
        self._socket.sendall(len(content).to_bytes(8, "little") + content)

    def receive(self) -> bytes:
        """Return the bytes that the other end sent. Raises EOFError where it is gone."""
        length = self._stream.read(8)
        size = int.from_bytes(length, "little")
        content = self._stream.read(size)
        if len(length) < 8 or len(content) < size:
            raise EOFError
        return content

    def close(self) -> None:
        self._stream.close()
        self._socket.close()


def start_beside(
    target: Callable[..., None], *arguments: object
) -> tuple[ChildProcess, ProcessChannel]:
    """Start a new process that runs `target(channel, *arguments)`. Returns this end of the channel
    too.

    It ends with this process however this one ends.
    """
    here, there = socket.socketpair()
    process = ChildProcess(target=_run_beside, args=(target, there, *arguments), daemon=True)
    with there:
        # Only the new process keeps its end, so that its death ends the channel.
        process.start()
    return process, ProcessChannel(here)


def _run_beside(target: Callable[..., None], end: socket.socket, *arguments: object) -> None:
    _start_worker()
    target(ProcessChannel(end), *arguments)


def silence_errors() -> None:
    """Let nobody see this process's standard error: native libraries print traces of what they
    refuse."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)


def limit_memory(more_bytes: int) -> None:
    """Bound what this process may take beyond what it has; without effect on macOS."""
    with contextlib.suppress(ValueError, OSError):
        limit = _data_bytes() + more_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


def limit_cpu(seconds: int) -> None:
    """Let this process compute for so long from now; then the system ends it."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    used_s = int(time.process_time()) + 1
    soft = used_s + seconds
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _data_bytes() -> int:
    """Return the bytes of data that this process has mapped. Raises OSError where the system does
    not report it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmData":
            return int(value.split()[0]) * 1024
    raise OSError("no VmData")


def _start_worker() -> None:
    escape_library_messages()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A worker holds both ends of the queue it waits at, so it never sees that nobody is left to
    # write to it.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
