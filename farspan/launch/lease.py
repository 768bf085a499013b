"""The right to train a run: its lock, held by one process and what it starts, and the epochs of its
starts."""

from __future__ import annotations

from types import TracebackType

from farspan.domain import epoch
from farspan.domain.epoch import Epoch, Fault
from farspan.domain.run import RunFolder
from farspan.launch.lock import locked


class Lease:
    """Holds a run from when it is made until `close`, over as many starts as it takes. Raises
    Refusal (run-busy)."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._lock = locked(run.lock, "this run is being trained already", run.path)

    @property
    def keep_open(self) -> int:
        """The lock's descriptor, for processes to inherit: it is held as long as any of them
        lives."""
        return self._lock.fileno()

    def begin(
        self, *, used_s: float = 0.0, skip: tuple[int, ...] = (), fault: Fault | None = None
    ) -> Epoch:
        """Begin an epoch: what workers of earlier ones write from now on counts for nothing."""
        names = [path.name.removeprefix("step-") for path in self._run.checkpoints.glob("step-*")]
        newest = max((int(name) for name in names if name.isdecimal()), default=-1)
        number = epoch.advance(self._run.epochs, newest)
        return Epoch(number=number, used_s=used_s, skip=skip, fault=fault)

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
