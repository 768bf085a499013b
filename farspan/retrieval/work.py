"""The work on an index: how far it is, and what of it is on disk already, so that it goes on where
it was stopped."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

import numpy as np
import numpy.typing as npt

from farspan.domain.own_files import open_own
from farspan.domain.units import format_seconds

Kind = Literal["embedding", "fitting", "storing"]
_DIGEST_BYTES = hashlib.sha256().digest_size


class Features:
    """Blocks of numbers in the order of their making, each behind its SHA-256. What a killed
    process or a damaged disk has left of a block is cut off, with all that comes after."""

    def __init__(self, file: IO[bytes] | None) -> None:
        self._file = file

    def read(self, values: int) -> npt.NDArray[np.float32] | None:
        """The next block, of so many values; None from the first that is missing on."""
        if self._file is None:
            return None
        start = self._file.tell()
        digest = self._file.read(_DIGEST_BYTES)
        block = self._file.read(4 * values)
        if len(block) == 4 * values and hashlib.sha256(block).digest() == digest:
            return np.frombuffer(block, np.float32)
        self._file.seek(start)
        self._file.truncate()
        return None

    def write(self, block: npt.NDArray[np.float32]) -> None:
        """Add a block behind the last that was read or written; it survives a killed process."""
        if self._file is not None:
            content = block.tobytes()
            self._file.write(hashlib.sha256(content).digest() + content)
            self._file.flush()


class IndexWork:
    """Amounts to do and done by kind: characters to embed, steps to fit, chunks to store.

    `clock` gives seconds, and `changed` is called after each part. Features are kept in `folder`,
    or not at all.
    """

    def __init__(
        self,
        clock: Callable[[], float] = lambda: 0.0,
        changed: Callable[[IndexWork], None] = lambda work: None,
    ) -> None:
        self.clock = clock
        self._changed = changed
        self.folder: Path | None = None
        self.kind: Kind = "embedding"
        self._total: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        #: What was done by this process, and the seconds that it took: what the time to go is
        #: predicted from.
        self._fresh: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._since = 0.0
        #: Texts that this process embedded, and those of which it found the features on disk.
        self.embedded = self.kept = 0

    def expect(self, kind: Kind, amount: int) -> None:
        self._total[kind] += amount

    def start(self, kind: Kind) -> None:
        """What comes next is of this kind."""
        self.kind, self._since = kind, self.clock()

    def did(self, amount: int, *, texts: int = 0, kept: bool = False) -> None:
        """A part of the present kind is done, or was found on disk: of so many texts."""
        now = self.clock()
        self._done[self.kind] += amount
        if kept:
            self.kept += texts
        else:
            self.embedded += texts
            self._fresh[self.kind] += amount
            self._seconds[self.kind] = self._seconds.get(self.kind, 0.0) + now - self._since
        self._since = now
        self._changed(self)

    def __str__(self) -> str:
        left_s = self.eta_s()
        eta = "" if left_s is None else f" · ETA {format_seconds(left_s)}"
        return f"{self.kind} {self.share:.0%}{eta}"

    @property
    def share(self) -> float:
        """How much of the present kind is done, from 0 to 1."""
        return min(1.0, self._done[self.kind] / max(self._total[self.kind], 1))

    def eta_s(self) -> float | None:
        """Seconds to go for every kind whose pace is known by now; None before any is."""
        paces = {
            kind: self._seconds[kind] / amount for kind, amount in self._fresh.items() if amount
        }
        return (
            sum(max(self._total[kind] - self._done[kind], 0) * pace for kind, pace in paces.items())
            or None
        )

    @contextmanager
    def features(self, name: str) -> Iterator[Features]:
        """What is kept under a name, which tells what the features are of; the folder is one
        model's."""
        if self.folder is None:
            yield Features(None)
            return
        path = self.folder / f"{name}.features"
        open_own(path, "ab").close()
        with open_own(path, "rb+") as file:
            yield Features(file)
