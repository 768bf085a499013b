"""Seconds a step where the network is good: one and two workers of this machine, beside the peers'
own scripts.

    pip install deepspeed                       # for the contestant `deepspeed/zero2`; without it
    that one is left out python benchmarks/local.py [--repeat 3] [--steps 20] [--workers 1,2]
    [--precision fp32,bf16]

A worker has one thread on a core of its own. Contestants are stock PyTorch and DeepSpeed
(wan_contestants.py) and what `farspan select` picks for a run of RUN_STEPS steps (its trials are
made beforehand), all with the same model, rows, clipping, fused AdamW and environment, in fresh
processes, one contestant after another and all again, with another one first. Every cell is
appended to results/local.jsonl with its raw steps; what is there is not run again. The table is
printed and written beside it.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import _wan_cells as cells
import _wan_plans as plans
import msgspec
from _wan_plans import Work
from _wan_records import append
from wan import results, said_of_here, why

from farspan import techniques
from farspan.app.clusters import first_device
from farspan.app.resolving import PROBE_S
from farspan.domain.cluster import Cluster
from farspan.domain.plan import Plan
from farspan.domain.trial import Trial
from farspan.launch.probe_client import Probe
from farspan.launch.trial import run_trial, steps_for, trial_limits
from farspan.planning import model_speed
from farspan.planning.select_by_trials import SelectionTask, select_by_trials
from farspan.runtime.device import detect_devices

RESULTS = Path(__file__).parent / "results" / "local.jsonl"
PEERS = {
    "torch/ddp": ["ddp", "--bucket-mb=25"],
    "torch/fsdp2": ["fsdp2"],
    "torch/fsdp2-kept": ["fsdp2", "--kept"],
    "deepspeed/zero2": ["zero2"],
}
OURS = "farspan"
#: Steps of the run that a plan is chosen for, and techniques whose steps compute the same as the
#: peers'.
RUN_STEPS = 3000
EXACT = tuple(name for name in techniques.technique_names() if name != "diloco")


class Cell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One contestant, once. Without `step_s` it failed."""

    contestant: str
    workers: int
    precision: str
    repeat: int
    at: str
    commit: str
    versions: dict[str, str]
    cpu: str
    step_s: tuple[float, ...] = ()
    #: What ran, of farspan.
    plan: dict[str, Any] | None = None
    failed: str | None = None


def here(workers: int) -> Cluster:
    """So many workers on this machine, one thread each, each on cores of its own."""
    found = detect_devices("cpu", workers)
    (site,) = found.sites
    (host,) = site.hosts
    devices = tuple(one.but(threads=1) for one in host.devices)
    host = msgspec.structs.replace(host, devices=devices)
    return msgspec.structs.replace(found, sites=(msgspec.structs.replace(site, hosts=(host,)),))


def paced(cluster: Cluster, work: Work) -> Cluster:
    """Return the cluster at the pace of the model's own steps, tried on its first device as
    `farspan select` does."""
    task = plans.question(work, cluster, RUN_STEPS)
    with Probe(cluster.hosts[0], threads=1, device=0) as probe:
        found = probe.measure_step(
            first_device(cluster),
            task.model,
            task.train,
            precisions=(work.precision,),
            seconds=PROBE_S,
        )
    return model_speed.calibrate_cluster(cluster, task.model, task.train, task.engine, found)


@functools.cache
def picked(work: Work, workers: int) -> Plan:
    """Return what is chosen of techniques that compute what the peers compute, with all workers."""
    cluster = paced(here(workers), work)
    task = plans.question(work, cluster, RUN_STEPS)
    asked = SelectionTask(
        model=task.model,
        train=task.train,
        engine=task.engine,
        allow=EXACT,
        corpus=task.corpus,
        parts=False,
    )
    with tempfile.TemporaryDirectory(prefix="farspan-local-") as folder:
        cells.write_corpus(Path(folder), work)

        def measure(plan: Plan, step_s: float) -> Trial:
            return run_trial(
                plan,
                Path(folder),
                cluster,
                "local",
                trial_limits(plan, cluster, step_s, steps_for(step_s)),
            )

        ranking = select_by_trials(cluster, asked, measure).ranking
    assert ranking.chosen is not None
    return ranking.candidates[ranking.chosen].plan


def measured(given: argparse.Namespace, name: str, workers: int, work: Work) -> dict[str, Any]:
    cluster = here(workers)
    try:
        if name == OURS:
            plan = picked(work, workers)
            train = msgspec.structs.replace(plan.train, steps=given.warmup + given.steps)
            plan = msgspec.structs.replace(plan, train=train)
            found = cells.ours(plan, work, cluster, given.warmup, given.deadline)
            return {"step_s": found.step_s, "plan": msgspec.to_builtins(plan)}
        found = cells.stock(PEERS[name], work, cluster, given.warmup, given.steps, given.deadline)
        return {"step_s": found.step_s}
    except Exception as error:  # Whatever a contestant dies of, the table goes on.
        return {"failed": why(error)}


def run(given: argparse.Namespace, file: IO[bytes], known: list[Cell]) -> None:
    names = [
        name for name in PEERS if name != "deepspeed/zero2" or importlib.util.find_spec("deepspeed")
    ]
    about = said_of_here()
    done = {(c.contestant, c.workers, c.precision, c.repeat) for c in known}
    for repeat in range(given.repeat):
        for precision in given.precision:
            work = Work(model="small", sequences=8, tied=True, seed=0, precision=precision)
            for workers in given.workers:
                # Whoever comes first finds a machine that has rested: each in its turn.
                first = repeat % (len(names) + 1)
                for name in [*names, OURS][first:] + [*names, OURS][:first]:
                    if (name, workers, precision, repeat) in done:
                        continue
                    cell = Cell(
                        contestant=name,
                        workers=workers,
                        precision=precision,
                        repeat=repeat,
                        at=time.strftime("%Y-%m-%dT%H:%M:%S"),
                        **about,
                        **measured(given, name, workers, work),
                    )
                    append(file, cell)
                    known.append(cell)
                    took = (
                        f"{statistics.median(cell.step_s):.3f} s"
                        if cell.step_s
                        else f"failed: {cell.failed}"
                    )
                    print(
                        f"{repeat + 1}, {workers} workers, {precision}, {name}: {took}", flush=True
                    )


def table(known: list[Cell]) -> str:
    """Medians over the repeats' medians, their spread, and the median of the repeats' ratios of
    each to farspan."""
    lines = [
        "| workers | precision | contestant | s a step | spread | its time / farspan's |",
        "|---|---|---|---|---|---|",
    ]
    by = {
        (c.workers, c.precision, c.contestant, c.repeat): statistics.median(c.step_s)
        for c in known
        if c.step_s
    }
    for workers, precision, name in dict.fromkeys(key[:3] for key in sorted(by)):
        times = {key[3]: took for key, took in by.items() if key[:3] == (workers, precision, name)}
        ours = {
            repeat: by[w, p, n, repeat]
            for w, p, n, repeat in by
            if (w, p, n) == (workers, precision, OURS)
        }
        ratios = [times[repeat] / ours[repeat] for repeat in times.keys() & ours.keys()]
        middle = statistics.median(times.values())
        ratio = f"{statistics.median(ratios):.2f}" if ratios else ""
        spread = (
            f"{(max(times.values()) - min(times.values())) / middle:.0%}" if len(times) > 1 else ""
        )
        lines.append(f"| {workers} | {precision} | {name} | {middle:.3f} | {spread} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument(
        "--workers", type=lambda text: [int(one) for one in text.split(",")], default=[1, 2]
    )
    parser.add_argument("--precision", type=lambda text: text.split(","), default=["fp32", "bf16"])
    parser.add_argument("--deadline", type=float, default=300)
    parser.add_argument("--quick", action="store_true", help="into a temporary file")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if max(given.workers) > len(os.sched_getaffinity(0)):
        sys.exit("a worker needs a core of its own")
    with results(given, RESULTS) as (out, file):
        known = [msgspec.json.decode(line, type=Cell) for line in out.read_bytes().splitlines()]
        run(given, file, known)
        text = table(known)
        print(text)
        out.with_suffix(".md").write_text(f"# Seconds a step on one machine\n\n{text}\n")


if __name__ == "__main__":
    main()
