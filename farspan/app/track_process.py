"""Sends a run to one tracker, in a process of its own during training:
`python -m farspan.app.track_process RUN TRACKER`.

It reads the run's events from its folder, so that training never waits for it, and nothing is lost
where a tracker is away for a while. It prints a line of JSON for each line that people should see.
A line of JSON on its standard input, a `TrackEnd`, has it send the rest and end.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from farspan.domain.decoding import decode_json
from farspan.domain.escapes import one_line
from farspan.domain.own_files import refuse_link
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Event, Finished, Started, decode_events
from farspan.domain.standard_input import first_line
from farspan.domain.struct_files import load, save
from farspan.report.history import COMPLETE
from farspan.report.tracked_points import PointFilter
from farspan.report.tracked_run import describe_run, summarize_run
from farspan.report.trackers import EndState, Point, Tracker, load_tracker

#: How often new events are looked for; and a tracker that has failed is tried again.
EVENT_POLL_S = 1.0
RETRY_S = 30.0
#: Events that are sent at once.
MAX_EVENTS = 1000
#: A process whose supervisor is gone gets this long to send the rest.
ORPHAN_LIMIT_S = 60.0
#: Training comes first.
LOWEST_PRIORITY = 19
#: Characters of a library's error that are shown.
MAX_LIBRARY_ERROR = 300
#: Variables that hold a secret end in one of these words.
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASS")
#: Shorter values are in any text.
MIN_SECRET = 4


class TrackEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How the job has ended: with the code of a problem, if it was refused."""

    problem: str = ""


class TrackReport(msgspec.Struct, frozen=True, kw_only=True):
    """A line for people."""

    text: str


class SentSteps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`trackers/NAME.json`: the last step that a tracker has of each kind of points, and how many
    events of the run it has followed."""

    last_steps: dict[str, int] = {}
    events: int = 0


class RunSender:
    """Sends the events of one run to one tracker, those that it has left out.

    A tracker that fails is reported once and tried again; its events wait in the run's folder.
    """

    def __init__(self, run: RunFolder, name: str, report: Callable[[str], None]) -> None:
        self._run = run
        self._name = name
        self._report = report
        self._sent_file = run.trackers / f"{name}.json"
        self._has_failed = False
        self._forget_tracker()

    def _forget_tracker(self) -> None:
        """Begin again: the tracker is opened, and gets what it lacks of all events."""
        self._tracker: Tracker | None = None
        self._filter = PointFilter({}, rewinds=False)
        #: Bytes of the events' file that were read.
        self._position = 0
        #: Points that the tracker has not taken yet.
        self._unsent: list[Point] = []
        self._plan = ""
        self._finished: Finished | None = None

    def follow(self, ended: threading.Event, end: Callable[[], TrackEnd]) -> None:
        """Send events until the run has `ended`; then all the rest, and how it did."""
        while True:
            # Asked first: what was added before it was set is read.
            last = ended.is_set()
            pause_s = EVENT_POLL_S
            try:
                self._send_new()
                if last:
                    self._finish(end())
            except Exception as error:  # Whatever a library raises ends no training.
                self._report_failure(error, last=last)
                self._forget_tracker()
                pause_s = RETRY_S
            if last:
                return
            ended.wait(pause_s)

    def _send_new(self) -> None:
        if self._tracker is None:
            self._open()
        while events := self._read_events():
            for event in events:
                self._take(event)
            self._send_points()

    def _open(self) -> None:
        """Open the tracker, and begin after what it has."""
        refuse_link(self._run.trackers)
        self._run.trackers.mkdir(exist_ok=True)
        described = describe_run(self._run)
        tracker = load_tracker(self._name).open_tracker(described)
        self._plan = described.config["plan.hash"]
        sent = SentSteps()
        known = tracker.last_steps()
        if known is not None:
            sent = SentSteps(last_steps=known)
        elif self._sent_file.exists():
            sent = load(self._sent_file, SentSteps)
        rewinds = tracker.rewind(max(sent.last_steps.values(), default=-1))
        self._filter = PointFilter(sent.last_steps, rewinds=rewinds, num_sent=sent.events)
        self._tracker = tracker
        if tracker.note:
            self._report(tracker.note)

    def _read_events(self) -> list[Event]:
        """Read the next whole lines of the events' file, none where there are no more."""
        with open(self._run.events, "rb") as file:
            file.seek(self._position)
            lines = [line for line in islice(file, MAX_EVENTS) if line.endswith(b"\n")]
        events = list(decode_events(lines, self._run.events))
        self._position += sum(map(len, lines))
        return events

    def _take(self, event: Event) -> None:
        """Keep the point of an event, and follow a start to its step and its plan."""
        assert self._tracker is not None
        if isinstance(event, Started) and event.plan != self._plan:
            self._describe_plan(event.plan)
        step = self._filter.find_rewind(event)
        if step is not None:
            self._send_points()
            self._tracker.rewind(step)
        point = self._filter.take(event)
        if point is not None:
            self._unsent.append(point)
        self._finished = event if isinstance(event, Finished) else None

    def _describe_plan(self, plan: str) -> None:
        """Record the configuration of another plan, if it is the run's now: earlier events name
        plans that it followed before."""
        assert self._tracker is not None
        config = describe_run(self._run).config
        if config["plan.hash"] == plan:
            self._tracker.describe(config)
            self._plan = plan

    def _send_points(self) -> None:
        assert self._tracker is not None
        if self._unsent:
            self._tracker.log(self._unsent)
            self._unsent = []
            sent = SentSteps(last_steps=self._filter.last_steps, events=self._filter.num_taken)
            save(sent, self._sent_file)

    def _finish(self, end: TrackEnd) -> None:
        assert self._tracker is not None
        summary = summarize_run(self._run)
        state: EndState = "failed"
        if end.problem in ("interrupted", "preempted"):
            state = "stopped"
        elif end.problem:
            summary["problem"] = end.problem
        elif self._finished is not None:
            state = "finished" if self._finished.reason in COMPLETE else "stopped"
            summary["reason"] = self._finished.reason
        self._tracker.finish(state, summary, time.time())

    def _report_failure(self, error: Exception, *, last: bool) -> None:
        fact = one_line(hide_secrets(f"{type(error).__name__}: {error}"))[:MAX_LIBRARY_ERROR]
        if last:
            self._report(f"the tracker {self._name} lacks the end of this run: {fact}")
        elif not self._has_failed:
            self._report(
                f"the tracker {self._name} fails, and is tried again every {RETRY_S:.0f} s; the "
                f"training does not wait for it: {fact}"
            )
        self._has_failed = True


def hide_secrets(text: str) -> str:
    """Replace the values of variables that hold a secret, also those within an address."""
    secrets = set()
    for name, value in os.environ.items():
        if name.upper().endswith(SECRET_WORDS):
            secrets.add(value)
        elif "://" in value:
            secrets |= _secrets_of_address(value)
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= MIN_SECRET:
            text = text.replace(secret, "***")
    return text


def _secrets_of_address(address: str) -> set[str]:
    """Return the user, the password and the query of an address."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return set()
    user = parts.netloc.rpartition("@")[0]
    return {user, parts.password or "", parts.query}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("tracker")
    given = parser.parse_args()
    os.nice(LOWEST_PRIORITY)
    # Libraries print where only reports belong.
    reports = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

    def report(text: str) -> None:
        os.write(reports, msgspec.json.encode(TrackReport(text=text)) + b"\n")

    ended = threading.Event()
    ends = list[TrackEnd]()

    def await_end() -> None:
        line = first_line()
        if line:
            ends.append(decode_json(line, TrackEnd))
        else:  # The supervisor is gone, and its workers save and end.
            ends.append(TrackEnd(problem="interrupted"))
            watchdog = threading.Timer(ORPHAN_LIMIT_S, os._exit, (1,))
            watchdog.daemon = True
            watchdog.start()
        ended.set()

    threading.Thread(target=await_end, daemon=True).start()
    RunSender(RunFolder(given.run), given.tracker, report).follow(ended, lambda: ends[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
