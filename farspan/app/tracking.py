"""Trackers of a run while it is trained: a process for each, which follows the run's events.

Training never waits for one. At the end of a job each gets some seconds to send the rest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from farspan.app.track_process import TrackEnd, TrackReport
from farspan.app.updates import Note, Progress
from farspan.domain.config import RunConfig
from farspan.domain.decoding import decode_json
from farspan.domain.interpreter import module_command
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Event
from farspan.domain.struct_files import load_yaml
from farspan.domain.units import format_seconds
from farspan.report.trackers import find_missing, resolve_trackers

#: The end of a run waits this long for its trackers; a stop, or an end by a fault, no longer than
#: the shortest notice before a machine is taken away leaves.
END_TRACKING_TIMEOUT_S = 60.0
STOP_TRACKING_TIMEOUT_S = 10.0
END_POLL_S = 0.05
#: Bytes of reports that are read at once.
REPORT_CHUNK_BYTES = 2**16


@contextmanager
def tracking_run(run: RunFolder, progress: Progress) -> Iterator[RunTrackers]:
    """Track a run inside a `with`, and record how it has ended."""
    trackers = RunTrackers(run, progress)
    end = TrackEnd(problem="failed")
    limit_s = STOP_TRACKING_TIMEOUT_S
    try:
        yield trackers
        end = TrackEnd()
        limit_s = END_TRACKING_TIMEOUT_S
    except Refusal as refusal:
        end = TrackEnd(problem=refusal.problem.code)
        raise
    finally:
        trackers.finish(end, limit_s)


class RunTrackers:
    """The processes of a run's trackers. They begin at its first event: until then another job may
    hold the run."""

    def __init__(self, run: RunFolder, progress: Progress) -> None:
        self._run = run
        self._progress = progress
        asked = load_yaml(run.config, RunConfig).train.trackers
        self._names = resolve_trackers(asked)
        self._processes: dict[str, TrackerProcess] | None = None

    def take(self, event: Event) -> None:
        """Start the trackers at the first event, and report what they have printed since the last
        one."""
        if self._processes is None:
            self._processes = dict(self._start_processes())
        for process in self._processes.values():
            process.report(self._progress)

    def _start_processes(self) -> Iterator[tuple[str, TrackerProcess]]:
        for name in self._names:
            # Found when the run was planned, perhaps on another machine.
            missing = find_missing(name)
            if missing is not None:
                self._progress(Note(f"{missing.what}: {missing.remedy}"))
                continue
            try:
                yield name, TrackerProcess(self._run, name)
            except OSError as error:
                self._progress(Note(f"the tracker {name} was not started: {error}"))

    def finish(self, end: TrackEnd, limit_s: float) -> None:
        """Have all trackers send the rest, and wait for them until `limit_s` is over."""
        processes = self._processes or {}
        deadline = time.monotonic() + limit_s
        try:
            for process in processes.values():
                process.request_end(end)
            for name, process in processes.items():
                while process.is_running and time.monotonic() < deadline:
                    time.sleep(END_POLL_S)
                process.report(self._progress)
                if process.is_running:
                    limit = format_seconds(limit_s)
                    text = f"the tracker {name} was ended: it had not sent the rest within {limit}"
                    self._progress(Note(text))
        finally:
            for process in processes.values():
                process.close()


class TrackerProcess:
    """The process of one tracker."""

    def __init__(self, run: RunFolder, name: str) -> None:
        self._name = name
        self._unread = b""
        #: Whether its end was reported.
        self._ended = False
        self._process = subprocess.Popen(
            module_command(
                sys.executable, "farspan.app.track_process", str(run.path.absolute()), name
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Ctrl-C is for the supervisor: trackers send how the run ends.
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def report(self, progress: Progress) -> None:
        """Report the lines that it has printed, and once if it has failed."""
        is_over = not self.is_running
        with suppress(BlockingIOError):
            while chunk := os.read(self._output, REPORT_CHUNK_BYTES):
                self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            progress(Note(decode_json(line, TrackReport).text))
        if is_over and self._process.returncode and not self._ended:
            self._ended = True
            code = self._process.returncode
            progress(Note(f"the tracker {self._name} has ended with exit code {code}"))

    def request_end(self, end: TrackEnd) -> None:
        """Have it send the rest and end."""
        assert self._process.stdin is not None
        with suppress(OSError):  # It has ended.
            os.write(self._process.stdin.fileno(), msgspec.json.encode(end) + b"\n")

    def close(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()
        with self._process:
            pass
