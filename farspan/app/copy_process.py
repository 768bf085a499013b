"""Copies a run to its places, in a process of its own during training:
`python -m farspan.app.copy_process RUN [--window SECONDS]`.

It prints a line of JSON whenever something has moved, and one for each value of `checkpoint.copy`
at the end. STOP on its standard input lifts the bound on its speed. It ends with its standard
input, so that no supervisor leaves one behind.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from farspan.app import clusters
from farspan.app.checkpoints import flaw_of
from farspan.app.copy_places import open_copy_places
from farspan.domain.cluster import Cluster
from farspan.domain.config import RunConfig
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Step, decode_events
from farspan.domain.struct_files import load_yaml
from farspan.launch.copies import CopyError
from farspan.launch.copy_run import copy_run, linked_checkpoints
from farspan.launch.stop_on_stdin import follow_input
from farspan.launch.transfer_pacing import Pacer
from farspan.planning.quantities import copy_rate

#: How often the process prints how far it is.
REPORT_S = 1.0
#: Events come home at most this much later than a checkpoint, are looked at this often, and at the
#: end of their file, which holds hundreds of them.
EVENTS_LAG_S = 10.0
EVENTS_POLL_S = 0.2
TAIL_BYTES = 1 << 17
#: Beside training, and after it.
LOWEST_PRIORITY = 19


class CopyReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the process: the bytes that have moved; or of a value of `checkpoint.copy` that is
    done, why it failed."""

    spent_bytes: int = 0
    location: str = ""
    fact: str = ""


def copy_to_places(
    run: RunFolder, pacer: Pacer, window_s: float | None = None
) -> Iterator[CopyReport]:
    """Copy a run to all its places, one after another; yield how each ended."""
    config = load_yaml(run.config, RunConfig)
    locations = config.checkpoint.copies
    cluster = clusters.cluster_of_run(run)
    first = run.load_plan().devices[0].host
    if window_s is not None:
        window_s /= len(locations)
    with linked_checkpoints(run) as checkpoints:
        _wait_for_events(run, checkpoints)
        whole = []
        damaged = []
        for path in checkpoints:
            flaw = flaw_of(path)
            if flaw:
                damaged.append(f"{path.name} is damaged here: {flaw}")
            else:
                whole.append(path)
        for location in locations:
            facts = _copy_to(
                run, location, cluster, first, whole, pacer, copy_rate(config.checkpoint), window_s
            )
            yield CopyReport(location=location, fact="; ".join([*damaged, *facts]))


def _wait_for_events(run: RunFolder, checkpoints: list[Path]) -> None:
    """Wait until the run's events record the steps of these checkpoints: those of rank 0 on another
    host are fetched apart from its checkpoints."""
    steps = [int(path.name.removeprefix("step-")) for path in checkpoints if path.name != "best"]
    deadline = time.monotonic() + EVENTS_LAG_S
    while steps and last_step(run.events) < max(steps) and time.monotonic() < deadline:
        time.sleep(EVENTS_POLL_S)


def last_step(events: Path) -> int:
    """Return the last step that a run's events record at their end; 0 without any."""
    if not events.exists():
        return 0
    with open(events, "rb") as file:
        file.seek(max(0, events.stat().st_size - TAIL_BYTES))
        tail = file.read()
    whole_lines = tail[: tail.rfind(b"\n") + 1].splitlines()
    # The first may be the end of a longer one.
    if len(tail) == TAIL_BYTES:
        del whole_lines[:1]
    recorded = decode_events(whole_lines, events)
    return max((event.step for event in recorded if isinstance(event, Step)), default=0)


def _copy_to(
    run: RunFolder,
    location: str,
    cluster: Cluster,
    first: str,
    checkpoints: list[Path],
    pacer: Pacer,
    rate: float | None,
    window_s: float | None,
) -> list[str]:
    """Copy to the first place of a location that takes it; return why none did."""
    facts = []
    try:
        for place in open_copy_places(location, cluster, first):
            try:
                copy_run(run, place, checkpoints, pacer, rate=rate, window_s=window_s)
                return []
            except CopyError as error:
                facts.append(f"{place.name}: {error}")
    except OSError as error:
        facts.append(f"{error.filename or location}: {error.strerror or error}")
    except Refusal as refusal:
        facts.append(refusal.problem.fact)
    return facts


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--window", type=float)
    given = parser.parse_args()
    os.nice(LOWEST_PRIORITY)
    pacer = Pacer()
    follow_input(stop=pacer.lift, ended=lambda: os._exit(1))
    done = threading.Event()
    reporting = threading.Thread(target=_report_progress, args=(pacer, done), daemon=True)
    reporting.start()
    for report in copy_to_places(RunFolder(given.run), pacer, given.window):
        _print(report)
    done.set()
    return 0


def _report_progress(pacer: Pacer, done: threading.Event) -> None:
    last = -1
    while not done.wait(REPORT_S):
        if pacer.spent_bytes != last:
            last = pacer.spent_bytes
            _print(CopyReport(spent_bytes=last))


def _print(report: CopyReport) -> None:
    os.write(1, msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
