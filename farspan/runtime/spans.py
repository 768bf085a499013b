"""What a worker did and waited for in a step, to the microsecond."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from farspan.domain.results import Span


class Spans:
    """Records spans of the steps that are to be seen; costs next to nothing in the others."""

    def __init__(
        self, settled: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.time
    ) -> None:
        """`settled` waits until a device has done what it was told, where it does so later."""
        self._settled = settled
        self._clock = clock
        self._found = list[Span]()
        self.on = False

    @contextmanager
    def __call__(self, kind: str, microbatch: int | None = None) -> Iterator[None]:
        """Of a kind: forward, backward, receive, collective, update."""
        if not self.on:
            yield
            return
        began = self._clock()
        yield
        self._settled()
        self._found.append(Span(kind=kind, microbatch=microbatch, start=began, end=self._clock()))

    def take(self) -> tuple[Span, ...]:
        """The spans since the last time."""
        spans = tuple(self._found)
        self._found = []
        return spans
