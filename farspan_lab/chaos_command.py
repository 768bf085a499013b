"""Train a run once more while its workers are killed and stopped and its links cut, and say what
became of it.

Faults are written as kill:1@20 (rank 1, after step 20), stop:1@20+8s (for 8 s; without +8s for
ever), cut:a-b@20+8s (both ways) or cut:a>b@20 (one way). In place of a step stand `save`, during
the next save, and `recovery`, while the run recovers from the fault before. Links can be cut in a
lab, where the run's cluster is lab:NAME.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from farspan.app.preflight_checks import refuse_existing, require_torch, unused_path
from farspan.app.updates import Faulted, Note
from farspan.cli.arguments import find_run, takes_run
from farspan.cli.console import Console
from farspan.domain.config import OnFault
from farspan.domain.problems import Refusal, command
from farspan.domain.run import RunFolder
from farspan.domain.units import format_seconds
from farspan.report.tables import table_lines
from farspan_lab.chaos import Disturbed, lab_of, links_of
from farspan_lab.faults import Injection, drawn, parse

HELP = "train a run once more while faults are made, and compare"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_run(parser)
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, help="run directory to make (default: RUN-chaos)"
    )
    parser.add_argument(
        "--fault",
        metavar="FAULT",
        action="append",
        default=[],
        help="a fault; several come in order",
    )
    parser.add_argument(
        "--faults", metavar="N", type=int, default=0, help="so many faults at random (default: 0)"
    )
    parser.add_argument(
        "--on-fault",
        choices=get_args(OnFault),
        help="what follows a fault (default: as the run has it)",
    )
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="of what is random (default: 0)"
    )


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.report.history import is_complete
    from farspan_lab.chaos import disturb

    require_torch()
    calm = find_run(given, console)
    if not is_complete(calm):
        raise Refusal(
            "not-a-run",
            what="the run has not trained to its end",
            where=calm.path,
            fact="its losses are what those of the disturbed run are compared with",
            remedy=command("resume", calm.path),
        )
    path = given.out or calm.path.with_name(f"{calm.path.name}-chaos")
    refuse_existing(path, command("chaos", calm.path, "--out", unused_path(path)))
    injections = _injections(given, calm)

    def show(update: object) -> None:
        if isinstance(update, Faulted | Note):
            console.write_line(update.text)

    disturbed = disturb(calm, path, injections, show, seed=given.seed, on_fault=given.on_fault)
    say(disturbed, console)
    console.answer(disturbed)


def _injections(given: argparse.Namespace, calm: RunFolder) -> tuple[Injection, ...]:
    plan = calm.load_plan()
    chosen = tuple(parse(text) for text in given.fault)
    most = plan.train.steps // 2
    if not 0 <= given.faults <= most:
        raise Refusal(
            "out-of-range",
            what="a run cannot have so many faults",
            where=f"--faults {given.faults}",
            fact=f"0 to {most} fit into its {plan.train.steps:,} steps",
            remedy=f"--faults {min(3, most):d}",
        )
    if given.faults:
        chosen += drawn(
            given.seed, given.faults, len(plan.devices), links_of(calm), plan.train.steps
        )
    if not chosen:
        raise Refusal(
            "usage",
            what="there is no fault to make",
            where="farspan chaos",
            fact="neither --fault nor --faults",
            remedy=command("chaos", calm.path, "--faults", 3),
        )
    links = {frozenset(pair) for pair in links_of(calm)}
    for injection in chosen:
        if injection.rank is not None and injection.rank >= len(plan.devices):
            raise _impossible(injection, f"the run has ranks 0 to {len(plan.devices) - 1}")
        if injection.sites is not None and frozenset(injection.sites) not in links:
            named = ", ".join(f"{a}-{b}" for a, b in links_of(calm))
            raise _impossible(
                injection, f"links: {named}" if lab_of(calm) else "the run's cluster is no lab"
            )
    return chosen


def _impossible(injection: Injection, fact: str) -> Refusal:
    return Refusal(
        "out-of-range",
        what="the run cannot have this fault",
        where=f"--fault {injection}",
        fact=fact,
        remedy="farspan chaos --help",
    )


def say(disturbed: Disturbed, console: Console) -> None:
    """Return what each fault did, how the run ended, and how its losses compare."""
    heads = ("fault", "at step", "seen after", "next step after", "steps again", "then")
    rows = [
        (
            made.fault,
            str(made.step),
            _s(made.seen_s),
            _s(made.back_s),
            str(made.lost),
            "no restart"
            if made.seen_s is None
            else "another plan"
            if made.replanned
            else "the same plan",
        )
        for made in disturbed.injected
    ]
    for line in table_lines(heads, rows, right=(1, 2, 3, 4)):
        console.write_line(line)
    for fault in disturbed.left:
        console.write_line(f"{fault}: its moment did not come")
    console.write_line(ending(disturbed))


def ending(disturbed: Disturbed) -> str:
    """How the run ended, in one line."""
    if (problem := disturbed.problem) is not None:
        after = (
            ""
            if disturbed.ended_s is None
            else f" {format_seconds(disturbed.ended_s)} after the last fault"
        )
        return f"ended{after}: {problem.what}: {problem.fact}"
    comparison = disturbed.comparison
    assert comparison is not None
    if comparison.equal:
        return f"trained to its end; the last loss of {comparison.steps} steps is equal, bit by bit"
    return (
        f"trained to its end; losses of {comparison.steps} steps differ by {comparison.worst:.1e} "
        "at most"
    )


def _s(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f} s"
