"""The speed of copies made during training: bytes go out no faster than a rate, so that the network
and the disks stay the steps'."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from typing import IO

from farspan.domain.config import RunConfig
from farspan.domain.run import RunFolder
from farspan.domain.struct_files import load_yaml
from farspan.domain.units import parse_rate

#: Shares of the time between two checkpoints: the copy from rank 0's own disk comes first, then
#: those to all places. Together they leave a quarter, so that a lost disk loses one interval.
MIRROR_SHARE = 0.25
COPIES_SHARE = 0.5
#: A copy takes no longer than this, however rare checkpoints are. A choice.
MAX_PACED_S = 600.0
#: What no link notices, bytes a second: small files go at least as fast. A choice.
MIN_RATE = 1e5
#: Bytes that go out at once.
PACED_BYTES = 2**18


class Pacer:
    """Delays whoever spends bytes, so that they come to no more than `rate` a second (None: any).

    Another thread may lift the bound. `clock` and `wait` are the time's, in seconds; `wait` returns
    early, with True, where an event is set.
    """

    def __init__(
        self,
        rate: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._wait = wait
        self._lifted = threading.Event()
        #: When the bytes spent so far are paid for.
        self._due = clock()
        self.spent_bytes = 0

    def set_rate(self, rate: float | None) -> None:
        """Set the rate from now on; a bound that was lifted stays so."""
        self._rate = rate

    def lift(self) -> None:
        """Let the rest go at full speed."""
        self._lifted.set()

    def spend(self, size: int) -> None:
        """Wait until `size` more bytes may have gone."""
        self.spent_bytes += size
        if self._rate is None or self._lifted.is_set():
            return
        now = self._clock()
        # Time in which nothing was sent is not made up for by a burst.
        self._due = max(self._due, now) + size / self._rate
        self._wait(self._lifted, self._due - now)


class PacedReader:
    """The first `size` bytes of a file, read no faster than a pacer allows. `sha256` is of what was
    read so far."""

    def __init__(self, file: IO[bytes], size: int, pacer: Pacer) -> None:
        self._file = file
        self._remaining = size
        self._pacer = pacer
        self._digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        # In small parts, so that the network has no bursts.
        content = bytearray()
        while size and (part := self._file.read(min(size, self._remaining, PACED_BYTES))):
            content += part
            size -= len(part)
            self._remaining -= len(part)
            self._digest.update(part)
            self._pacer.spend(len(part))
        return bytes(content)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def given_rate(run: RunFolder) -> float | None:
    """Return the bytes a second that the run's own run.yaml sets for copies; None for `auto`."""
    if not run.config.exists():
        return None
    rate = load_yaml(run.config, RunConfig).checkpoint.copy_rate
    return None if rate == "auto" else parse_rate(rate)


def automatic_rate(size: int, every_s: float, share: float) -> float:
    """Return the bytes a second at which `size` bytes take this share of the time between two
    checkpoints, and no less than MIN_RATE."""
    return max(MIN_RATE, size / min(every_s * share, MAX_PACED_S))
