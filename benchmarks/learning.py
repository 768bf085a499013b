"""What the knobs of a recipe learn from the same text: validation loss at equal tokens, and what a step of each takes.

    python -m benchmarks.learning [--only NAME ...] [--seeds 0] [--steps 420] [--work FOLDER]

Each run is a real `farspan train` of 2.9 M parameters, or as many as its name says (context 256, 2,048 tokens a step),
one to a core and as many at a time as there are cores, over two texts: the built-in corpus, and the source of Python's
standard library. Settings with "-few" read 120 k tokens of it again and again. What is finished is kept: a row of
benchmarks/results/learning.jsonl each, with the whole curve. Ends with a table of all rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import threading
from datetime import date
from pathlib import Path
from queue import Empty, SimpleQueue

from msgspec import to_builtins

from farspan.domain.codec import load
from farspan.domain.corpus import CorpusManifest
from farspan.domain.model import parameters
from farspan.domain.results import Finished, Started, Step, Validated, read_events
from farspan.domain.run import RunFolder, RunRecord

RESULTS = Path(__file__).parent / "results" / "learning.jsonl"
SHARED = ("tokenizer.vocab=8192", "checkpoint.every=10m", "checkpoint.keep=1")
#: What a knob is tried on, one at a time.
BASE = ("size=tiny", "train.batch.global=8 sequences", "train.recipe=plain", "train.floor=0.0")
MUON = (*BASE, "train.optimizer.kind=muon", "train.optimizer.lr=6e-3")
#: The keys of each setting beside SHARED.
SETTINGS: dict[str, tuple[str, ...]] = {
    # What `farspan train` does by itself, and what it did before there was a recipe; and the recipe at other sizes.
    "recipe": ("size=tiny",),
    "before": ("size=tiny", "train.recipe=plain"),
    "recipe-few": ("size=tiny",),
    "before-few": ("size=tiny", "train.recipe=plain"),
    "recipe-6m": ("size=6m",),
    "recipe-15m": ("size=15m",),
    "before-15m": ("size=15m", "train.recipe=plain"),
    # Knobs.
    **{f"adamw-{lr}": (*BASE, f"train.optimizer.lr={lr}") for lr in ("3e-3", "6e-3", "1.2e-2")},
    **{f"muon-{lr}": (*MUON, f"train.optimizer.lr={lr}") for lr in ("3e-3", "6e-3", "1.2e-2", "2.4e-2")},
    "muon-floor": (*MUON, "train.floor=0.1"),
    "muon-wsd": (*MUON, "train.schedule=wsd"),
    "muon-average": (*MUON, "train.optimizer.average=0.98"),
    "muon-halfbatch": (*MUON, "train.batch.global=4 sequences"),
    "muon-few": MUON,
    **{f"muon-few-decay-{wd}": (*MUON, f"train.optimizer.weight_decay={wd}") for wd in (0.5, 1.5)},
    **{f"muon-few-dropout-{p}": (*MUON, f"train.dropout={p}") for p in (0.1, 0.2, 0.3)},
    "muon-few-mask": (*MUON, "train.mask=0.1"),
    "muon-few-reshuffle": (*MUON, "train.reshuffle=true"),
    "muon-few-average": (*MUON, "train.optimizer.average=0.98"),
}
#: Bytes of text that hold about 120 k tokens.
FEW_BYTES = 450_000
#: Modules of the standard library that are tests, or tables rather than source.
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "ensurepip", "turtledemo"}


def source_text(folder: Path) -> Path:
    """Python's standard library as text files, one a module."""
    if not folder.exists():
        folder.mkdir(parents=True)
        root = Path(sysconfig.get_paths()["stdlib"])
        for path in sorted(root.rglob("*.py")):
            inside = path.relative_to(root)
            if not LEFT_OUT & {*inside.parts} and path.stat().st_size > 500:
                (folder / ("_".join(inside.with_suffix("").parts) + ".txt")).write_text(
                    path.read_text(errors="replace")
                )
    return folder


def few(source: Path, folder: Path) -> Path:
    """Every so many-th file of a folder, of FEW_BYTES in all."""
    if not folder.exists():
        folder.mkdir(parents=True)
        files = sorted(source.iterdir())
        apart = max(1, sum(file.stat().st_size for file in files) // FEW_BYTES)
        for file in files[::apart]:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def train(core: int, run: Path, text: str, keys: tuple[str, ...]) -> None:
    """One run on one core, from wherever it stands."""
    config = run.with_suffix(".yaml")
    # Of little text a twentieth says little.
    config.write_text(f"data: {{source: {text}, val: {'25%' if text.endswith('few') else '5%'}}}\n")
    command = ["resume", str(run)] if run.exists() else ["train", str(config), "--run", str(run)]
    if not run.exists():
        command += [part for key in (*SHARED, *keys) for part in ("--set", key)]
    with open(run.with_suffix(".log"), "ab") as log:
        subprocess.run(
            [sys.executable, "-m", "farspan", *command], stdout=log, stderr=log, check=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )  # fmt: skip


def row(name: str, text: str, seed: int, run: Path) -> dict[str, object]:
    events = list(read_events(RunFolder(run).events))
    started = next(event for event in events if isinstance(event, Started))
    steps = [event for event in events if isinstance(event, Step)]
    validated, plan = [event for event in events if isinstance(event, Validated)], RunFolder(run).load_plan()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    record, corpus = load(RunFolder(run).record, RunRecord), load(RunFolder(run).corpus, CorpusManifest)
    return {
        "name": name, "text": text, "seed": seed, "steps": plan.train.steps, "step_tokens": plan.train.tokens_per_step,
        "final_loss": validated[-1].loss, "best_loss": min(event.loss for event in validated),
        "median_step_s": statistics.median(event.step_s for event in steps),
        "validated": [[event.step, event.loss, event.bigram_nats] for event in validated],
        "tokens": plan.train.steps * plan.train.tokens_per_step, "schedule": to_builtins(plan.train.schedule),
        "trained": [[event.step, round(event.loss, 4)] for event in steps[9::10]],
        "parameters": parameters(plan.model), "unique_tokens": corpus.train.tokens,
        "optimizer": to_builtins(plan.train.optimizer), "forecast": to_builtins(record.forecast),
        "plan": plan.hash, "commit": commit, "date": date.today().isoformat(),
        "environment": {key: getattr(started.environment, key) for key in started.environment.__struct_fields__},
    }  # fmt: skip


def ended(run: Path) -> bool:
    events = RunFolder(run).events
    return events.exists() and any(isinstance(e, Finished) and e.reason == "done" for e in read_events(events))


def table(rows: list[dict[str, object]]) -> None:
    """Every setting's losses by text, and its step; the lowest loss first."""
    for text in sorted({str(one["text"]) for one in rows}):
        print(f"\n{text}\n  {'setting':28} {'final':>7} {'best':>7} {'step, s':>8}")
        for one in sorted((one for one in rows if one["text"] == text), key=lambda one: float(str(one["best_loss"]))):
            name = f"{one['name']}, seed {one['seed']}, {one['steps']} steps"
            print(f"  {name:28} {one['final_loss']:7.3f} {one['best_loss']:7.3f} {one['median_step_s']:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--texts", nargs="+", default=["pydocs", "source"], choices=["pydocs", "source"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=420)
    parser.add_argument("--work", type=Path, default=Path("runs/learning"))
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {(one["name"], one["text"], one["seed"], one["steps"]) for one in known}
    source = source_text(given.work / "source")
    places = {"pydocs": "pydocs", "source": str(source)}
    left: SimpleQueue[tuple[str, str, int]] = SimpleQueue()
    for seed in given.seeds:
        for name in given.only:
            for text in given.texts:
                if (name, text, seed, given.steps) not in done and not ("-few" in name and text == "pydocs"):
                    left.put((name, text, seed))
    lock = threading.Lock()

    def work(core: int) -> None:
        while True:
            try:
                name, text, seed = left.get_nowait()
            except Empty:
                return
            run = given.work / f"{name}-{text}-{seed}-{given.steps}"
            where = str(few(source, given.work / "few")) if "-few" in name else places[text]
            if not ended(run):
                train(core, run, where, (*SETTINGS[name], f"train.seed={seed}", f"train.steps={given.steps}"))
            with lock, open(RESULTS, "a") as results:
                known.append(row(name, text, seed, run))
                results.write(json.dumps(known[-1]) + "\n")
                print(f"{name} on {text}, seed {seed}: {known[-1]['final_loss']:.3f}", flush=True)

    threads = [threading.Thread(target=work, args=(core,)) for core in sorted(os.sched_getaffinity(0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    table(known)


if __name__ == "__main__":
    main()
