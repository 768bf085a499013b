"""What a format of files is to the folder that holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import NamedTuple

from farspan.corpus.reading import MAX_UNPACKED_RATIO
from farspan.domain.corpus import Document, Skipped

#: Endings of packed files, which stand behind that of what is packed.
PACKED = (".gz", ".zst")

#: Gives the documents of a file, by its path and ReadOptions, and the rows left out; None reports
#: that it continues. A converter's is also given an event, set where nobody waits any more.
FormatReader = Callable[..., Iterator[Document | Skipped | None]]


class Runs(Enum):
    """Where a reader runs."""

    #: In this process: text, which is read by pieces of bounded size.
    HERE = auto()
    #: In a process of bounded memory and computation: what unpacks to any size.
    GUARDED = auto()
    #: In a thread, as the work is done by a program of its own.
    CONVERTER = auto()


class Needs(NamedTuple):
    """What a format needs that is not always installed: how to look for it, and the extra."""

    is_installed: Callable[[], bool]
    extra: str


class Format(NamedTuple):
    """Files that are read alike, by the endings of their names."""

    endings: tuple[str, ...]
    read: FormatReader
    runs: Runs = Runs.HERE
    #: True if the file's encoding is looked for first, by which a damaged file is found too.
    is_text: bool = True
    #: True if the file may declare its encoding, as pages do.
    declares: bool = False
    #: True if such files may also be packed.
    packed: bool = False
    #: The most that a packed file may unpack to, as a multiple of its own size; 0 for no limit,
    #: where parts of it are bounded.
    max_ratio: int = MAX_UNPACKED_RATIO
    needs: Needs | None = None
    #: True if its documents are rows, whose columns run.yaml may name.
    has_rows: bool = False
    #: Set when a kind of file came to be read in another way: what the same file held before is not
    #: what it holds now.
    read_as: str = ""
