"""When a process began: that distinguishes it from a later one that got the same number."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def process_began(pid: int) -> float | None:
    """Return when a process began; None where it has ended, also where nobody has waited for it."""
    if Path("/proc/self/stat").exists():
        # proc(5): state and start, in ticks since the machine's own, are the third field and the
        # 22nd.
        with suppress(OSError):
            text = Path(f"/proc/{pid}/stat").read_text()
            state, *fields = text.rpartition(")")[2].split()
            return None if state in "ZX" else float(fields[18])
        return None
    import psutil

    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    return None
