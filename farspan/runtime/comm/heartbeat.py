"""Liveness: each worker sends beats to rank 0, which answers them, over the sealed connection
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

from farspan.domain.decoding import msgpack_decoder
from farspan.runtime.comm import tcp
from farspan.runtime.comm.control_channel import Notices

#: A worker that sends nothing for this long, and for RTTS round trips of the slowest link, is lost;
#: each sends a beat every BEAT_S. Every loss is noticed within 5 s and the round trips.
SILENCE_S = 4.0
RTTS = 4
BEAT_S = 0.5
#: Interval at which seconds of silence are counted.
COUNT_S = 0.25
#: The round trip is taken as the third longest of the last RECENT answers: one cut delays a few of
#: them, the queue of a narrow link delays many.
RECENT = 30
LONGEST = 3
#: A worker that has met the others opens its device, and sends its first beat, within this.
OPEN_S = 120.0
#: If rank 0 does not name the lost worker within this, it is rank 0.
RANK_0_ANSWER_S = 1.5
#: In addition to a round trip, others need this long to learn which worker is lost.
HEAR_S = 1.0
#: An error that all workers meet ends some of them earlier than others, by less than this.
OWN_ERROR_S = 0.5
#: The rank that was lost and how that was noticed, as the first worker that did has told all.
LOST = "farspan/lost"

#: A step that takes this many times the median of the last ones, and this many seconds, is stalled:
#: an exchange hangs without an error, as NCCL's does where a peer is gone.
STALL_TIMES = 30.0
STALL_S = 60.0
STALL_STEPS = 20
#: Steps that have to be known.
STALL_KNOWN = 3

#: How a worker is noticed to be lost: it sends nothing, a connection to it broke, or its step does
#: not end.
How = Literal["silence", "connection", "stall"]


class Beat(msgspec.Struct, array_like=True, frozen=True):
    """What a worker sends to rank 0, which sends it back: when, by the worker's own clock, and the
    round trip that it has measured so far."""

    sent_s: float
    rtt_s: float


_encode = msgspec.msgpack.encode
_decode = msgpack_decoder(Beat).decode


class Heartbeat:
    """Sends beats to rank 0, or answers those of all others there, and counts how long each is
    silent: rank 0 all of them, each of them rank 0.

    A worker that notices a loss reports it to the others and ends, and they with it. Collectives
    cannot notice it: a lost machine closes no connection, and a peer that is busy is as silent in
    them as one that is gone.
    """

    def __init__(self, notices: Notices, world: int) -> None:
        self._notices = notices
        self._rank = notices.rank
        #: This worker's last round trips to rank 0, and what the others report of theirs.
        self._rtts_s = deque[float](maxlen=RECENT)
        self._their_rtt_s = dict[int, float]()
        #: Seconds that were counted so far, and their number at each peer's last beat.
        self._counted_s = 0.0
        peers = range(1, world) if self._rank == 0 else (0,)
        self._last_beat_s = dict.fromkeys(peers, 0.0)
        #: When, by the counted seconds, the connection of a peer was seen to be broken.
        self._broken_s = dict[int, float]()
        #: Peers that may be silent for longer, as they open their devices.
        self._opening = set(self._last_beat_s)
        self._ended = threading.Event()
        self._gone = list[tuple[int, How]]()
        #: When the last report of a loss was sent, by the monotonic clock.
        self._reported_at = time.monotonic()
        #: Seconds of the step that is being made, None between steps, and of the last ones.
        self._step_s: float | None = None
        self._steps_s = deque[float](maxlen=STALL_STEPS)
        notices.on_beat = self._receive_beat
        self._beat_thread = threading.Thread(target=self._send_beats, daemon=True)
        self._watch_thread: threading.Thread | None = None
        self._beat_thread.start()

    def watch(self, lost: Callable[[int, How], None]) -> None:
        self._watch_thread = threading.Thread(target=self._watch_peers, args=(lost,), daemon=True)
        self._watch_thread.start()

    def end_opening(self) -> None:
        """Note that all workers have opened their devices: none may be silent for longer now."""
        for peer in self._last_beat_s:
            self._last_beat_s[peer] = self._counted_s
        self._opening.clear()

    def end(self) -> None:
        """Stop the beats; if a worker is lost, wait for `lost`."""
        self._check_for_loss()
        self._ended.set()
        if self._gone and self._watch_thread is not None:
            self._watch_thread.join()
        self._beat_thread.join(RANK_0_ANSWER_S)

    def _send_beats(self) -> None:
        while True:
            # Of connections that were made since, too.
            tcp.set_timeouts(SILENCE_S, RTTS)
            if self._rank != 0:
                beat = Beat(time.monotonic(), self._rtt_s)
                self._notices.beat(0, _encode(beat))
            if self._ended.wait(BEAT_S):
                return

    def _receive_beat(self, peer: int, content: bytes) -> None:
        beat = _decode(content)
        self._last_beat_s[peer] = self._counted_s
        self._opening.discard(peer)
        if self._rank == 0:
            self._their_rtt_s[peer] = beat.rtt_s
            self._notices.beat(peer, content)
        else:
            self._rtts_s.append(time.monotonic() - beat.sent_s)

    def _check_for_loss(self) -> None:
        if (message := self._notices.value_of(LOST)) is not None:
            self._gone.append(_parse_loss(message))

    @property
    def _rtt_s(self) -> float:
        longest = sorted(self._rtts_s)[-LONGEST:]
        return longest[0] if len(longest) == LONGEST else 0.0

    def _watch_peers(self, lost: Callable[[int, How], None]) -> None:
        """Count the seconds of silence and report losses. They are counted, not read from a clock:
        machines that were suspended together blame nobody."""
        gone = self._gone
        while not gone and not self._ended.wait(COUNT_S):
            self._check_for_loss()
            if self._step_stalls():
                gone.append(self.report_loss(self._rank, "stall"))
            self._counted_s += COUNT_S
            for peer, last_s in self._last_beat_s.items():
                rtt_s = max(self._rtt_s, self._their_rtt_s.get(peer, 0.0))
                allowed_s = SILENCE_S + RTTS * rtt_s
                if peer in self._opening and peer not in self._notices.ended:
                    allowed_s = OPEN_S
                if self._counted_s - last_s > allowed_s:
                    gone.append(self.report_loss(peer, "silence"))
                elif self._notices.is_broken(peer) and peer not in self._opening:
                    # It may report an error of its own, as all others may.
                    since_s = self._broken_s.setdefault(peer, self._counted_s)
                    if self._counted_s - since_s >= OWN_ERROR_S:
                        gone.append(self.report_loss(peer, "connection"))
        if gone:
            lost(*gone[0])

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark a step: one that does not end is a fault. Saves, validations and outer syncs are no
        part of it."""
        began = time.monotonic()
        self._step_s = 0.0
        try:
            yield
        finally:
            self._step_s = None
        self._steps_s.append(time.monotonic() - began)

    def _step_stalls(self) -> bool:
        if self._step_s is None:
            return False
        self._step_s += COUNT_S
        if len(self._steps_s) < STALL_KNOWN:
            return False
        median_s = statistics.median(tuple(self._steps_s))
        return self._step_s > max(STALL_S, STALL_TIMES * median_s)

    def report_loss(self, peer: int, how: How) -> tuple[int, How]:
        """Report to all workers which one is lost and how, unless another was named before; return
        that one: rank 0 if it does not answer and has named none."""
        self._reported_at = time.monotonic()
        try:
            first = self._notices.send_first(LOST, f"{peer} {how}", RANK_0_ANSWER_S)
        except OSError:  # TimeoutError and ConnectionError are.
            return self._gone[0] if self._gone else (0, how)
        return _parse_loss(first)

    def wait_for_reports(self) -> None:
        """Wait, on rank 0, until the others have received the report of a loss: what is not sent
        yet is lost when it ends."""
        if self._rank == 0:
            slowest_s = max(self._their_rtt_s.values(), default=0.0)
            passed_s = time.monotonic() - self._reported_at
            time.sleep(max(0.0, HEAR_S + slowest_s - passed_s))


def _parse_loss(message: bytes) -> tuple[int, How]:
    rank, how = message.decode().split()
    return int(rank), cast(How, how)
