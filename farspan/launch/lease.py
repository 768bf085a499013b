"""The right to train a run: its lock, held by one process and what it starts, and the epochs of its
starts."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType

import msgspec

from farspan.domain import epoch
from farspan.domain.codec import parse_json, read_bytes
from farspan.domain.epoch import Epoch, Fault, Ledger, Number
from farspan.domain.problems import Refusal
from farspan.domain.results import Recovered, Started, read_events
from farspan.domain.run import RunFolder, refuse_replaced
from farspan.launch.lock import locked

#: Bytes of a checkpoint's manifest at most: more is damage.
MOST_MANIFEST = 2**28


class _Progress(msgspec.Struct, frozen=True):
    """Of a checkpoint's manifest what says which start wrote it."""

    epoch: Number = 0


class _Manifest(msgspec.Struct, frozen=True):
    progress: _Progress


class Lease:
    """Holds a run from when it is made until `close`, over as many starts as it takes. Raises
    Refusal (run-busy)."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._lock = locked(run.lock, "this run is being trained already", run.path)
        #: What was wrong with the ledger of epochs when the last start began, for people.
        self.mended: str | None = None

    @property
    def keep_open(self) -> int:
        """The lock's descriptor, for processes to inherit: it is held as long as any of them
        lives."""
        return self._lock.fileno()

    def require_held(self) -> None:
        """Raises Refusal (path-missing) where another file has taken the place of the lock: the
        folder was replaced."""
        refuse_replaced(self._lock, self._run.lock)

    def begin(
        self, *, used_s: float = 0.0, skip: tuple[int, ...] = (), fault: Fault | None = None
    ) -> Epoch:
        """Begin an epoch: what workers of earlier ones write from now on counts for nothing."""
        names = [path.name.removeprefix("step-") for path in self._run.checkpoints.glob("step-*")]
        newest = max((int(name) for name in names if name.isdecimal()), default=-1)
        number = epoch.advance(self._run.epochs, newest, self._mended(newest))
        return Epoch(number=number, used_s=used_s, skip=skip, fault=fault)

    def _mended(self, newest: int) -> Ledger | None:
        """A ledger in place of one that is damaged, gone, or older than the newest checkpoint; None
        where there is nothing to mend."""
        self.mended, saved = None, _newest_saved(self._run)
        wrong = "it is older than a checkpoint"
        try:
            ledger = epoch.read_ledger(self._run.epochs)
            if ledger.epoch >= max(saved, 1):
                return None
            if ledger.epoch == 0:
                wrong = "it is missing"
        except Refusal as refusal:
            wrong = refusal.problem.fact
        if found := max(saved, _newest_told(self._run)):
            self.mended = (
                f"{self._run.epochs.name}: {wrong}; by checkpoints and events the newest start of "
                f"the run was number {found}"
            )
        return epoch.rebuilt(found, newest)

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


def _newest_saved(run: RunFolder) -> int:
    """The newest start that has written a checkpoint which is there; 0 where none has."""
    found = 0
    for path in run.checkpoints.glob("*/manifest.json"):
        with suppress(Refusal, OSError):  # Damaged: whoever restores says so.
            manifest = parse_json(read_bytes(path, most=MOST_MANIFEST), _Manifest, path)
            found = max(found, manifest.progress.epoch)
    return found


def _newest_told(run: RunFolder) -> int:
    """The newest start that events tell of. Each that trains says so, one after a fault also its
    number."""
    found = 0
    for event in read_events(run.events) if run.events.exists() else ():
        if isinstance(event, Started):
            found += 1
        elif isinstance(event, Recovered):
            found = max(found, event.epoch)
    return found
