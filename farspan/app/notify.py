"""Notifies a person of a job's end and of its faults, by a command of their own."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from farspan.app.updates import Faulted, Note, Progress, Waiting
from farspan.domain.problems import Refusal

#: A command that has not ended by then is killed.
NOTIFY_TIMEOUT_S = 30.0


class Notifier:
    """Runs a shell command for each event of a job, with FARSPAN_EVENT, FARSPAN_RUN and
    FARSPAN_MESSAGE in its environment. A command that fails is reported, and ends nothing."""

    def __init__(self, command: str | None, run: Path, progress: Progress) -> None:
        self._command = command
        self._run = run
        self._progress = progress
        self._threads: list[threading.Thread] = []

    def watch(self, update: object) -> None:
        """Pass an update on, and notify of a fault, or of what is waited for."""
        self._progress(update)
        if isinstance(update, Faulted):
            self.notify("restarted", str(update))
        elif isinstance(update, Waiting):
            self.notify("waiting", str(update))

    def notify(self, event: str, message: str) -> None:
        """Run the command in a thread: training does not wait for it."""
        if self._command is None:
            return
        thread = threading.Thread(target=self._run_command, args=(event, message))
        self._threads.append(thread)
        thread.start()

    def _run_command(self, event: str, message: str) -> None:
        assert self._command is not None
        variables = {
            "FARSPAN_EVENT": event,
            "FARSPAN_RUN": str(self._run.absolute()),
            "FARSPAN_MESSAGE": message,
        }
        failure = ""
        try:
            done = subprocess.run(
                ["sh", "-c", self._command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env={**os.environ, **variables},
                timeout=NOTIFY_TIMEOUT_S,
            )
            if done.returncode:
                words = done.stderr.decode(errors="replace").split()
                failure = f"exit code {done.returncode}: {' '.join(words)[-200:]}"
        except subprocess.TimeoutExpired:
            failure = f"it has not ended within {NOTIFY_TIMEOUT_S:.0f} s"
        if failure:
            self._progress(Note(f"the command of notify failed ({event}): {failure}"))

    def finish(self) -> None:
        """Wait for the commands that still run."""
        for thread in self._threads:
            thread.join()


@contextmanager
def notifying(command: str | None, run: Path, progress: Progress) -> Iterator[Progress]:
    """Notify of how the block ends, and of faults that are reported to what this yields."""
    notifier = Notifier(command, run, progress)
    try:
        yield notifier.watch
    except Refusal as refusal:
        event = "stopped" if refusal.problem.code == "interrupted" else "failed"
        notifier.notify(event, str(refusal.problem))
        raise
    else:
        notifier.notify("finished", f"{run} is finished")
    finally:
        notifier.finish()
