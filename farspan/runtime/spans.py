"""What a worker did and waited for in a step, to the microsecond."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from farspan.domain.run_events import Span


class Spans:
    """Records spans of the steps that are to be seen; costs next to nothing in the others."""

    def __init__(
        self, settled: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.time
    ) -> None:
        """Build a recorder. `settled` waits until a device has done what was launched on it."""
        self._settled = settled
        self._clock = clock
        self._recorded = list[Span]()
        self.on = False

    @contextmanager
    def __call__(self, kind: str, microbatch: int | None = None) -> Iterator[None]:
        """Record a span of a kind: forward, backward, receive, collective, update."""
        if not self.on:
            yield
            return
        start = self._clock()
        yield
        self._settled()
        end = self._clock()
        self._recorded.append(Span(kind=kind, microbatch=microbatch, start=start, end=end))

    def take(self) -> tuple[Span, ...]:
        """Return the spans since the last call."""
        spans = tuple(self._recorded)
        self._recorded = []
        return spans
