"""Who is alive: each worker sends beats to rank 0, which answers them, over the sealed connection
between the two."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, cast

import msgspec

from farspan.runtime.comm import tcp
from farspan.runtime.comm.notices import Notices

#: A worker that says nothing for this long, and for RTTS round trips of the slowest line, is lost;
#: each says every BEAT_S that it is there. What is noticed last is noticed within 5 s and the round
#: trips.
SILENCE_S = 4.0
RTTS = 4
BEAT_S = 0.5
#: Seconds of silence are counted so often.
COUNT_S = 0.25
#: The third longest of so many last answers says how long a round trip is: what one cut held up
#: says nothing of a line, the queue of a narrow one holds up many.
RECENT = 30
LONGEST = 3
#: Who has met the others opens its device, and says so for the first time, within this.
OPEN_S = 120.0
#: Where rank 0 does not say within this who is lost, it is itself.
ANSWER_S = 1.5
#: Beside a round trip others need so long to hear who is lost.
HEAR_S = 1.0
#: The rank that was lost and how that was noticed, as the first worker that did has told all.
LOST = "farspan/lost"

#: A step that takes so many times the median of the last ones, and so many seconds, does not end:
#: an exchange hangs whose library says nothing, as NCCL's does where a peer is gone.
STALL_TIMES = 30.0
STALL_S = 60.0
STALL_STEPS = 20
#: Steps that have to be known.
STALL_KNOWN = 3

#: How a worker is noticed to be lost: it says nothing, a connection to it broke, or its step does
#: not end.
How = Literal["silence", "connection", "stall"]


class Beat(msgspec.Struct, array_like=True, frozen=True):
    """What a worker sends to rank 0, which sends it back: when, by the worker's own clock, and the
    round trip that it has measured so far."""

    sent_s: float
    rtt_s: float


_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(Beat).decode


class Heartbeat:
    """Sends beats to rank 0, or answers those of all others there, and counts how long each is
    silent: rank 0 all of them, each of them rank 0.

    Where one is lost, who notices tells the others and ends, and they with it. Collectives cannot
    tell: a lost machine closes no connection, and a peer that is busy is as silent in them as one
    that is gone.
    """

    def __init__(self, notices: Notices, world: int) -> None:
        self._notices = notices
        self._rank = notices.rank
        #: This worker's last round trips to rank 0, and what the others say of theirs.
        self._rtts_s = deque[float](maxlen=RECENT)
        self._their_rtt_s = dict[int, float]()
        #: Seconds that were counted so far, and their number when each peer was last heard.
        self._counted_s = 0.0
        self._heard_s = dict.fromkeys(range(1, world) if self._rank == 0 else (0,), 0.0)
        #: Who may be silent for longer, as its device is opened.
        self._opening = set(self._heard_s)
        self._ended = threading.Event()
        self._gone = list[tuple[int, How]]()
        #: Seconds of the step that is being made, None between steps, and of the last ones.
        self._step_s: float | None = None
        self._steps_s = deque[float](maxlen=STALL_STEPS)
        notices.on_beat = self._hear
        self._talker = threading.Thread(target=self._talk, daemon=True)
        self._counter: threading.Thread | None = None
        self._talker.start()

    def watch(self, lost: Callable[[int, How], None]) -> None:
        self._counter = threading.Thread(target=self._count, args=(lost,), daemon=True)
        self._counter.start()

    def opened(self) -> None:
        """All workers have opened their devices: from now on none may be silent for longer."""
        for peer in self._heard_s:
            self._heard_s[peer] = self._counted_s
        self._opening.clear()

    def end(self) -> None:
        """Where a worker is lost `lost` has the last word."""
        self._hear_of_loss()
        self._ended.set()
        if self._gone and self._counter is not None:
            self._counter.join()
        self._talker.join(ANSWER_S)

    def _talk(self) -> None:
        while True:
            # Of lines that were queued up since, too.
            tcp.expire(SILENCE_S, RTTS)
            if self._rank != 0:
                beat = Beat(time.monotonic(), self._rtt_s)
                self._notices.beat(0, _encode(beat))
            if self._ended.wait(BEAT_S):
                return

    def _hear(self, peer: int, content: bytes) -> None:
        beat = _decode(content)
        self._heard_s[peer] = self._counted_s
        self._opening.discard(peer)
        if self._rank == 0:
            self._their_rtt_s[peer] = beat.rtt_s
            self._notices.beat(peer, content)
        else:
            self._rtts_s.append(time.monotonic() - beat.sent_s)

    def _hear_of_loss(self) -> None:
        if (said := self._notices.heard(LOST)) is not None:
            self._gone.append(_loss(said))

    @property
    def _rtt_s(self) -> float:
        longest = sorted(self._rtts_s)[-LONGEST:]
        return longest[0] if len(longest) == LONGEST else 0.0

    def _count(self, lost: Callable[[int, How], None]) -> None:
        """Seconds are counted, not read from a clock: machines that were suspended together blame
        nobody."""
        while not self._gone and not self._ended.wait(COUNT_S):
            self._hear_of_loss()
            if self._stalls():
                self._gone.append(self.tell(self._rank, "stall"))
            self._counted_s += COUNT_S
            for peer, heard_s in self._heard_s.items():
                if self._counted_s - heard_s > self._allowed_silence_s(peer):
                    self._gone.append(self.tell(peer, "silence"))
        if self._gone:
            self.stay()
            lost(*self._gone[0])

    def _allowed_silence_s(self, peer: int) -> float:
        if peer in self._opening and peer not in self._notices.ended:
            return OPEN_S
        return SILENCE_S + RTTS * max(self._rtt_s, self._their_rtt_s.get(peer, 0.0))

    @contextmanager
    def step(self) -> Iterator[None]:
        """While a step is made: one that does not end is a fault. Saves, validations and meetings
        are no part of it."""
        began = time.monotonic()
        self._step_s = 0.0
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
        """Tell all workers who is lost and how, unless another was named before; returns who is:
        rank 0 where it does not answer and has not said it."""
        try:
            return _loss(self._notices.say_first(LOST, f"{peer} {how}", ANSWER_S))
        except OSError:  # TimeoutError and ConnectionError are.
            return (self._gone or [(0, how)])[0]

    def stay(self) -> None:
        """Where somebody is lost, rank 0 ends when the others have heard of it: what it has not
        sent yet goes with it."""
        if self._rank == 0:
            slowest_s = max(self._their_rtt_s.values(), default=0.0)
            time.sleep(HEAR_S + slowest_s)


def _loss(said: bytes) -> tuple[int, How]:
    rank, how = said.decode().split()
    return int(rank), cast(How, how)
