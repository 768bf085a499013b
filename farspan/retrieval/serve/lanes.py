"""Threads that do the model's work, and a queue of a fixed length before them. A request that finds
it full learns when to come again."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Full(Exception):
    """As many requests wait as may. `seconds`: after which there will be room."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"full for {seconds} s")
        self.seconds = seconds


class TooSlow(Exception):
    """The answer was not there in time. `seconds`: how long it had."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer after {seconds} s")
        self.seconds = seconds


class Lane:
    """So many `threads`, and at most so many requests `waiting` for one of them."""

    def __init__(self, name: str, *, threads: int, waiting: int, limit_s: float) -> None:
        self._most, self._width, self._limit_s = threads + waiting, threads, limit_s
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._lock, self._inside, self._usual_s = threading.Lock(), 0, 0.0
        # Daemons: a search that does not end keeps no process alive.
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises, on a thread of this lane. Raises Full at once, TooSlow
        after the time limit.

        Work that is too slow goes on where it has begun, and takes up its thread until it ends.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._inside >= self._most:
                raise Full(self._free_in())
            self._inside += 1
        self._jobs.put((future, work))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._limit_s)
        except TimeoutError:
            if future.done() and not future.cancelled():
                raise  # It is the work's own.
            raise TooSlow(self._limit_s) from None

    def _free_in(self) -> int:
        return min(max(math.ceil(self._usual_s * self._inside / self._width), 1), 30)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            began = time.monotonic()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            with self._lock:
                self._inside -= 1
                self._usual_s = 0.8 * self._usual_s + 0.2 * (time.monotonic() - began)
            del job, future, work

    def close(self, wait_s: float) -> None:
        """End the threads; work that has begun has so long."""
        deadline = time.monotonic() + wait_s
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
