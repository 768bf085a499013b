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
from farspan.domain.struct_files import load_yaml
from farspan.launch.copies import CopyError
from farspan.launch.copy_run import copy_run, linked_checkpoints
from farspan.launch.stop_on_stdin import follow_input
from farspan.launch.transfer_pacing import Pacer
from farspan.planning.quantities import copy_rate

#: How often the process prints how far it is.
REPORT_S = 1.0
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
