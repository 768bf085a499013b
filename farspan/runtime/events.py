"""Writing events: one JSON line each, whole lines only, on disk before anything depends on them."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import msgspec

from farspan.domain.codec import cut_unfinished_line
from farspan.domain.results import Event


class EventLog:
    """Appends to `events.jsonl`. A line that a killed predecessor left unfinished is cut off first."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab")  # noqa: SIM115 - closed by __exit__
        cut_unfinished_line(path)
        self._encoder = msgspec.json.Encoder()

    def write(self, event: Event) -> None:
        self._file.write(self._encoder.encode(event) + b"\n")
        self._file.flush()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
