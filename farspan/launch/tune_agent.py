"""The agent that `farspan cluster tune` runs on a host: it sets how large the kernel makes buffers
of TCP, and puts them back after a time, one JSON line each way.

Sent there as text and run by whatever Python is there, as root where it sets anything: standard
library only, written for Python 3.7. Questions are `{"do": NAME, ...}`. It ends with its standard
input; a process that it leaves behind puts the buffers back.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

SETTINGS_FOLDER = Path("/proc/sys/net/ipv4")
#: Each has three numbers: the least, the first and the largest bytes of a buffer (tcp(7)).
SETTINGS = ("tcp_rmem", "tcp_wmem")
#: Gone after a restart of the machine, as the settings are.
RECORD_FOLDER = Path("/run")
MAX_RECORD_BYTES = 1 << 16
#: The process that puts the buffers back does so within this.
RESTORE_S = 5.0


def hello() -> dict[str, Any]:
    return {}


def look() -> dict[str, Any]:
    """Return the buffers of this host; where they were set also those before, and the time at which
    they are put back."""
    answer = {"user": os.geteuid(), "buffers": {}, "before": None, "until": None}
    if not SETTINGS_FOLDER.is_dir():
        return answer
    record = None
    # Nothing was ever set here.
    with suppress(OSError), open(str(record_path())) as file:
        record = read_record(file)
    if record:
        answer.update(before=record["before"], until=record["until"])
    answer["buffers"] = read_buffers()
    return answer


def record_path() -> Path:
    """Return the file that holds what was set. Each network namespace has settings of its own."""
    namespace = Path("/proc/self/ns/net").stat().st_ino
    return RECORD_FOLDER / f"farspan-tcp-buffers-{namespace}"


def read_record(file: Any) -> Any:
    with suppress(ValueError):  # Empty: all was put back.
        return json.loads(os.pread(file.fileno(), MAX_RECORD_BYTES, 0).decode())
    return None


def read_buffers() -> dict[str, list[int]]:
    buffers = {}
    for name in SETTINGS:
        buffers[name] = [int(word) for word in (SETTINGS_FOLDER / name).read_text().split()]
    return buffers


def write_buffers(buffers: dict[str, list[int]]) -> None:
    for name, sizes in buffers.items():
        (SETTINGS_FOLDER / name).write_text(" ".join(map(str, sizes)))


def set_buffers(largest: int, seconds: float) -> dict[str, Any]:
    """Let buffers grow to `largest` bytes, for `seconds`; never make them smaller."""
    try:
        with open(str(record_path()), "a+") as file:
            put_back(file)
            before = read_buffers()
            after = {}
            for name, sizes in before.items():
                after[name] = [*sizes[:2], max(sizes[2], largest)]
            try:
                write_buffers(after)
                kept = read_buffers()
                if kept != after:
                    raise OSError(0, f"the kernel keeps {kept}")
                keep_until_restored(file, before, after, seconds)
            except OSError:
                with suppress(OSError):
                    write_buffers(before)
                raise
    except OSError as error:
        return {"refused": error.strerror or str(error), **look()}
    return look()


def restore_buffers() -> dict[str, Any]:
    """Put back what was set, at once."""
    try:
        with open(str(record_path()), "a+") as file:
            put_back(file)
    except OSError as error:
        return {"refused": error.strerror or str(error), **look()}
    return look()


def put_back(file: Any) -> None:
    """End the process that would put the buffers back later: it does so now. Hold the lock of the
    record afterwards."""
    deadline = time.monotonic() + RESTORE_S
    is_asked = False
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        record = read_record(file)
        # It holds the lock as long as it lives, so this is no other process's number.
        if record and not is_asked:
            with suppress(ProcessLookupError):
                os.kill(record["pid"], signal.SIGTERM)
            is_asked = True
        if time.monotonic() > deadline:
            raise BlockingIOError(0, "another farspan cluster tune works on this host")
        time.sleep(0.05)
    # Somebody has killed that process.
    record = read_record(file)
    if record:
        write_record_back(file, record)


def write_record_back(file: Any, record: Any) -> None:
    """Put back the buffers that are still as they were set, and empty the record."""
    now = read_buffers()
    before = {}
    for name, sizes in record["before"].items():
        if now[name] == record["after"][name]:
            before[name] = sizes
    write_buffers(before)
    file.truncate(0)


def keep_until_restored(
    file: Any, before: dict[str, list[int]], after: dict[str, list[int]], seconds: float
) -> None:
    """Leave a process behind that puts the buffers back after `seconds`, or when it is ended."""
    endings = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, endings)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, endings)
        record = {"before": before, "after": after, "until": time.time() + seconds, "pid": pid}
        file.truncate(0)
        file.write(json.dumps(record))
        file.flush()
        return
    # The process that stays: it shares the lock, and none of the streams of who asked.
    os.setsid()
    os.chdir("/")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    try:
        signal.sigtimedwait(endings, seconds)
        write_record_back(file, {"before": before, "after": after})
    finally:
        os._exit(0)


TUNE_QUESTIONS = (hello, look, set_buffers, restore_buffers)


def main() -> None:
    functions = {function.__name__: function for function in TUNE_QUESTIONS}
    for line in sys.stdin.buffer:
        question = json.loads(line.decode())
        try:
            answer = functions[question.pop("do")](**question)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
