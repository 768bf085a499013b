"""Who is alive: each worker says so in the store, rank 0 hears all of them, and each of them rank
0."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, cast

import torch.distributed as dist

from farspan.runtime.comm import tcp
from farspan.runtime.comm.notices import Notices

#: A worker that says nothing for this long, and for RTTS round trips of the slowest line, is lost;
#: each says every BEAT_S that it is there. What is noticed last is noticed within 5 s and the round
#: trips.
SILENCE_S, RTTS, BEAT_S = 4.0, 4, 0.5
#: Seconds of silence are counted so often.
COUNT_S = 0.25
#: A question to the store takes so many round trips. The third longest of so many last ones says
#: how long they are: what one cut held up says nothing of a line, the queue of a narrow one holds
#: up many.
QUESTION_RTTS, RECENT, LONGEST = 3, 30, 3
#: A store that is there answers within this, also over a line whose queue is full.
STORE_S = 20.0
#: Who has met the others opens its device, and says so for the first time, within this.
OPEN_S = 120.0
#: Where the store does not say within this who is lost, rank 0 is, which keeps it.
ANSWER_S = 1.5
#: Beside a beat and round trips others need so long to hear who is lost.
HEAR_S = 0.5
#: Beats of a worker that has met the others, and of which nothing was heard since.
MET = 1
#: The rank that was lost and how that was noticed, as the first worker that did has written in the
#: store.
LOST = "farspan/lost"

#: A step that takes so many times the median of the last ones, and so many seconds, does not end:
#: an exchange hangs whose library says nothing, as NCCL's does where a peer is gone.
STALL_TIMES, STALL_S, STALL_STEPS = 30.0, 60.0, 20
#: Steps that have to be known.
STALL_KNOWN = 3

#: How a worker is noticed to be lost: it says nothing, a connection to it broke, or its step does
#: not end.
How = Literal["silence", "connection", "stall"]


class Heartbeat:
    """Says in `notices` that this worker is alive, and hears the others: rank 0 all of them, each
    of them rank 0.

    Where one is lost, who notices tells the others and ends, and they with it. Collectives cannot
    tell: a lost machine closes no connection, and a peer that is busy is as silent in them as one
    that is gone.
    """

    def __init__(self, notices: Notices, rank: int, world: int) -> None:
        # A store that is gone, with rank 0, would be tried for as long as workers may take to come.
        self._notices, self._rank = notices.clone(STORE_S), rank
        #: This worker's round trip to the store, as its last questions took, and what the others
        #: say of theirs.
        self._questions_s, self._their_rtt_s = deque[float](maxlen=RECENT), dict[int, float]()
        self._silent_s = dict.fromkeys(range(1, world) if rank == 0 else (0,), 0.0)
        #: Who may be silent for longer, as its device is opened.
        self.opening = set(self._silent_s)
        self._ended, self._gone = threading.Event(), list[tuple[int, How]]()
        #: Seconds of the step that is being made, None between steps, and of the last ones.
        self._step_s: float | None = None
        self._steps_s = deque[float](maxlen=STALL_STEPS)
        self._talker = threading.Thread(target=self._talk, daemon=True)
        self._counter: threading.Thread | None = None
        self._talker.start()

    def watch(self, lost: Callable[[int, How], None]) -> None:
        self._counter = threading.Thread(target=self._count, args=(lost,), daemon=True)
        self._counter.start()

    def end(self) -> None:
        """Must come before the process ends: an interpreter that stops a thread inside the store
        aborts. Where a worker is lost `lost` has the last word."""
        self._ended.set()
        if self._gone and self._counter is not None:
            self._counter.join()
        self._talker.join(ANSWER_S)

    def _talk(self) -> None:
        """Count up one's own key, see whether the others' grew, and whom another has lost. Ends
        where the store is lost."""
        heard, own = dict.fromkeys(self._silent_s, MET), MET
        with suppress(
            dist.DistError
        ):  # The store is gone, and rank 0 with it: silence from now on.
            while True:
                own += 1
                # Of lines that were queued up since, too.
                tcp.expire(SILENCE_S, RTTS)
                self._notices.say(beats(self._rank), f"{own} {self._rtt_s:.4f}")
                for peer in self._silent_s:
                    began = time.monotonic()
                    said = self._notices.heard(beats(peer))
                    self._questions_s.append(time.monotonic() - began)
                    if said is None:
                        # Somebody else has deleted or overwritten it, which says nothing of the
                        # worker.
                        self._silent_s[peer] = 0.0
                        continue
                    count, _, rtt_s = said.decode().partition(" ")
                    if int(count) > heard[peer]:  # Also an older one could be there again.
                        heard[peer], self._silent_s[peer] = int(count), 0.0
                        self._their_rtt_s[peer] = float(rtt_s or 0.0)
                        self.opening.discard(peer)
                if (loss := self._notices.heard(LOST)) is not None:
                    self._gone.append(_loss(loss))
                if self._ended.wait(BEAT_S):
                    return

    @property
    def _rtt_s(self) -> float:
        longest = sorted(self._questions_s)[-LONGEST:]
        return longest[0] / QUESTION_RTTS if len(longest) == LONGEST else 0.0

    def _count(self, lost: Callable[[int, How], None]) -> None:
        """Seconds are counted, not read from a clock: machines that were suspended together blame
        nobody."""
        while not self._gone and not self._ended.wait(COUNT_S):
            if self._stalls():
                self._gone.append(self.tell(self._rank, "stall"))
            for peer in self._silent_s:
                self._silent_s[peer] += COUNT_S
                limit_s = SILENCE_S + RTTS * max(self._rtt_s, self._their_rtt_s.get(peer, 0.0))
                if self._silent_s[peer] > (OPEN_S if peer in self.opening else limit_s):
                    self._gone.append(self.tell(peer, "silence"))
        if self._gone:
            self.stay()
            lost(*self._gone[0])

    @contextmanager
    def step(self) -> Iterator[None]:
        """While a step is made: one that does not end is a fault. Saves, validations and meetings
        are no part of it."""
        began, self._step_s = time.monotonic(), 0.0
        try:
            yield
        finally:
            self._step_s = None
        self._steps_s.append(time.monotonic() - began)

    def _stalls(self) -> bool:
        if self._step_s is None:
            return False
        self._step_s += COUNT_S
        if len(self._steps_s) < STALL_KNOWN:
            return False
        return self._step_s > max(STALL_S, STALL_TIMES * statistics.median(tuple(self._steps_s)))

    def tell(self, peer: int, how: How) -> tuple[int, How]:
        """Say in the store who is lost and how, unless another was named there before; returns who
        is: rank 0 where the store does not answer and has not said it."""
        named: list[tuple[int, How]] = []

        def write() -> None:
            with suppress(dist.DistError):
                named.append(_loss(self._notices.say_first(LOST, f"{peer} {how}")))

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(ANSWER_S)
        return (named or self._gone or [(0, how)])[0]

    def stay(self) -> None:
        """Where somebody is lost, rank 0 ends when the others have heard of it: their store goes
        with it."""
        if self._rank == 0:
            time.sleep(BEAT_S + HEAR_S + RTTS * self._rtt_s)


def _loss(said: bytes) -> tuple[int, How]:
    rank, how = said.decode().split()
    return int(rank), cast(How, how)


def beats(rank: int) -> str:
    return f"farspan/beats/{rank}"
