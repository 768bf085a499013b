"""Stands for a GPU's copies beside what it computes, on a CPU: each ends when the test's numbers
say so, in order for each direction."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from farspan.runtime.comm import host_staging

#: Seconds that who waits for a copy waits at most: what is too early then comes out more often.
MOST_S = 1e-3
#: What lies in a buffer before a copy has ended.
GARBAGE = 0xA5


class SlowCopy:
    """A copy under way, and its event."""

    def __init__(self, engine: SlowCopies, direction: deque[SlowCopy], source: Tensor) -> None:
        self._engine = engine
        self._direction = direction
        self._source = source
        self._before = source.clone()
        self._target: Tensor | None = None
        self.ended = False

    def into(self, target: Tensor) -> SlowCopy:
        self._target = target
        return self

    def end(self) -> None:
        """Copy what was there when the copy began, if it still is."""
        before = self._before.reshape(-1).contiguous().view(torch.uint8)
        now = self._source.reshape(-1).contiguous().view(torch.uint8)
        if not torch.equal(before, now):
            self._engine.changed.append(tuple(self._source.shape))
        if self._target is not None:
            self._target.copy_(self._source)
        self.ended = True

    def query(self) -> bool:
        with self._engine.lock:
            if not self.ended and self._engine.random.random() < self._engine.pace:
                self._end_those_before()
            return self.ended

    def synchronize(self) -> None:
        time.sleep(self._engine.random.random() * self._engine.most_s)
        self.end_now()

    def end_now(self) -> None:
        with self._engine.lock:
            self._end_those_before()

    def _end_those_before(self) -> None:
        while not self.ended:
            self._direction.popleft().end()


class SlowCopies:
    """Copies that end late. `changed` has the shapes of what changed while it was copied."""

    def __init__(self, random_: random.Random, pace: float, most_s: float = MOST_S) -> None:
        self.random = random_
        self.pace = pace
        self.most_s = most_s
        self.lock = threading.RLock()
        self.changed: list[tuple[int, ...]] = []
        self.downloads = 0
        self.uploads = 0
        self._down = deque[SlowCopy]()
        self._up = deque[SlowCopy]()

    def allocate(self, size: int) -> Tensor:
        return torch.full((size,), GARBAGE, dtype=torch.uint8)

    def begin_download(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> SlowCopy:
        with self.lock:
            for source, target in pairs:
                target.view(torch.uint8).fill_(GARBAGE) if target.numel() else None
                self._down.append(SlowCopy(self, self._down, source).into(target))
                self.downloads += 1
            return self._down[-1]

    def begin_upload(self, source: Tensor) -> tuple[Tensor, SlowCopy]:
        # What is computed next waits for it: at once, as far as that can see.
        with self.lock:
            self._up.append(SlowCopy(self, self._up, source))
            self.uploads += 1
            return source.clone(), self._up[-1]

    def delay_computing(self, event: SlowCopy) -> None:
        event.end_now()


@contextmanager
def slow_copies(
    seed: int, pace: float = 0.5, most_s: float = MOST_S
) -> Iterator[Callable[[], list[SlowCopies]]]:
    """Have a CPU copy late meanwhile; yields the copies of those made so far."""
    made: list[SlowCopies] = []

    def make(given: torch.device) -> SlowCopies:
        made.append(SlowCopies(random.Random(seed + len(made)), pace, most_s))
        return made[-1]

    host_staging.COPY_ENGINES["cpu"] = make
    try:
        yield lambda: made
    finally:
        del host_staging.COPY_ENGINES["cpu"]
