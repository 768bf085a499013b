"""Work that several processes share, where there are cores: forks of this one, which know all that
it knows."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

T = TypeVar("T")
R = TypeVar("R")


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(
    work: Callable[[T], R], items: Sequence[T], processes: int, kind: type[R]
) -> list[R]:
    """What `work` makes of each item, of this kind, in their order, by so many processes; who is
    free takes the next.

    Who cannot fork safely does it all alone: on systems other than Linux, and beside other threads,
    whose locks a fork would find taken. What a fork could not do, as it was ended, is done here.
    Every answer is decoded from the same bytes, whoever made it: a whole number in a field of
    fractions would tell a fork's answer from another.
    """
    several = min(processes, len(items))
    if several < 2 or os.uname().sysname != "Linux" or threading.active_count() > 1:
        return [
            msgspec.msgpack.decode(msgspec.msgpack.encode(work(item)), type=kind) for item in items
        ]
    tickets, numbers = os.pipe()
    os.write(numbers, b"".join(place.to_bytes(2, "big") for place in range(len(items))))
    os.close(numbers)
    forks = [_fork(work, items, tickets) for _ in range(several - 1)]
    done = _taken(work, items, tickets)
    for child, answers in forks:
        with os.fdopen(answers, "rb") as pipe:
            content = pipe.read()
        os.waitpid(child, 0)
        with contextlib.suppress(msgspec.DecodeError):
            done |= msgspec.msgpack.decode(content, type=dict[int, bytes])
    os.close(tickets)
    for place in set(range(len(items))).difference(done):
        done[place] = msgspec.msgpack.encode(work(items[place]))
    return [msgspec.msgpack.decode(done[place], type=kind) for place in range(len(items))]


def _taken(work: Callable[[T], R], items: Sequence[T], tickets: int) -> dict[int, bytes]:
    """What this process makes of the items whose tickets it draws, encoded."""
    done: dict[int, bytes] = {}
    while ticket := os.read(tickets, 2):
        place = int.from_bytes(ticket, "big")
        done[place] = msgspec.msgpack.encode(work(items[place]))
    return done


def _fork(work: Callable[[T], R], items: Sequence[T], tickets: int) -> tuple[int, int]:
    """A process that takes part, and the pipe that its answers come through."""
    answers, out = os.pipe()
    child = os.fork()
    if child:
        os.close(out)
        return child, answers
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with os.fdopen(out, "wb") as pipe:
            pipe.write(msgspec.msgpack.encode(_taken(work, items, tickets)))
        status = 0
    finally:
        os._exit(
            status
        )  # Nothing that belongs to the process that it was forked from may run here.
