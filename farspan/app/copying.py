"""Keeps the copies of a run up to date while it is trained: the newest checkpoint is copied as soon
as it is in the run's folder, one copy at a time.

Of the checkpoints that are saved during a copy the newest is copied next, and no other. A copy that
fails is warned of; the next save is copied again.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from farspan.app.copy_process import CopyReport
from farspan.app.updates import Note, Progress
from farspan.domain.config import RunConfig
from farspan.domain.decoding import decode_json
from farspan.domain.interpreter import module_command
from farspan.domain.own_files import open_own
from farspan.domain.problems import Refusal, command
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Warned
from farspan.domain.standard_input import STOP
from farspan.domain.struct_files import load_yaml
from farspan.domain.units import format_seconds
from farspan.planning.quantities import copy_rate, save_every_s

#: How often the run's folder is looked at for a new checkpoint, and a copy for its end.
COPY_POLL_S = 1.0
#: A copy that has not moved for this long is ended, and made again after the next save.
COPY_SILENCE_S = 600.0
#: The end of a run waits this long for its last copy; a stop, or an end by a fault, no longer than
#: the shortest notice before a machine is taken away leaves.
END_COPY_TIMEOUT_S = 600.0
STOP_COPY_TIMEOUT_S = 20.0


@contextmanager
def copying_checkpoints(
    run: RunFolder, progress: Progress, asked: Callable[[], int]
) -> Iterator[RunCopies]:
    """Keep copies of a run up to date inside a `with`, and make the last one at its end. `asked` is
    how often the user has asked to stop: once more, and the last copy is not waited for."""
    copies = RunCopies(run, progress)
    limit_s = STOP_COPY_TIMEOUT_S
    try:
        yield copies
        if not asked():
            limit_s = END_COPY_TIMEOUT_S
    finally:
        before = asked()
        copies.finish(limit_s, lambda: asked() > before)


class RunCopies:
    """The copies of one run; without `checkpoint.copy` there are none, and nothing is done."""

    def __init__(self, run: RunFolder, progress: Progress) -> None:
        self._run = run
        self._progress = progress
        config = load_yaml(run.config, RunConfig)
        copy_rate(config.checkpoint)
        self._locations = config.checkpoint.copies
        self._every_s = save_every_s(config)
        if config.checkpoint.every == "auto":
            self._every_s = run.load_plan().train.checkpoint_every_s
        self._changed = threading.Condition()
        self._requested = False
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        #: What was last copied, or failed to be; and values of `checkpoint.copy` that hold a copy.
        self._tried: tuple[str, int] | None = None
        self._copied = set[str]()
        self._messages = list[object]()

    def request_copy(self) -> None:
        """Copy the run's own files in the background, as after a new start, and from now on each
        new checkpoint."""
        if not self._locations:
            return
        with self._changed:
            self._requested = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._copy_while_open, daemon=True)
                self._thread.start()
            self._changed.notify()

    def report(self) -> None:
        """Report the copies that have failed since the last call, from the calling thread."""
        with self._changed:
            messages = self._messages
            self._messages = []
        for message in messages:
            self._progress(message)

    def finish(self, limit_s: float, hurried: Callable[[], bool]) -> None:
        """Make the last copy, at full speed: it is ended after `limit_s`, and reported."""
        if self._thread is None:
            return
        deadline = time.monotonic() + limit_s
        with self._changed:
            self._closed = True
            self._lift_bound()
            self._changed.notify()
        if self._run.plan.exists() and not hurried():
            self._progress(
                Note(f"copying the newest checkpoint, for {format_seconds(limit_s)} at most")
            )
        while self._thread.is_alive():
            self._thread.join(COPY_POLL_S / 10)
            if time.monotonic() > deadline or hurried() or not self._run.plan.exists():
                self._end_last_copy(limit_s)
                break
        self.report()

    def _end_last_copy(self, limit_s: float) -> None:
        with self._changed:
            # The thread may be between two copies.
            self._locations = ()
            if self._process is not None:
                self._process.kill()
            self._messages.append(
                self._warning(
                    f"the newest checkpoint was not copied within {format_seconds(limit_s)}; it is "
                    f"copied when the run goes on: {command('resume', self._run.path)}"
                )
            )

    # -- in the background

    def _copy_while_open(self) -> None:
        closed = False
        while not closed:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._requested, COPY_POLL_S)
                closed = self._closed
                newest = self._newest_checkpoint()
                due = closed or self._requested or newest != self._tried
                self._requested = False
            if due and self._run.plan.exists():
                self._copy_once(paced=not closed)
                self._tried = newest

    def _newest_checkpoint(self) -> tuple[str, int] | None:
        """Return which checkpoint is the newest in the run's folder, and when it was written."""
        step = self._run.newest_checkpoint()
        if step < 0:
            return None
        path = self._run.checkpoints / f"step-{step:08d}" / "manifest.json"
        with suppress(OSError):
            return path.parent.name, path.stat().st_mtime_ns
        return None

    def _copy_once(self, *, paced: bool) -> None:
        """Run the process that copies, and keep what it reports."""
        began = time.monotonic()
        words = [str(self._run.path)]
        if paced:
            words += ["--window", str(self._every_s)]
        try:
            with open_own(self._run.logs / "copies.log", "ab") as log:
                process = subprocess.Popen(
                    module_command(sys.executable, "farspan.app.copy_process", *words),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                    bufsize=0,
                )
        except (OSError, Refusal) as error:
            self._keep(self._warning(f"no copy of the newest checkpoint is made: {error}"))
            return
        with self._changed:
            self._process = process
            if self._closed:
                self._lift_bound()
                if not self._locations:
                    process.kill()
        failed = self._take_reports(process)
        with self._changed:
            self._process = None
        took_s = time.monotonic() - began
        if paced and not failed and took_s > self._every_s:
            self._keep(
                self._warning(
                    f"a copy took {format_seconds(took_s)}, longer than checkpoint.every: a lost "
                    "disk loses more than one interval"
                )
            )

    def _take_reports(self, process: subprocess.Popen[bytes]) -> bool:
        """Read what the process reports until it ends; return whether a copy has failed."""
        assert process.stdout is not None and process.stdin is not None
        done = set[str]()
        failed = False
        unread = b""
        with process:
            while select.select([process.stdout], [], [], COPY_SILENCE_S)[0]:
                content = os.read(process.stdout.fileno(), 2**16)
                if not content:
                    break
                *lines, unread = (unread + content).split(b"\n")
                for line in lines:
                    report = decode_json(line, CopyReport)
                    if report.location:
                        done.add(report.location)
                        failed = failed or bool(report.fact)
                        self._take_report(report)
            else:
                process.kill()
        for location in self._locations:
            if location not in done:
                failed = True
                fact = f"the copy ended with exit code {process.returncode}, see logs/copies.log"
                self._take_report(CopyReport(location=location, fact=fact))
        return failed

    def _take_report(self, report: CopyReport) -> None:
        if report.fact:
            self._keep(
                self._warning(
                    f"no copy of the newest checkpoint at {report.location}: {report.fact}; the "
                    "next save is copied again"
                )
            )
        elif report.location not in self._copied:
            self._copied.add(report.location)
            self._keep(Note(f"the run is copied to {report.location} after every save"))

    def _keep(self, message: object) -> None:
        with self._changed:
            self._messages.append(message)

    def _lift_bound(self) -> None:
        """Let the copy that is being made go at full speed."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, ValueError):  # It has ended.
                os.write(self._process.stdin.fileno(), STOP)

    def _warning(self, message: str) -> Warned:
        return Warned(at=time.time(), message=message)
