"""Reading the steps ahead in a thread, so that a GPU does not wait for the host to read.

Several steps are read at once, as most of reading is what an array operation costs whatever its
length; both threads share the interpreter's lock.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farspan.runtime.device import mark_launched

#: Steps that are read at once, and how many such groups there are: of one the steps are made while
#: the next is read.
GROUP_STEPS = 16
GROUPS = 2
#: Bytes of pinned memory at most, however long a step is; one step of each group is read at least.
PINNED_BYTES = 64 * 2**20
CLOSE_S = 10.0


class ReadStep(NamedTuple):
    """What a worker reads of a step."""

    #: Valid targets of its replica's samples, and of all replicas'.
    valid: int
    valid_of_all: int
    #: Tokens of all the replica's samples, where both ends of a pipeline have the embedding.
    replica_tokens: NDArray[np.int64]
    #: As a `StepLayout` has them.
    inputs: Tensor


#: (first step, arrays for it and those that follow) -> what was read into them.
ReadSteps = Callable[[int, Sequence[Tensor]], list[ReadStep]]


class _Group(NamedTuple):
    """Arrays of steps that are read at once; `wait` returns when the device has copied them."""

    arrays: tuple[Tensor, ...]
    wait: Callable[[], None]


class _ReadGroup(NamedTuple):
    first: int
    steps: list[ReadStep]
    group: _Group


class Prefetcher:
    """Gives the steps of a run in order, read before they are asked for."""

    def __init__(self, read: ReadSteps, size: int, step_limit: int, device: torch.device) -> None:
        """Read steps of `size` int32 each, up to `step_limit` of them, for a device."""
        self._read = read
        self._step_limit = step_limit
        self._device = device
        length = min(GROUP_STEPS, max(1, PINNED_BYTES // (GROUPS * 4 * size)))
        self._empty = queue.SimpleQueue[_Group | None]()
        self._full = queue.SimpleQueue[_ReadGroup | BaseException]()
        for _ in range(GROUPS):
            pinned = device.type == "cuda"
            arrays = torch.zeros(length, size, dtype=torch.int32, pin_memory=pinned).unbind()
            self._empty.put(_Group(arrays, lambda: None))
        #: The step that is read next.
        self._next = 0
        self._lock = threading.Lock()
        self._current: _ReadGroup | None = None
        self._thread: threading.Thread | None = None

    def get(self, step: int) -> ReadStep:
        """Return a step: the one after the last is there already. Raises what reading raises."""
        if self._thread is None:
            self._next = step
            self._thread = threading.Thread(target=self._read_ahead, name="prefetch", daemon=True)
            self._thread.start()
        while True:
            current = self._current
            if current is None:
                self._current = self._take_group()
            elif current.first <= step < current.first + len(current.steps):
                return current.steps[step - current.first]
            else:
                self._current = None
                follows = step == current.first + len(current.steps)
                if not follows:  # Steps were left out.
                    with self._lock:
                        self._next = step
                # Its arrays are filled again once the device has copied them.
                wait = mark_launched(self._device)
                self._empty.put(current.group._replace(wait=wait))

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._empty.put(None)
            self._thread.join(CLOSE_S)
            self._thread = None

    def _take_group(self) -> _ReadGroup:
        group = self._full.get()
        if isinstance(group, BaseException):
            self._full.put(group)
            raise group
        return group

    def _read_ahead(self) -> None:
        while (group := self._empty.get()) is not None:
            try:
                group.wait()
                with self._lock:
                    first = self._next
                    count = max(1, min(len(group.arrays), self._step_limit - first))
                    self._next = first + count
                steps = self._read(first, group.arrays[:count])
            except BaseException as error:
                self._full.put(error)
                return
            self._full.put(_ReadGroup(first, steps, group))
