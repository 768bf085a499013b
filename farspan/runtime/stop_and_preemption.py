"""Requests to a worker to save and end, from the process that started it or a signal.

The process that started it writes STOP to standard input before it sends a signal. A signal without
that word is a preemption: the machine goes away, and the run continues without it.
"""

from __future__ import annotations

import os
import select
import signal

from farspan.domain.run import ON_STDIN, SECRET_VARIABLE
from farspan.domain.standard_input import LED, holds_more

#: Signals by which a machine, an agent or a person ends a process.
SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: The signal of a worker to itself where its cloud has given notice: it is a preemption also where
#: all workers get it.
NOTICE_SIGNAL = signal.SIGUSR1


class Launcher:
    """The process that started this one, as this one sees it. To be made before standard input is
    read."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._poll = select.poll()
        self._leads = os.environ.get(SECRET_VARIABLE) == ON_STDIN or LED in os.environ
        if self._leads:
            self._poll.register(0, select.POLLHUP)

    def requests_stop(self) -> bool:
        """Return whether it has given its word that the run is to end. To be asked once the secret
        was read."""
        return self._leads and holds_more()

    def is_gone(self) -> bool:
        """Return whether it has ended: it is the parent no more, or standard input has ended, as it
        has also where it was gone before this process knew its parent."""
        input_ended = any(flags & select.POLLHUP for _, flags in self._poll.poll(0))
        return input_ended or os.getppid() != self._parent


class StopRequests:
    """From now on signals are kept, and looked at between steps."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._signals = list[int]()
        for number in (*SIGNALS, NOTICE_SIGNAL):
            signal.signal(number, lambda received, _: self._signals.append(received))

    def asked(self) -> bool:
        """Return whether the run is to end: the launcher asks for it, or is gone, and nobody else
        would stop this worker. A host that goes away takes the connection to the launcher along:
        there the signal counts."""
        return self._launcher.requests_stop() or (self._launcher.is_gone() and not self._signals)

    def preempted(self) -> bool:
        """Return whether this worker is to go, and the run is not."""
        return bool(self._signals) and not self._launcher.requests_stop()

    def noticed(self) -> bool:
        """Return whether this worker's cloud has given notice of its host's end."""
        return NOTICE_SIGNAL in self._signals
