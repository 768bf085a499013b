"""Writing events: one JSON line each, whole lines only, on disk before anything depends on them.

Where the disk is full they are kept until there is space again: the run's saves decide whether it
continues without.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec

from farspan.domain.own_files import open_own
from farspan.domain.run import refuse_replaced
from farspan.domain.run_events import Event, Started, Step, decode_events
from farspan.domain.struct_files import cut_unfinished_line

#: Bytes of events that wait for a full disk at most: those of some 200,000 steps.
WAITING = 2**26


#: The last bytes of an event file that hold an event of a step: traces between two are shorter.
STEP_WITHIN_BYTES = 2**20


def newest_step(path: Path) -> int:
    """Return the step that the last start in an event file has reached; -1 where it is not among
    the last events."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - STEP_WITHIN_BYTES))
        whole_lines = file.read().split(b"\n")[1:-1]
    newest = -1
    for event in decode_events(whole_lines, path):
        if isinstance(event, Started | Step):
            newest = event.step
    return newest


class EventLog:
    """Appends to `events.jsonl`. A line that a killed predecessor left unfinished is cut off first.
    `may` is asked before each event, and raises where this worker was replaced."""

    def __init__(self, path: Path, may: Callable[[], None] = lambda: None) -> None:
        self._require_own = may
        may()
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: what a full disk has taken of a line is known.
        self._file = open_own(path, "ab", buffering=0)
        self._path = path
        cut_unfinished_line(path)
        self._encoder = msgspec.json.Encoder()
        self._unwritten = bytearray()
        #: The thread that notices the loss of a worker writes, too.
        self._writing = threading.Lock()

    def write(self, event: Event) -> None:
        """Append an event.

        Raises OSError if more than WAITING bytes could not be written, and Refusal (path-missing)
        if another file has taken the place of this one.
        """
        self._require_own()
        refuse_replaced(self._file, self._path)
        with self._writing:
            self._unwritten += self._encoder.encode(event) + b"\n"
            try:
                self._flush()
            except OSError:
                if len(self._unwritten) > WAITING:
                    raise

    def _flush(self) -> None:
        while self._unwritten:
            del self._unwritten[: self._file.write(self._unwritten)]

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Close the log. Raises OSError if events are still not written, unless something else has
        gone wrong."""
        try:
            self._flush()
            os.fsync(self._file.fileno())
        except OSError:
            if error is None:
                raise
        finally:
            self._file.close()
