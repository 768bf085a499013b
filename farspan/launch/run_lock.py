"""The right to train a run: its lock, held by one process and what it starts, and the epochs of its
starts."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from farspan.domain import epoch_fence
from farspan.domain.epoch_fence import Epoch, Fault, Ledger, Number
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder, refuse_replaced
from farspan.domain.run_events import Recovered, Started, read_events
from farspan.domain.struct_files import parse_json, read_bytes
from farspan.launch.folder_lock import lock_run

#: Bytes of a checkpoint's manifest at most: more is damage.
MAX_MANIFEST_BYTES = 2**28


class _Progress(msgspec.Struct, frozen=True):
    """The part of a checkpoint's manifest that names the start which wrote it."""

    epoch: Number = 0


class _Manifest(msgspec.Struct, frozen=True):
    progress: _Progress


class Lease:
    """Holds a run from when it is made until `close`, over all its starts. Raises Refusal
    (run-busy)."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._lock = lock_run(run)
        #: What was wrong with the ledger of epochs when the last start began, for people.
        self.mended: str | None = None

    @property
    def keep_open(self) -> int:
        """The lock's descriptor, for processes to inherit: it is held as long as any of them
        lives."""
        return self._lock.fileno()

    def require_held(self) -> None:
        """Raise Refusal (path-missing) where another file has taken the place of the lock: the
        folder was replaced."""
        refuse_replaced(self._lock, self._run.lock)

    def begin_epoch(
        self,
        *,
        used_s: float = 0.0,
        skip: tuple[int, ...] = (),
        fault: Fault | None = None,
        after: int = 0,
    ) -> Epoch:
        """Begin an epoch, later than `after`: what workers of earlier ones write from now on counts
        for nothing."""
        newest = -1
        for path in self._run.checkpoints.glob("step-*"):
            step = path.name.removeprefix("step-")
            if step.isdecimal():
                newest = max(newest, int(step))
        ledger = self._mend_ledger(newest)
        number = epoch_fence.begin_epoch(self._run.epochs, newest, ledger, after=after)
        return Epoch(number=number, used_s=used_s, skip=skip, fault=fault)

    def _mend_ledger(self, newest: int) -> Ledger | None:
        """Rebuild a ledger that is damaged, gone, or older than the newest checkpoint; return None
        where there is nothing to mend."""
        self.mended = None
        saved = _newest_saved_epoch(self._run)
        wrong = "it is older than a checkpoint"
        try:
            ledger = epoch_fence.read_ledger(self._run.epochs)
            if ledger.epoch >= max(saved, 1):
                return None
            if ledger.epoch == 0:
                wrong = "it is missing"
        except Refusal as refusal:
            wrong = refusal.problem.fact
        number = max(saved, _newest_recorded_epoch(self._run))
        if number:
            self.mended = (
                f"{self._run.epochs.name}: {wrong}; by checkpoints and events the newest start of "
                f"the run was number {number}"
            )
        return epoch_fence.rebuild_ledger(number, newest)

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _newest_saved_epoch(run: RunFolder) -> int:
    """Return the newest start that has written a checkpoint which is there; 0 where none has."""
    newest = 0
    for path in run.checkpoints.glob("*/manifest.json"):
        with suppress(Refusal, OSError):  # Damaged: restoring it reports that.
            content = read_bytes(path, most=MAX_MANIFEST_BYTES)
            newest = max(newest, parse_json(content, _Manifest, path).progress.epoch)
    return newest


def _newest_recorded_epoch(run: RunFolder) -> int:
    """Return the newest start in the events. Each that trains is there, one after a fault with its
    number."""
    newest = 0
    for event in read_events(run.events) if run.events.exists() else ():
        if isinstance(event, Started):
            newest += 1
        elif isinstance(event, Recovered):
            newest = max(newest, event.epoch)
    return newest
