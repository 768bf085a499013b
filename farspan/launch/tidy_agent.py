"""The agent that `farspan cluster status` and `down` run on a host: it lists, ends and removes what
farspan has there, one JSON line each way.

Sent there as text and run by whatever Python is there: standard library only, written for Python
3.7. Questions are `{"do": NAME, ...}`. It ends with its standard input.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from farspan.launch.agent_loop import answer_questions

#: Proves that farspan made the folder: nothing without it is ever removed.
OWNER = "farspan-environment"
#: What was killed is gone within this.
HOST_KILL_TIMEOUT_S = 30.0
#: The end of an events file that holds its last whole line.
LAST_EVENT_BYTES = 1 << 16


def list_processes(base: str) -> dict[str, Any]:
    """Return this user's processes that run the environment's own interpreter."""
    prefix = str(Path(base) / "venv" / "bin") + "/"
    processes = []
    if Path("/proc/self/cmdline").exists():
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # It has ended, or is another user's.
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if entry.stat().st_uid == os.getuid() and words[0].startswith(prefix):
                    processes.append(
                        {"pid": int(entry.name), "words": [word for word in words if word]}
                    )
    else:
        words = ["ps", "-U", str(os.getuid()), "-o", "pid=,args="]
        listed = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        for line in listed.stdout.decode(errors="replace").splitlines():
            words = line.split()
            if len(words) > 1 and words[1].startswith(prefix):
                processes.append({"pid": int(words[0]), "words": words[1:]})
    return {"processes": processes}


def end_processes(base: str, seconds: float) -> dict[str, Any]:
    """Ask these processes to save and end; kill those that are left after `seconds`."""
    ended = {process["pid"] for process in list_processes(base)["processes"]}
    deadline = time.monotonic() + seconds
    number = signal.SIGTERM
    signalled: set[int] = set()
    while True:
        remaining = {process["pid"] for process in list_processes(base)["processes"]}
        if not remaining:
            return {"ended": sorted(ended)}
        if time.monotonic() > deadline and number == signal.SIGTERM:
            number = signal.SIGKILL
            signalled = set()
        if time.monotonic() > deadline + HOST_KILL_TIMEOUT_S:
            return {"ended": sorted(ended - remaining), "left": sorted(remaining)}
        for pid in remaining - signalled:
            with suppress(OSError):
                os.kill(pid, number)
        signalled |= remaining
        ended |= remaining
        time.sleep(0.1)


def list_runs(folder: str) -> dict[str, Any]:
    """Return the runs in a host's folder: name, bytes, and the last event of each."""
    runs = []
    for path in run_paths(folder):
        runs.append(
            {
                "path": str(path),
                "bytes": tree_bytes(path),
                "event": last_event(path / "events.jsonl"),
            }
        )
    cache = Path(folder).expanduser() / "cache" / "corpora"
    return {"runs": runs, "corpora_bytes": tree_bytes(cache)}


def run_paths(folder: str) -> list[Path]:
    """Return the runs that farspan has sent there: nothing else in such a folder is its own."""
    records = (Path(folder).expanduser() / "runs").glob("*/run.json")
    return sorted(path.parent for path in records if (path.parent / "plan.json").is_file())


def last_event(path: Path) -> Any:
    """Return the last whole event of a file; None where there is none."""
    try:
        with open(str(path), "rb") as file:
            file.seek(max(0, path.stat().st_size - LAST_EVENT_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines[:-1]):
        with suppress(ValueError):
            return json.loads(line.decode())
    return None


def tree_bytes(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(str(folder)):
        for name in files:
            with suppress(OSError):
                total += Path(parent, name).lstat().st_size
    return total


def remove_environment(base: str) -> dict[str, Any]:
    """Remove the environment's folder, if farspan made it; return the bytes that it had."""
    folder = Path(base)
    if not (folder / OWNER).is_file():
        return {"bytes": 0}
    size = tree_bytes(folder)
    shutil.rmtree(str(folder))
    return {"bytes": size}


def remove_runs(folder: str) -> dict[str, Any]:
    """Remove the runs and corpora that farspan has sent there, and what it has compiled; return
    their bytes."""
    size = 0
    cache = Path(folder).expanduser() / "cache"
    for path in (*run_paths(folder), cache / "corpora", cache / "compiled"):
        if path.is_dir() and not path.is_symlink():
            size += tree_bytes(path)
            shutil.rmtree(str(path))
    for path in (cache, Path(folder).expanduser() / "runs"):
        with suppress(OSError):  # It holds something else, or is not there.
            path.rmdir()
    return {"bytes": size}


TIDY_QUESTIONS = (
    list_processes,
    end_processes,
    list_runs,
    remove_environment,
    remove_runs,
)


if __name__ == "__main__":
    answer_questions(TIDY_QUESTIONS)
