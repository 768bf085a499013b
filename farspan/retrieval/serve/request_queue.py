"""Threads for the model's work, and a queue of a fixed length before them."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import anyio

T = TypeVar("T")

#: The longest `Retry-After`.
MAX_RETRY_S = 30
#: How much the newest request weighs in the mean time of a request.
MEAN_WEIGHT = 0.2


class QueueFull(Exception):
    """The queue of waiting requests is full. `retry_s`: the time until there is room."""

    def __init__(self, retry_s: int) -> None:
        super().__init__(f"full for {retry_s} s")
        self.retry_s = retry_s


class TooSlow(Exception):
    """There was no answer within `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"no answer after {limit_s} s")
        self.limit_s = limit_s


class WorkThreads:
    """Run at most `threads` requests at once; at most `waiting` more wait for a thread."""

    def __init__(self, *, threads: int, waiting: int, limit_s: float) -> None:
        self._limiter = anyio.CapacityLimiter(threads)
        self._waiting = waiting
        self._limit_s = limit_s
        self._mean_s = 0.0

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread, and return its result. Raises QueueFull at once, and TooSlow.

        Work that is too slow keeps its thread until it ends. anyio's own threads would be
        released at the time limit, and would keep the process alive at its end.
        """
        state = self._limiter.statistics()
        is_full = state.borrowed_tokens >= state.total_tokens
        if is_full and state.tasks_waiting >= self._waiting:
            raise QueueFull(self._retry_s())
        future: Future[T] = Future()
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                await self._limiter.acquire_on_behalf_of(future)
                future.set_running_or_notify_cancel()
                loop = asyncio.get_running_loop()
                thread = threading.Thread(
                    target=self._run_work, args=(work, future, loop), daemon=True
                )
                thread.start()
                return await asyncio.wrap_future(future)
        except TimeoutError:
            if limit.expired():
                raise TooSlow(self._limit_s) from None
            raise

    def _run_work(
        self, work: Callable[[], T], future: Future[T], loop: asyncio.AbstractEventLoop
    ) -> None:
        began = time.monotonic()
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        self._mean_s += MEAN_WEIGHT * (time.monotonic() - began - self._mean_s)
        with suppress(RuntimeError):  # The server has ended, and its loop with it.
            loop.call_soon_threadsafe(self._limiter.release_on_behalf_of, future)

    def _retry_s(self) -> int:
        """Return the whole seconds until a thread is free, estimated by the mean time."""
        state = self._limiter.statistics()
        requests = state.borrowed_tokens + state.tasks_waiting
        expected_s = math.ceil(self._mean_s * requests / state.total_tokens)
        return min(max(expected_s, 1), MAX_RETRY_S)
