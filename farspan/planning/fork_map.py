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

from farspan.domain.decoding import decode_msgpack

T = TypeVar("T")
R = TypeVar("R")


def count_cores() -> int:
    """Return the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fork_map(work: Callable[[T], R], items: Sequence[T], processes: int, kind: type[R]) -> list[R]:
    """Return the results of `work` on the items, of this kind, in their order, by these processes;
    a free one takes the next.

    A process that cannot fork safely does it all alone: on systems other than Linux, and with other
    threads, whose locks a fork would find taken. What a fork could not do, as it was ended, is done
    here. Every answer is decoded from the same bytes, whichever process made it: a whole number in
    a field of fractions would distinguish a fork's answer from another.
    """
    count = len(items)
    several = min(processes, count)
    done: dict[int, bytes] = {}
    if several > 1 and os.uname().sysname == "Linux" and threading.active_count() == 1:
        tickets, numbers = os.pipe()
        os.write(numbers, b"".join(place.to_bytes(2, "big") for place in range(count)))
        os.close(numbers)
        forks = [_fork_worker(work, items, tickets) for _ in range(several - 1)]
        done = _work_on_tickets(work, items, tickets)
        for child, answers in forks:
            with os.fdopen(answers, "rb") as pipe:
                content = pipe.read()
            os.waitpid(child, 0)
            with contextlib.suppress(msgspec.DecodeError):
                done |= decode_msgpack(content, dict[int, bytes])
        os.close(tickets)
    for place, item in enumerate(items):
        if place not in done:
            done[place] = msgspec.msgpack.encode(work(item))
    return [decode_msgpack(done[place], kind) for place in range(count)]


def _work_on_tickets(work: Callable[[T], R], items: Sequence[T], tickets: int) -> dict[int, bytes]:
    """Return this process's results for the items whose tickets it draws, encoded."""
    done: dict[int, bytes] = {}
    while ticket := os.read(tickets, 2):
        place = int.from_bytes(ticket, "big")
        done[place] = msgspec.msgpack.encode(work(items[place]))
    return done


def _fork_worker(work: Callable[[T], R], items: Sequence[T], tickets: int) -> tuple[int, int]:
    """Start a process that takes part; return it and the pipe that its answers come through."""
    answers, out = os.pipe()
    child = os.fork()
    if child:
        os.close(out)
        return child, answers
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with os.fdopen(out, "wb") as pipe:
            pipe.write(msgspec.msgpack.encode(_work_on_tickets(work, items, tickets)))
        status = 0
    finally:
        # Nothing that belongs to the process that it was forked from may run here.
        os._exit(status)
