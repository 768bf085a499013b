"""Batches on a CPU: each is computed by one thread, one for each of PyTorch's threads.

Two threads on one product wait for each other by spinning: next to a busy process that took five
times as long (docs/decisions/0029-ready-encoders.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Batch = TypeVar("Batch")
Result = TypeVar("Result")

#: Batches that wait for each thread: enough that none is idle.
_AHEAD = 2


def compute_on_threads(
    compute: Callable[[Batch], Result], batches: Sequence[Batch]
) -> Iterator[Result]:
    """Yield the result of each batch, in order."""
    threads = torch.get_num_threads()
    with one_thread_each(), ThreadPoolExecutor(threads) as pool:
        tasks = (pool.submit(compute, batch) for batch in batches)
        waiting: list[Future[Result]] = list(itertools.islice(tasks, threads * _AHEAD))
        try:
            while waiting:
                yield waiting.pop(0).result()
                waiting += itertools.islice(tasks, 1)
        finally:
            for task in waiting:
                task.cancel()


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Let each thread compute alone within."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
