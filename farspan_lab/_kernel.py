"""The few Linux calls that Python 3.11 has no words for. All raise OSError when the kernel
refuses."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

# From linux/sched.h, linux/prctl.h and linux/if_tun.h.
_NEW_MNT = 0x00020000
_NEW_UTS = 0x04000000
_NEW_NET = 0x40000000
_PR_SET_TIMERSLACK = 29
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000
_TUN_F_CSUM = 1
_TUN_F_TSO4 = 2
_TUN_F_TSO6 = 4


def _call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


@contextmanager
def new_namespaces() -> Iterator[dict[str, str]]:
    """In new namespaces while the block lasts; yields paths that lead into them as long as this
    process lives."""
    kinds = ("mnt", "uts", "net")
    home = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in kinds]
    _call("unshare", _NEW_NET | _NEW_MNT | _NEW_UTS)
    try:
        yield {
            kind: f"/proc/{os.getpid()}/fd/{os.open(f'/proc/self/ns/{kind}', os.O_RDONLY)}"
            for kind in kinds
        }
    finally:
        for fd in home:
            _call("setns", fd, 0)
            os.close(fd)


def open_tun(name: str) -> int:
    """Return a TUN device that hands over packets of up to 64 KB, unsegmented, without checksums,
    behind a virtio_net_hdr."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
    )
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
    return fd


def wake_in_time() -> bool:
    """Let waits of this process end on time; whether the system lets it go before all other
    processes, too."""
    _call("prctl", _PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        return False
    return True
