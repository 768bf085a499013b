"""The index that is searched now. A new one on disk is opened next to it and replaces it; the
old one is closed after its last request."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from farspan.domain.escapes import escape_controls
from farspan.domain.problems import Problem, Refusal
from farspan.retrieval.serve.searcher import Searcher


@dataclass(eq=False)
class _Open:
    searcher: Searcher
    stamp: object
    #: Requests that use it.
    users: int = 0
    retired: bool = False


class Current:
    """`open_searcher` opens the index that is on disk. Looks for another one at most every `look_s`
    seconds, and only when somebody asks; one that cannot be opened is tried again after
    `retry_s`."""

    def __init__(
        self, open_searcher: Callable[[], Searcher], *, look_s: float, retry_s: float
    ) -> None:
        self._open_searcher = open_searcher
        self._look_s = look_s
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._now = self._open_index()
        self._next_look = time.monotonic() + look_s
        #: What the index on disk could not be opened for.
        self.trouble: Problem | None = None
        self._closed = False

    @contextmanager
    def lease(self) -> Iterator[Searcher]:
        """Lend the searcher of today; it stays open until the block ends."""
        with self._lease_index() as entry:
            yield entry.searcher

    @contextmanager
    def _lease_index(self) -> Iterator[_Open]:
        self._look_for_new()
        with self._lock:
            entry = self._now
            entry.users += 1
        try:
            yield entry
        finally:
            with self._lock:
                entry.users -= 1
            self._close_unused(entry)

    def close(self) -> None:
        """Close the index once nobody uses it. What is opened meanwhile is closed at once."""
        with self._lock:
            self._closed = self._now.retired = True
        self._close_unused(self._now)

    def _open_index(self) -> _Open:
        searcher = self._open_searcher()
        return _Open(searcher, searcher.stamp())

    def _look_for_new(self) -> None:
        with self._lock:
            if self._closed or time.monotonic() < self._next_look:
                return
            self._next_look = time.monotonic() + self._look_s
            now = self._now
        try:
            if now.searcher.stamp() == now.stamp:
                return
        except (OSError, Refusal):
            return  # It is being replaced, or has gone: the open one goes on.
        with self._lock:
            # Nobody else looks until this one is open.
            self._next_look = float("inf")
        threading.Thread(target=self._replace_index, name="new-index", daemon=True).start()

    def _replace_index(self) -> None:
        try:
            new = self._open_index()
        except Exception as error:
            self.trouble = opening_problem(error)
            message = f"the new index cannot be opened: {self.trouble.fact}"
            print(escape_controls(message), file=sys.stderr, flush=True)
            self._next_look = time.monotonic() + self._retry_s
            return
        with self._lock:
            old = self._now
            self._now = new
            old.retired = True
            new.retired = self._closed
            self.trouble = None
            self._next_look = time.monotonic() + self._look_s
        for entry in (old, new):
            self._close_unused(entry)

    def _close_unused(self, entry: _Open) -> None:
        with self._lock:
            if not entry.retired or entry.users:
                return
            entry.users = -1  # Nobody closes it twice.
        entry.searcher.close()


def opening_problem(error: Exception) -> Problem:
    if isinstance(error, Refusal):
        return error.problem
    return Problem(
        code="no-index",
        what="the new index cannot be opened",
        where="the run's index",
        fact=repr(error),
        remedy="make it again: farspan embed",
    )
