"""What the process that started this one writes to its standard input.

STOP there asks the run to save and end: a signal without it comes from elsewhere. The end of the
input means that the process that started this one is gone.
"""

from __future__ import annotations

import array
import fcntl
import os
import stat
import termios

#: Save and end; end at once.
STOP = b"s"
KILL = b"k"
#: The variable of a process whose standard input is led by the process that started it.
LED = "FARSPAN_LED"


def first_line() -> str:
    """Read the first line, and nothing of what follows it: that stays for other readers."""
    line = b""
    byte = os.read(0, 1)
    while byte not in (b"", b"\n"):
        line += byte
        byte = os.read(0, 1)
    return line.decode()


def holds_more() -> bool:
    """Return whether there is input that nobody has read; only a pipe shows it.

    It is not read: the workers of one torchrun share one input, and each has to find it.
    """
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return False
    unread = array.array("i", [0])
    fcntl.ioctl(0, termios.FIONREAD, unread)
    return unread[0] > 0
