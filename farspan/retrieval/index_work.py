"""Progress of the work on an index, and the features on disk that it resumes from."""

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
    """Blocks of numbers in the order of their computation, each behind its SHA-256.

    A block that a killed process or a damaged disk left incomplete is cut off, with all after it.
    """

    def __init__(self, file: IO[bytes] | None) -> None:
        self._file = file

    def read(self, values: int) -> npt.NDArray[np.float32] | None:
        """Return the next block of `values` numbers; None from the first missing block on."""
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
        #: Amounts of this process, and the seconds that they took: the ETA is predicted from them.
        self._measured: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._since = 0.0
        #: Texts that this process embedded, and those with features on disk.
        self.embedded = self.kept = 0

    def add_expected(self, kind: Kind, amount: int) -> None:
        self._total[kind] += amount

    def start_kind(self, kind: Kind) -> None:
        """Begin work of a kind."""
        self.kind = kind
        self._since = self.clock()

    def add_done(self, amount: int, *, texts: int = 0, kept: bool = False) -> None:
        """Count an amount of the present kind as done; `kept` if it was on disk."""
        now = self.clock()
        self._done[self.kind] += amount
        if kept:
            self.kept += texts
        else:
            self.embedded += texts
            self._measured[self.kind] += amount
            elapsed_s = self._seconds.get(self.kind, 0.0)
            self._seconds[self.kind] = elapsed_s + now - self._since
        self._since = now
        self._changed(self)

    def __str__(self) -> str:
        eta_s = self.eta_s()
        eta = "" if eta_s is None else f" · ETA {format_seconds(eta_s)}"
        return f"{self.kind} {self.share:.0%}{eta}"

    @property
    def share(self) -> float:
        """The done share of the present kind, from 0 to 1."""
        return min(1.0, self._done[self.kind] / max(self._total[self.kind], 1))

    def eta_s(self) -> float | None:
        """Return the remaining seconds of every kind with a measured speed; None before any."""
        eta_s = 0.0
        for kind, amount in self._measured.items():
            if amount:
                remaining = max(self._total[kind] - self._done[kind], 0)
                eta_s += remaining * (self._seconds[kind] / amount)
        return eta_s or None

    @contextmanager
    def features(self, name: str) -> Iterator[Features]:
        """Open the features that are kept under a name; `folder` holds those of one model."""
        if self.folder is None:
            yield Features(None)
            return
        path = self.folder / f"{name}.features"
        open_own(path, "ab").close()
        with open_own(path, "rb+") as file:
            yield Features(file)
