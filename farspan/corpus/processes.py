"""Worker processes that end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor


def spawned(count: int) -> ProcessPoolExecutor:
    """A pool of up to `count` new processes. They end with this one however it ends, also when it is killed."""
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"), initializer=_start)


def _start() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A worker holds both ends of the queue it waits at, so it never sees that nobody is left to write to it.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
