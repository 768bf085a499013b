"""Seeded faults in runs on two to four sites, in labs, over ssh and in a Slurm.

    python -m benchmarks.chaos --seed 1 --count 120 [--only 3,7]

Each scenario is one run of `farspan train --until-done`, with a fault that the seed has drawn: of a
worker, the supervisor, rank 0's host with its disk, a site, a link, or a full disk; while the run
trains, saves, recovers, plans, or makes its last step. The command is given again after a kill, as
a unit of systemd does. The losses are compared with those of the same run undisturbed, which is
trained once for each commit.

A row a scenario is appended to results/chaos.jsonl; what is there of this seed and commit is not
run again. The table by launcher is printed and written to results/chaos.md. The exit code is 1
where a run was not as it has to be. `--only` runs the scenarios of these numbers. It needs root, a
machine that allows labs, and for two of the launchers openssh-server and slurm-wlm.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import msgspec

from farspan.domain.run import source_commit
from tests.faults.places import missing
from tests.faults.running import Outcome, run_scenario
from tests.faults.scenarios import EVERYWHERE, Kind, Scenario, draw_scenarios

RESULTS = Path(__file__).parent / "results" / "chaos.jsonl"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    commit: str | None
    date: str
    versions: dict[str, str]
    outcome: Outcome


def run_row(scenario: Scenario, seed: int, folder: Path) -> Row:
    return Row(
        seed=seed,
        commit=source_commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=read_versions(),
        outcome=run_scenario(scenario, folder),
    )


def read_versions() -> dict[str, str]:
    return {
        "farspan": version("farspan"),
        "python": platform.python_version(),
        "torch": version("torch"),
        "kernel": platform.release(),
    }


def describe_row(row: Row) -> str:
    """Return one line about a scenario that was run."""
    outcome = row.outcome
    ending = outcome.ending
    times = [
        f"seen {_seconds(struck.seen_s)}, next step {_seconds(struck.next_step_s)}, "
        f"{struck.steps_again} again"
        for struck in ending.struck[-1:]
    ]
    code = "" if ending.code is None else f" ({ending.code})"
    return (
        f"{outcome.scenario}: {outcome.verdict}{code} in {ending.seconds:.0f} s; "
        f"{'; '.join(times)}{outcome.flaw and f': {outcome.flaw}'}"
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each launcher, then for each kind of fault."""
    heads = (
        ("scenarios", "finished", "ended rightly", "wrong", "same plan", "recoveries"),
        ("fault to next step, s: quartiles", "max", "steps again: median", "max"),
    )
    columns = [name for head in heads for name in head]
    for what in ("launcher", "fault"):
        yield f"| {what} | {' | '.join(columns)} |"
        yield f"|{'---|' * (len(columns) + 1)}"
        names = EVERYWHERE if what == "launcher" else get_args(Kind)
        for name in names:
            chosen = [row for row in rows if name in _names(row.outcome.scenario)]
            if chosen:
                yield f"| {name} | {' | '.join(_cells(chosen))} |"
        yield ""


def _names(scenario: Scenario) -> tuple[str, ...]:
    kind = "" if scenario.fault is None else scenario.fault.kind
    return scenario.launcher, kind


def _cells(rows: Sequence[Row]) -> Iterator[str]:
    verdicts = Counter(row.outcome.verdict for row in rows)
    # Of a run that ended, the next step comes once the cause was removed.
    recovered = [row for row in rows if row.outcome.ending.code is None]
    struck = [struck for row in recovered for struck in row.outcome.ending.struck]
    back = sorted(one.next_step_s for one in struck if one.next_step_s is not None)
    again = [one.steps_again for one in struck if one.next_step_s is not None]
    yield str(len(rows))
    for verdict in ("finished", "ended", "wrong"):
        yield str(verdicts[verdict])
    yield str(sum(row.outcome.same_plan for row in rows))
    yield str(len(back))
    quartiles = statistics.quantiles(back, method="inclusive") if len(back) > 1 else back
    yield ", ".join(f"{value:.1f}" for value in quartiles)
    yield f"{back[-1]:.1f}" if back else ""
    yield f"{statistics.median(again):g}" if again else ""
    yield str(max(again)) if again else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--only", default="", help="numbers of scenarios, as 3,7")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--folder", type=Path, help="where undisturbed runs are kept")
    given = parser.parse_args()
    for launcher in EVERYWHERE:
        if reason := missing(launcher):
            sys.exit(f"{launcher}: {reason}")
    commit = source_commit()
    lines = given.out.read_bytes().splitlines() if given.out.exists() else []
    kept = [msgspec.json.decode(line, type=Row) for line in lines]
    rows = [row for row in kept if (row.seed, row.commit) == (given.seed, commit)]
    done = {row.outcome.scenario for row in rows}
    chosen = {int(number) for number in given.only.split(",") if number}
    # Undisturbed runs are of this commit: rounding may differ in another.
    folder = given.folder or Path(tempfile.gettempdir()) / f"farspan-chaos-{commit}"
    for scenario in draw_scenarios(given.seed, given.count):
        if scenario in done or (chosen and scenario.number not in chosen):
            continue
        row = run_row(scenario, given.seed, folder)
        rows.append(row)
        with open(given.out, "ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        print(describe_row(row), flush=True)
    wrong = [row for row in rows if row.outcome.verdict == "wrong"]
    text = "\n".join([*table(rows), f"Seed {given.seed}, commit {commit}."])
    given.out.with_suffix(".md").write_text(f"{text}\n")
    print(text)
    for row in wrong:
        print(describe_row(row))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
