"""pandoc, a program that converts documents: where it is, and its work within bounds.

It runs as a process of its own in its sandbox, reads standard input alone, and is ended with all
that it started where it takes too long. It is never linked or imported (docs/decisions/0028).
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import selectors
import shutil
import signal
import subprocess
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import IO, NamedTuple

from farspan.corpus.reading import CHUNK_BYTES, MAX_DOCUMENT_BYTES, TOO_LONG, UnreadableFile

#: The heap of its runtime system; a book takes a tenth of this.
HEAP_MIB = 512
#: All data of the process, where the system bounds it.
_DATA_BYTES = 2 << 30
#: Seconds of a core for a document, and of the clock where a machine is busy. A book takes 2 s.
CONVERTER_CPU_S = 60
CONVERTER_WALL_S = 600
#: What it writes when it gives up for memory, by its manual's list of exit codes and its runtime's.
_HEAP_EXHAUSTED = 251
#: How often a conversion looks whether it is still wanted.
_LOOK_S = 0.5
#: Of its messages the last one is kept.
_MAX_MESSAGE_BYTES = 1 << 16

TAKES_TOO_MUCH_MEMORY = f"takes pandoc more than {HEAP_MIB} MiB of memory"
TAKES_TOO_LONG = f"takes pandoc more than {CONVERTER_CPU_S} s of a core"


class Pandoc(NamedTuple):
    """The program, and the formats that it reads."""

    path: Path
    formats: frozenset[str]


@functools.cache
def find_pandoc() -> Pandoc | None:
    """Find the pandoc of the package `pypandoc_binary`, or one on the path that has a sandbox.

    The package is looked for and not imported.
    """
    candidates = []
    with contextlib.suppress(ImportError, ValueError):
        spec = find_spec("pypandoc")
        if spec is not None and spec.origin is not None:
            candidates.append(Path(spec.origin).with_name("files") / "pandoc")
    on_path = shutil.which("pandoc")
    if on_path is not None and Path(on_path).is_absolute():
        candidates.append(Path(on_path))
    for path in candidates:
        formats = _list_formats(path) if os.access(path, os.X_OK) else frozenset()
        if formats:
            return Pandoc(path, formats)
    return None


def _list_formats(path: Path) -> frozenset[str]:
    """Return the formats that a pandoc reads; none of one before 2.15, which has no sandbox."""
    try:
        done = subprocess.run(
            [path, "--sandbox", "--list-input-formats"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=_environment(),
            timeout=CONVERTER_WALL_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    return frozenset(done.stdout.decode("utf-8", "replace").split())


def _environment() -> dict[str, str]:
    """Return the environment of pandoc: no home, whose templates and settings it would read."""
    return {"HOME": "/nonexistent", "XDG_DATA_HOME": "/nonexistent", "LANG": "C.UTF-8"}


def convert_to_html(
    pandoc: Pandoc, content: IO[bytes], format_name: str, stopped: threading.Event
) -> str:
    """Convert a file, given from its begin, to a page of HTML.

    Raises UnreadableFile for one that pandoc cannot read or that takes too much, and where
    `stopped` is set during the wait.
    """
    command = [
        str(pandoc.path),
        *("+RTS", f"-M{HEAP_MIB}M", "-RTS"),
        *("--sandbox", "--quiet", "--standalone", "--wrap=none"),
        *("--from", format_name, "--to", "html5"),
    ]
    process = subprocess.Popen(
        command,
        stdin=content,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(),
        cwd="/",
        start_new_session=True,
    )
    try:
        _limit(process.pid)
        page, message = _read_outputs(process, stopped)
        code = process.wait()
    finally:
        _kill_group(process)
    if code == 0:
        return page.decode("utf-8", "replace")
    if code == _HEAP_EXHAUSTED:
        raise UnreadableFile(TAKES_TOO_MUCH_MEMORY)
    if code == -signal.SIGXCPU:
        raise UnreadableFile(TAKES_TOO_LONG)
    words = " ".join(message.decode("utf-8", "replace").split())[:300]
    raise UnreadableFile("damaged", words or f"pandoc ended with {code}")


def _limit(pid: int) -> None:
    """Bound what the process computes and holds, where the system has such limits."""
    if not hasattr(resource, "prlimit"):
        return
    # It may have ended already.
    with contextlib.suppress(OSError, ValueError):
        # At the first limit it ends by a signal of its own, at the second it is killed.
        limits = (CONVERTER_CPU_S, 2 * CONVERTER_CPU_S)
        resource.prlimit(pid, resource.RLIMIT_CPU, limits)
        resource.prlimit(pid, resource.RLIMIT_DATA, (_DATA_BYTES, _DATA_BYTES))


def _read_outputs(
    process: subprocess.Popen[bytes], stopped: threading.Event
) -> tuple[bytes, bytes]:
    """Return the page that the process writes, and its last messages; both are bounded."""
    assert process.stdout is not None
    assert process.stderr is not None
    page = bytearray()
    message = bytearray()
    ends_s = time.monotonic() + CONVERTER_WALL_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, page)
        selector.register(process.stderr, selectors.EVENT_READ, message)
        while selector.get_map():
            for key, _ in selector.select(_LOOK_S):
                piece = os.read(key.fd, CHUNK_BYTES)
                key.data.extend(piece)
                if not piece:
                    selector.unregister(key.fileobj)
            del message[:-_MAX_MESSAGE_BYTES]
            if len(page) > MAX_DOCUMENT_BYTES:
                raise UnreadableFile(TOO_LONG)
            if stopped.is_set() or time.monotonic() > ends_s:
                raise UnreadableFile(TAKES_TOO_LONG)
    return bytes(page), bytes(message)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started; without effect once they have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
