"""The agent that `farspan cluster tune` runs on a host: it sets how large the kernel makes buffers
of TCP, and puts them back after a time, one JSON line each way.

Sent there as text and run by whatever Python is there, as root where it sets anything: standard
library only, written for Python 3.7. Questions are `{"do": NAME, ...}`. It ends with its standard
input; a process that it leaves behind puts the buffers back.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from farspan.launch.agent_loop import answer_questions

SETTINGS_FOLDER = Path("/proc/sys/net/ipv4")
#: Each has three numbers: the least, the first and the largest bytes of a buffer (tcp(7)).
SETTINGS = ("tcp_rmem", "tcp_wmem")
#: Root's alone to write, and gone after a restart of the machine, as the settings are.
RECORD_FOLDER = Path("/run")
#: The process that puts the buffers back does so within this, and an agent has its turn.
RESTORE_S = 5.0
TURN_S = 15.0


def look() -> dict[str, Any]:
    """Return the buffers of this host; where they were set also those before, and the time at which
    they are put back."""
    answer = {"user": os.geteuid(), "buffers": {}, "before": None, "until": None}
    if not SETTINGS_FOLDER.is_dir():
        return answer
    record = read_record()
    if record:
        answer.update(before=record["before"], until=record["until"])
    answer["buffers"] = read_buffers()
    return answer


def record_path() -> Path:
    """Return the file that holds what was set. Each network namespace has settings of its own."""
    namespace = Path("/proc/self/ns/net").stat().st_ino
    return RECORD_FOLDER / f"farspan-tcp-buffers-{namespace}.json"


def read_record() -> Any:
    """Return the record of what was set; None where nothing is."""
    with suppress(FileNotFoundError):
        return json.loads(record_path().read_text())
    return None


def write_record(record: dict[str, Any]) -> None:
    """Write it whole, for everybody to read."""
    new = record_path().with_suffix(".new")
    new.write_text(json.dumps(record))
    new.chmod(0o644)
    new.replace(record_path())


def read_buffers() -> dict[str, list[int]]:
    buffers = {}
    for name in SETTINGS:
        buffers[name] = [int(word) for word in (SETTINGS_FOLDER / name).read_text().split()]
    return buffers


def write_buffers(buffers: dict[str, list[int]]) -> None:
    for name, sizes in buffers.items():
        (SETTINGS_FOLDER / name).write_text(" ".join(map(str, sizes)))


def set_buffers(largest: int, seconds: float) -> dict[str, Any]:
    """Let buffers grow to `largest` bytes, for `seconds`; never make them smaller, nor what was set
    before end sooner."""
    try:
        with open_lock(".turn") as turn, open_lock(".lock") as lock:
            hold_lock(turn, TURN_S)
            ended = put_back(lock)
            until = time.time() + seconds
            before = read_buffers()
            after = {}
            for name, sizes in before.items():
                after[name] = [*sizes[:2], max(sizes[2], largest)]
            if ended:
                until = max(until, ended["until"])
                for name, sizes in ended["after"].items():
                    after[name][2] = max(after[name][2], sizes[2])
            keep_until_restored(before, after, until, turn)
    except OSError as error:
        return {"refused": error.strerror or str(error), **look()}
    return look()


def restore_buffers() -> dict[str, Any]:
    """Put back what was set, at once."""
    try:
        with open_lock(".turn") as turn, open_lock(".lock") as lock:
            hold_lock(turn, TURN_S)
            put_back(lock)
    except OSError as error:
        return {"refused": error.strerror or str(error), **look()}
    return look()


def open_lock(suffix: str) -> Any:
    """Open a file to lock: `.turn`, which one agent after another holds, or `.lock`, which the
    process holds that will put the buffers back. Nobody but root may, and so keep root waiting."""
    path = str(record_path().with_suffix(suffix))
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+")


def hold_lock(lock: Any, seconds: float) -> None:
    """Lock a file. Raises OSError where another process holds it for so long."""
    import fcntl

    deadline = time.monotonic() + seconds
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > deadline:
            raise OSError(0, "another farspan cluster tune works on this host")
        time.sleep(0.05)


def put_back(lock: Any) -> Any:
    """End the process that would put the buffers back later: it does so now. Return what it had
    set, None where nothing was, and hold the lock afterwards."""
    ended = read_record()
    if ended and start_time(ended["pid"]) == ended["began"]:
        with suppress(ProcessLookupError):
            os.kill(ended["pid"], signal.SIGTERM)
    hold_lock(lock, RESTORE_S)
    # Somebody has killed that process.
    record = read_record()
    if record:
        write_record_back(record)
    return ended


def start_time(pid: int) -> str:
    """Return when a process began, in the kernel's ticks: with its number it names no other."""
    with suppress(OSError):
        # The name before it, in brackets, may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def write_record_back(record: dict[str, Any]) -> None:
    """Put back the buffers that are still as they were set, and remove the record."""
    now = read_buffers()
    before = {}
    for name, sizes in record["before"].items():
        if now[name] == record["after"][name]:
            before[name] = sizes
    write_buffers(before)
    record_path().unlink()


def keep_until_restored(
    before: dict[str, list[int]], after: dict[str, list[int]], until: float, turn: Any
) -> None:
    """Leave a process behind that sets the buffers, and puts them back at `until` (Unix time) or
    when it is ended. It shares the lock, and not the turn. Raises OSError where they cannot be
    set."""
    done, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(done)
        turn.close()
        try:
            keep_buffers(before, after, until, report)
        finally:
            os._exit(0)
    os.close(report)
    with open(done, "rb") as answer:
        failure = answer.read().decode()
    if failure:
        os.waitpid(pid, 0)
        raise OSError(0, failure)


def keep_buffers(
    before: dict[str, list[int]], after: dict[str, list[int]], until: float, report: int
) -> None:
    """Set the buffers, close `report`, with why not if they could not be set, and wait."""
    os.setsid()
    os.chdir("/")
    endings = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, endings)
    pid = os.getpid()
    record = {"before": before, "after": after, "until": until, "pid": pid}
    record["began"] = start_time(pid)
    try:
        write_record(record)
        write_buffers(after)
        kept = read_buffers()
        if kept != after:
            raise OSError(0, f"the kernel keeps {kept}")
    except Exception as error:
        with suppress(OSError):
            write_buffers(before)
        with suppress(OSError):
            record_path().unlink()
        os.write(report, (getattr(error, "strerror", None) or repr(error)).encode())
        return
    # Who asked waits for the end of all of these.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    os.close(report)
    signal.sigtimedwait(endings, max(0.0, until - time.time()))
    write_record_back(record)


TUNE_QUESTIONS = (look, set_buffers, restore_buffers)


if __name__ == "__main__":
    answer_questions(TUNE_QUESTIONS)
