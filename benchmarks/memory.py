"""Peak memory of a worker above an empty one's, predicted and measured, with a gigabyte of states
and more.

    python benchmarks/memory.py [--only data,fsdp] [--lora RANK]

Two workers of this machine run, for three steps, what each technique plans for a model of 91 M
parameters (1.5 GB of fp32 weights, gradients and AdamW states). What a process holds before any
tensor is what the same worker holds with a model of next to no parameters; predicted is the
estimate without its `framework`. Written to results/memory.json; with adapters of a rank by data
parallelism to results/memory-lora.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import _wan_cells as cells
import _wan_plans as plans
from _wan_plans import SIZES, Size, Work
from local import here
from msgspec.structs import replace
from wan import said_of_here, why

from farspan import techniques
from farspan.domain.model import Lora
from farspan.domain.plan import Plan
from farspan.domain.run_events import Step, read_events
from farspan.launch.launchers import launch_workers
from farspan.planning.rank_plans import rank_plans

RESULTS = Path(__file__).parent / "results" / "memory.json"
STEPS = 3
DEADLINE_S = 300
EMPTY = "empty"


def peaks(plan: Plan, work: Work) -> list[int]:
    """Peak bytes of every worker of a run."""
    cluster = here(len(plan.devices))
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus")
        cells.write_corpus(corpus, work)
        with (
            cells.run_folder(plan, corpus, cluster) as run,
            launch_workers("local", plan, run, cluster) as workers,
            cells.Deadline(workers, DEADLINE_S),
        ):
            for _ in workers:
                pass
            logs = [
                run.events,
                *(run.logs / f"rank-{rank}.events.jsonl" for rank in range(1, len(plan.devices))),
            ]
            return [
                max(e.memory_bytes for e in read_events(log) if isinstance(e, Step)) for log in logs
            ]


def planned(name: str, work: Work, rank: int = 0) -> tuple[Plan, list[float]]:
    """Return a technique's own plan on two workers, of adapters of a `rank` where it is not 0, and
    its bytes by worker without what an empty one holds."""
    task = plans.question(work, here(2), STEPS)
    model = replace(task.model, lora=Lora(rank=rank)) if rank else task.model
    found = rank_plans(
        model, task.cluster, task.train, task.engine, allow=[name], corpus=task.corpus
    )
    best = next((one for one in found.candidates if len(one.places) == 2), None)
    if best is None:
        raise cells.Failed(
            f"no plan: {', '.join(str(refused.problem) for refused in found.refused)}"
        )
    return best.plan, [one.total - one.framework - one.snapshot for one in best.estimate.memory]


def measured(name: str, work: Work, empty: int, rank: int) -> dict[str, Any]:
    try:
        plan, predicted = planned(name, work, rank)
        above = [peak - empty for peak in peaks(plan, work)]
    except Exception as error:  # One that cannot run must not end the others.
        return {"technique": name, "failed": why(error)}
    ratios = [one / there for one, there in zip(predicted, above, strict=True)]
    print(f"{name}: predicted / measured {', '.join(f'{one:.2f}' for one in ratios)}", flush=True)
    return {"technique": name, "predicted": predicted, "measured": above, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=list(techniques.technique_names())
    )
    parser.add_argument(
        "--lora", type=int, default=0, help="adapters of this rank, by data parallelism"
    )
    given = parser.parse_args()
    SIZES[EMPTY] = Size(layers=2, width=64, vocab=512, context=256, tokens=512)
    nothing = Work(model=EMPTY, sequences=8, tied=True, seed=0)
    empty = min(peaks(planned("data", nothing)[0], nothing))
    print(f"an empty worker: {empty / 1e6:.0f} MB", flush=True)
    work = Work(model="paper-wide", sequences=8, tied=True, seed=0)
    only = ["data"] if given.lora else given.only
    rows = [measured(name, work, empty, given.lora) for name in only]
    off = [abs(ratio - 1) for row in rows for ratio in row.get("ratios", [])]
    print(f"{len(off)} workers: median error {statistics.median(off):.1%}, worst {max(off):.1%}")
    found = {"date": time.strftime("%Y-%m-%d"), **said_of_here(), "empty": empty, "rows": rows}
    results = RESULTS.with_name("memory-lora.json") if given.lora else RESULTS
    if given.lora:
        found["lora"] = given.lora
    results.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
