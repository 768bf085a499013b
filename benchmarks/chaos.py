"""Runs that are disturbed: every technique on two and three sites, with kills, stops and cut links
at any moment.

    python benchmarks/chaos.py [--only NAME] [--steps 100]

Each technique is trained undisturbed once in each lab, and then with seeded faults: as many in each
run as its row says. Where links are cut for good the run has to go on by another plan; where a
worker is killed again and again at the same step it has to end within 30 s with that as its cause.
Results are appended to results/chaos.jsonl, a line a run; what is there is not run again. The table
is printed and written to results/chaos.md.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from farspan.app import training
from farspan.app.plans import best_plan
from farspan.app.resolving import resolve_run
from farspan.app.updates import ignore_update
from farspan.domain.config import (
    BatchConfig,
    CheckpointConfig,
    ModelConfig,
    OnFault,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from farspan.domain.model import count_parameters
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder, source_commit
from farspan.domain.struct_files import convert, parse_yaml
from farspan_lab import spec, state
from farspan_lab.chaos import Disturbed, disturb, links_of
from farspan_lab.faults import Injection, drawn, parse

RESULTS = Path(__file__).parent / "results" / "chaos.jsonl"
#: 57 ms is the round trip of the slice UTAH-MASS (arXiv 2602.02632, Table I).
LABS = {
    "two": (
        "sites: {utah: {devices: 2}, mass: {devices: 2}}\nlinks: [{between: [utah, mass], rtt: "
        "57ms}]\n"
    ),
    "three": "sites: {utah: {}, star: {}, mass: {}}\nlinks:\n- {between: [utah, star], rtt: 20ms}\n"
    "- {between: [star, mass], rtt: 40ms}\n- {between: [utah, mass], rtt: 57ms}\n",
}
#: An end that was declared beforehand comes within this.
END_S = 30.0


class Case(NamedTuple):
    """One disturbed run. `faults` is a number to draw with the seed, or the faults themselves."""

    name: str
    lab: str
    technique: str
    size: str
    faults: int | tuple[str, ...]
    seed: int
    #: Whether it has to end with its cause.
    ends: bool = False
    on_fault: OnFault = "recover"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    case: str
    commit: str | None
    parameters: int
    exact: bool
    ends: bool
    disturbed: Disturbed


def cases() -> Iterator[Case]:
    """60 faults in exact techniques, and beside them replicas, larger models, cuts for good and an
    end."""
    for lab in LABS:
        for number, technique in enumerate(("data", "zero2", "fsdp", "shard", "pipeshard")):
            # Where one site is quicker than two a cut link makes another plan: every other run has
            # to wait.
            patience: OnFault = ("wait", "recover")[(number + (lab == "three")) % 2]
            yield Case(f"{lab}/{technique}", lab, technique, "1m", 6, number, on_fault=patience)
        yield Case(f"{lab}/diloco", lab, "diloco", "1m", 3, 90, on_fault="wait")
        yield Case(f"{lab}/cut-for-good", lab, "data", "1m", ("cut:utah-mass@60",), 0)
    for run in range(2):
        yield Case(f"two/14m/{run}", "two", "data", "14m", 2, 70 + run, on_fault="wait")
    again = ("kill:1@40", "kill:1@recovery", "kill:1@recovery")
    yield Case("two/crash-loop", "two", "data", "1m", again, 0, ends=True)


def made(case: Case, lab: str, steps: int, folder: Path) -> RunFolder:
    """Return the run of a case that nothing disturbs, trained; it is there for further cases."""
    run = RunFolder(folder / f"{case.lab}-{case.technique}-{case.size}")
    if not run.plan.exists():
        config = RunConfig(
            data="pydocs",
            size=case.size,
            model=ModelConfig(context=128),
            train=TrainConfig(
                steps=steps, batch=BatchConfig(global_=12), precision="fp32", validate_every=steps
            ),
            parallel=ParallelConfig(cluster=f"lab:{lab}", technique=case.technique),
            checkpoint=CheckpointConfig(every="3s" if case.size == "1m" else "20s"),
        )
        training.make_run(
            run.path,
            config,
            best_plan(resolve_run(config, ignore_update, trial=False), config.parallel),
        )
        training.train_run(run)
    return run


def disturbed(case: Case, lab: str, steps: int, folder: Path) -> Row:
    calm = made(case, lab, steps, folder)
    path = folder / "chaos"
    shutil.rmtree(path, ignore_errors=True)
    plan = calm.load_plan()
    injections: Sequence[Injection]
    if isinstance(case.faults, int):
        injections = drawn(
            case.seed, case.faults, len(plan.devices), links_of(calm), plan.train.steps
        )
    else:
        injections = [parse(text) for text in case.faults]
    result = disturb(calm, path, injections, seed=case.seed, on_fault=case.on_fault)
    if result.problem is not None and result.problem.code == "interrupted":
        raise Refusal.of(result.problem)  # By who wants all of this to end.
    return Row(
        case=case.name,
        commit=source_commit(),
        parameters=count_parameters(plan.model),
        exact=plan.sync is None,
        ends=case.ends,
        disturbed=result,
    )


def wrong(row: Row) -> str | None:
    """Return what of a run is not as it has to be."""
    result = row.disturbed
    if row.ends:
        late = result.ended_s is None or result.ended_s > END_S
        return "it did not end in time" if result.problem is None or late else None
    if result.problem is not None or result.comparison is None:
        return f"it ended: {result.problem.what if result.problem else result.reason}"
    replanned = any(made.replanned for made in result.injected)
    if row.exact and not (
        result.comparison.equal or (replanned and result.comparison.worst <= 1e-5)
    ):
        return f"losses differ by {result.comparison.worst:.1e}"
    return None


def table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| run | faults | restarts | seen after, s | next step after, s | steps again | end | "
        "wrong |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        result = row.disturbed
        seen = [made for made in result.injected if made.seen_s is not None]
        comparison = result.comparison
        end = (
            f"ended after {result.ended_s:.0f} s"
            if comparison is None
            else "equal, bit by bit"
            if comparison.equal
            else f"within {comparison.worst:.1e}"
        )
        lines.append(
            f"| {row.case} | {', '.join(made.fault for made in result.injected)} | {len(seen)} | "
            f"{', '.join(f'{made.seen_s:.1f}' for made in seen)} | "
            f"{', '.join('' if made.back_s is None else f'{made.back_s:.1f}' for made in seen)} | "
            f"{sum(made.lost for made in seen)} | {end} | {wrong(row) or ''} |"
        )
    return [*lines, "", *summary(rows)]


def summary(rows: Sequence[Row]) -> list[str]:
    made = [fault for row in rows for fault in row.disturbed.injected]
    back = sorted(fault.back_s for fault in made if fault.back_s is not None)
    seen = sorted(fault.seen_s for fault in made if fault.seen_s is not None)
    bad = [row.case for row in rows if wrong(row)]
    if not back:
        return []
    deciles = [back[min(len(back) - 1, int(share * len(back)))] for share in (0.1, 0.5, 0.9)]
    return [
        f"{len(made)} faults in {len(rows)} runs, {len(seen)} of which led to a restart. Seen "
        "after "
        f"{statistics.median(seen):.1f} s in the median and {seen[-1]:.1f} s at most; the next "
        "training step after "
        f"{deciles[0]:.1f}, {deciles[1]:.1f} and {deciles[2]:.1f} s (10 %, 50 %, 90 %), "
        f"{back[-1]:.1f} s at most.",
        f"Runs that were not as they have to be: {', '.join(bad) or 'none'}. "
        f"Commits {', '.join(dict.fromkeys(str(row.commit) for row in rows))}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    rows = (
        [msgspec.json.decode(line, type=Row) for line in RESULTS.read_bytes().splitlines()]
        if RESULTS.exists()
        else []
    )
    with tempfile.TemporaryDirectory() as folder:
        for lab, text in LABS.items():
            name = f"chaos-{lab}"
            wanted = [
                case for case in cases() if case.lab == lab and case.name.startswith(given.only)
            ]
            wanted = [case for case in wanted if case.name not in {row.case for row in rows}]
            if not wanted:
                continue
            content = f"name: {name}\n{text}"
            state.up(
                spec.read(convert(parse_yaml(content, name), spec.LabFile, name, content), name)
            )
            try:
                for case in wanted:
                    rows.append(disturbed(case, name, given.steps, Path(folder)))
                    with open(RESULTS, "ab") as file:
                        file.write(msgspec.json.encode(rows[-1]) + b"\n")
                    print("\n".join(table(rows[-1:])[2:3]), flush=True)
            finally:
                state.down(name)
    lines = table(rows)
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    sys.exit(any(wrong(row) for row in rows))


if __name__ == "__main__":
    main()
