"""Readers of formats that unpack to any size, in a process of bounded memory and computation.

A page of a Parquet file or a stream of a PDF may claim to hold gigabytes, and the libraries
believe it. Only the system can bound what they take.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from farspan.corpus.processes import (
    ChildProcess,
    ProcessChannel,
    limit_cpu,
    limit_memory,
    silence_errors,
    start_beside,
)
from farspan.corpus.reading import ReadOptions, UnreadableFile, first_words
from farspan.domain.corpus import Document, Skipped, make_encodable
from farspan.domain.decoding import decode_msgpack

#: Gives the documents of a file; None says that it goes on, as between pages. It is given the
#: options too, where there are some.
Reader = Callable[..., Iterator[Document | Skipped | None]]

#: Memory of the process beyond what it starts with. Pages of an honest file have a MiB or so.
MEMORY_BYTES = 1 << 30
#: Seconds of a core for each document, row or page. One of a usual book takes 0.1 s.
CPU_S = 120
#: Text that goes from process to process at a time.
_BATCH_CHARS = 1 << 20
_BATCH_ROWS = 1000


class _Request(msgspec.Struct):
    """A file to be read, and the function that reads it."""

    module: str
    reader: str
    file: bytes
    options: ReadOptions | None


class _Batch(msgspec.Struct, omit_defaults=True):
    """What the process sends: documents and rows left out, at last why the file ended early."""

    documents: list[Document] = []
    skipped: list[Skipped] = []
    ended: bool = False
    reason: str = ""
    detail: str = ""


class GuardedReader:
    """A process that reads files, started for the first of them and again after each that ends it.

    Where the system does not enforce the limits (macOS), files are read without them.
    """

    def __init__(self, *, memory_bytes: int = MEMORY_BYTES, cpu_s: int = CPU_S) -> None:
        self._limits = (memory_bytes, cpu_s)
        self._process: ChildProcess | None = None
        self._channel: ProcessChannel | None = None

    def read(
        self, reader: Reader, file: Path, options: ReadOptions | None = None
    ) -> Iterator[Document | Skipped]:
        """Yield the documents of a file. Raises UnreadableFile for one that takes too much, or that
        the reader cannot read."""
        if self._channel is None:
            self._process, self._channel = start_beside(_serve_requests, *self._limits)
        channel = self._channel
        request = _Request(reader.__module__, reader.__qualname__, os.fsencode(file), options)
        is_whole = False
        try:
            channel.send(msgspec.msgpack.encode(request))
            while not is_whole:
                batch = decode_msgpack(channel.receive(), _Batch)
                yield from batch.documents
                yield from batch.skipped
                is_whole = batch.ended
        except (EOFError, OSError):
            raise UnreadableFile(self._cause_of_death()) from None
        finally:
            # What is left of a file that was given up is not the next one's.
            if not is_whole:
                self.close()
        if batch.reason:
            raise UnreadableFile(batch.reason, batch.detail)

    def _cause_of_death(self) -> str:
        assert self._process is not None
        self._process.join()
        if self._process.exitcode == -signal.SIGXCPU:
            return f"takes more than {self._limits[1]} s of a core"
        return "ends the process that reads it"

    def close(self) -> None:
        """End the process, if one is there."""
        if self._process is not None and self._channel is not None:
            self._channel.close()
            self._process.kill()
            self._process.join()
        self._process = self._channel = None


def _serve_requests(channel: ProcessChannel, memory_bytes: int, cpu_s: int) -> None:
    """Read the files that are asked for until nobody asks any more."""
    silence_errors()
    limit_memory(memory_bytes)
    while True:
        try:
            request = decode_msgpack(channel.receive(), _Request)
        except (EOFError, OSError):
            return
        end = _Batch(ended=True)
        try:
            reader = getattr(importlib.import_module(request.module), request.reader)
            file = Path(os.fsdecode(request.file))
            items = reader(file, request.options) if request.options else reader(file)
            _send_documents(channel, items, cpu_s)
        except UnreadableFile as error:
            end = _Batch(ended=True, reason=error.reason, detail=make_encodable(error.detail))
        except MemoryError:
            reason = f"takes more than {memory_bytes >> 20} MiB of memory"
            end = _Batch(ended=True, reason=reason)
        except Exception as error:  # Readers of damaged files raise anything.
            detail = make_encodable(first_words(error))
            end = _Batch(ended=True, reason="damaged", detail=detail)
        channel.send(msgspec.msgpack.encode(end))


def _send_documents(
    channel: ProcessChannel, items: Iterator[Document | Skipped | None], cpu_s: int
) -> None:
    batch = _Batch()
    chars = 0
    limit_cpu(cpu_s)
    for item in items:
        limit_cpu(cpu_s)
        if isinstance(item, Document):
            batch.documents.append(_make_encodable(item))
            chars += len(item.text)
        elif item is not None:
            path = make_encodable(item.path or "")
            detail = make_encodable(item.detail)
            batch.skipped.append(msgspec.structs.replace(item, path=path, detail=detail))
            chars += len(detail)
        if chars > _BATCH_CHARS or len(batch.skipped) > _BATCH_ROWS:
            channel.send(msgspec.msgpack.encode(batch))
            batch = _Batch()
            chars = 0
    channel.send(msgspec.msgpack.encode(batch))


def _make_encodable(document: Document) -> Document:
    """Replace halves of surrogate pairs, which UTF-8 cannot hold, so that a document can be
    sent."""
    metadata = {
        make_encodable(key): make_encodable(value) for key, value in document.metadata.items()
    }
    headings = document.headings
    if headings is not msgspec.UNSET:
        headings = tuple(
            msgspec.structs.replace(heading, title=make_encodable(heading.title))
            for heading in headings
        )
    return msgspec.structs.replace(
        document,
        headings=headings,
        title=make_encodable(document.title),
        text=make_encodable(document.text),
        origin=make_encodable(document.origin),
        metadata=metadata,
    )
