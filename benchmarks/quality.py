"""Does bf16 training reach the loss of fp32? Validation loss at equal tokens, three seeds, decay
finished.

    python benchmarks/quality.py [--tokens 3000000] [--seeds 0 1 2] [--work FOLDER]

Each run is a real `farspan train` of a GPT-2-like model (6 layers x 384, context 256, batch 8) on
the built-in corpus, one run to a core, as many at a time as there are cores. Runs that are finished
are kept; one that was stopped is resumed. Writes benchmarks/results/quality.json with the
validation events of every run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from queue import Empty, SimpleQueue

from farspan.domain.run import RunFolder
from farspan.domain.run_events import Finished, Started, Validated, read_events

RESULTS = Path(__file__).parent / "results"
#: The bound of the comparison, in nats a token.
BOUND = 0.01
SETTINGS = (
    "model.family=gpt2",
    "model.layers=6",
    "model.d_model=384",
    "model.heads=6",
    "model.d_ff=1536",
    "model.context=256",
    "tokenizer.vocab=8192",
    "train.batch.global=8 sequences",
    "train.optimizer.lr=1e-3",
    "train.validate_every=200",
    "checkpoint.every=2m",
    "checkpoint.keep=1",
)


def train(core: int, folder: Path, precision: str, seed: int, steps: int) -> None:
    """One run on one core, from wherever it stands."""
    run = folder / f"{precision}-{seed}"
    config = folder / "run.yaml"
    if run.exists():
        command = ["resume", str(run)]
    else:
        keys = [
            *SETTINGS,
            f"train.precision={precision}",
            f"train.seed={seed}",
            f"train.steps={steps}",
        ]
        command = ["train", str(config), "--run", str(run)]
        command += [part for key in keys for part in ("--set", key)]
    with open(folder / f"{precision}-{seed}.log", "ab") as log:
        subprocess.run(
            [sys.executable, "-m", "farspan", *command],
            stdout=log,
            stderr=log,
            check=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )


def ended(run: Path) -> bool:
    events = RunFolder(run).events
    return events.exists() and any(
        isinstance(e, Finished) and e.reason == "done" for e in read_events(events)
    )


def row(run: Path) -> dict[str, object]:
    events = list(read_events(RunFolder(run).events))
    started = next(event for event in events if isinstance(event, Started))
    validated = [event for event in events if isinstance(event, Validated)]
    plan = RunFolder(run).load_plan()
    return {
        "precision": plan.train.precision,
        "seed": plan.train.seed,
        "tokens": plan.train.steps * plan.train.tokens_per_step,
        "final_loss": validated[-1].loss,
        "losses": [[event.step, event.loss] for event in validated],
        "plan": plan.hash,
        "environment": {
            key: getattr(started.environment, key) for key in started.environment.__struct_fields__
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=3_000_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path("runs/quality"))
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    (given.work / "run.yaml").write_text("data: pydocs\n")
    steps = -(-given.tokens // 2048)
    todo: SimpleQueue[tuple[str, int]] = SimpleQueue()
    for precision, seed in (
        (p, s) for p in ("fp32", "bf16") for s in given.seeds
    ):  # The longest first.
        if not ended(given.work / f"{precision}-{seed}"):
            todo.put((precision, seed))

    def work(core: int) -> None:
        while True:
            try:
                precision, seed = todo.get_nowait()
            except Empty:
                return
            train(core, given.work, precision, seed, steps)

    threads = [
        threading.Thread(target=work, args=(core,)) for core in sorted(os.sched_getaffinity(0))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = [row(given.work / f"{p}-{seed}") for seed in given.seeds for p in ("fp32", "bf16")]
    show(rows)
    (RESULTS / "quality.json").write_text(
        json.dumps({"bound_nats": BOUND, "rows": rows}, indent=1) + "\n"
    )


def show(rows: list[dict[str, object]]) -> None:
    losses = {(r["precision"], r["seed"]): float(str(r["final_loss"])) for r in rows}
    seeds = sorted({seed for _, seed in losses}, key=str)
    print(
        f"{'seed':>5} {'fp32':>9} {'bf16':>9} {'bf16 - fp32':>12}   validation loss, nats a token"
    )
    for seed in seeds:
        fp32 = losses["fp32", seed]
        bf16 = losses["bf16", seed]
        print(f"{seed!s:>5} {fp32:9.4f} {bf16:9.4f} {bf16 - fp32:+12.4f}")
    mean = statistics.fmean(losses["bf16", seed] - losses["fp32", seed] for seed in seeds)
    print(
        f"{'mean':>5} {'':19} {mean:+12.4f}   bound {BOUND}: "
        f"{'kept' if abs(mean) <= BOUND else 'MISSED'}"
    )


if __name__ == "__main__":
    main()
