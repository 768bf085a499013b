"""What the knobs of a recipe learn from the same text: validation loss at equal tokens, and what a
step of each takes.

    python -m benchmarks.learning [--only NAME ...] [--seeds 0] [--steps 420] [--work FOLDER]

Each run is a real `farspan train` of 2.9 M parameters, or as many as its name says (context 256,
2,048 tokens a step), one to a core and as many at a time as there are cores. Texts are the built-in
corpus, and TEXTS. Settings with "-few" read 120 k tokens of them again and again. What is finished
is kept: a row of benchmarks/results/learning.jsonl each, with the whole curve. Ends with a table of
all rows.
"""

from __future__ import annotations

import argparse
import gzip
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

from farspan.domain.corpus import CorpusManifest
from farspan.domain.model import count_parameters
from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.run_events import Finished, Started, Step, Validated, read_events
from farspan.domain.struct_files import load

RESULTS = Path(__file__).parent / "results" / "learning.jsonl"
SHARED = ("tokenizer.vocab=8192", "checkpoint.every=10m", "checkpoint.keep=1")
#: What a knob is tried on, one at a time.
BASE = ("size=tiny", "train.batch.global=8 sequences", "train.recipe=plain", "train.floor=0.0")
MUON = (*BASE, "train.optimizer.kind=muon", "train.optimizer.lr=6e-3")
#: The keys of each setting beside SHARED.
SETTINGS: dict[str, tuple[str, ...]] = {
    # What `farspan train` does by itself, and what it did before there was a recipe; and the recipe
    # at other sizes.
    "recipe": ("size=tiny",),
    "before": ("size=tiny", "train.recipe=plain"),
    "recipe-few": ("size=tiny",),
    "before-few": ("size=tiny", "train.recipe=plain"),
    "recipe-6m": ("size=6m",),
    "recipe-15m": ("size=15m",),
    "before-15m": ("size=15m", "train.recipe=plain"),
    **{
        f"adamw-15m-{lr}": (*BASE[1:], "size=15m", f"train.optimizer.lr={lr}")
        for lr in ("1.5e-3", "3e-3")
    },
    # Knobs.
    **{f"adamw-{lr}": (*BASE, f"train.optimizer.lr={lr}") for lr in ("3e-3", "6e-3", "1.2e-2")},
    **{
        f"muon-{lr}": (*MUON, f"train.optimizer.lr={lr}")
        for lr in ("3e-3", "6e-3", "1.2e-2", "2.4e-2")
    },
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
#: Bytes of text that hold about 120 k tokens, and that are read of any text at most.
FEW_BYTES = 450_000
MOST_BYTES = 12_000_000
#: Texts that a machine may have, as patterns of files below a folder.
TEXTS = {
    "source": (sysconfig.get_paths()["stdlib"], "**/*.py"),
    "perl": ("/usr/share/perl", "5*/**/*.pm"),
    "headers": ("/usr/include", "**/*.h"),
    "vim": ("/usr/share/vim", "vim*/doc/*.txt"),  # Debian's vim-runtime.
    "cmake": ("/usr/share", "cmake-*/Help/**/*.rst"),
    "node": ("/usr/share/doc/nodejs/api", "*.md"),
    "git": ("/usr/share/doc/git-doc", "**/*.txt"),
    "pod": ("/usr/share/perl", "5*/**/*.pod"),  # perl-doc's.
    "rust": ("/root/.rustup/toolchains", "*/share/doc/rust/html/book/*.html"),
    "java": (
        "/usr/lib/jvm",
        "temurin-25*/src/java.base/**/*.java",
    ),  # lib/src.zip, unpacked to src.
    "javascript": ("/usr/lib/node_modules", "npm/**/*.js"),
    "manual": (
        "/usr/share/doc/python3.11",
        "html/_sources/**/*.rst.txt",
    ),  # Debian's python3.11-doc.
    "modules": ("/usr/share", "cmake-*/Modules/**/*.cmake"),
    "cloud": ("/usr/lib/google-cloud-sdk/lib/googlecloudsdk", "**/*.py"),
    "man": ("/usr/share/man", "man[18]/*.gz"),
    "tcl": ("/usr/share/man", "man3/*.3tcl*"),
}
#: Modules of the standard library that are tests, or tables rather than source.
LEFT_OUT = {
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "encodings",
    "ensurepip",
    "turtledemo",
}


def text_of(name: str, folder: Path) -> Path:
    """One of TEXTS as a folder of text files, every so many-th of its own where they are more than
    MOST_BYTES."""
    if not folder.exists():
        root = Path(TEXTS[name][0])
        pattern = TEXTS[name][1]
        found = [
            path
            for path in sorted(root.glob(pattern))
            if path.is_file() and path.stat().st_size > 500
        ]
        files = [path for path in found if not LEFT_OUT & {*path.relative_to(root).parts}]
        if not files:
            sys.exit(f"no text of {name} here: {root}/{pattern}")
        folder.mkdir(parents=True)
        apart = -(-sum(path.stat().st_size for path in files) // MOST_BYTES)
        for path in files[::apart]:
            inside = path.relative_to(root)
            kind = ".html" if path.suffix == ".html" else ".txt"
            text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            (folder / ("_".join(inside.with_suffix("").parts) + kind)).write_text(
                text.decode(errors="replace")
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
            [sys.executable, "-m", "farspan", *command],
            stdout=log,
            stderr=log,
            check=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )


def row(name: str, text: str, seed: int, run: Path) -> dict[str, object]:
    events = list(read_events(RunFolder(run).events))
    started = next(event for event in events if isinstance(event, Started))
    steps = [event for event in events if isinstance(event, Step)]
    validated = [event for event in events if isinstance(event, Validated)]
    plan = RunFolder(run).load_plan()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    record = load(RunFolder(run).record, RunRecord)
    corpus = load(RunFolder(run).corpus, CorpusManifest)
    return {
        "name": name,
        "text": text,
        "seed": seed,
        "steps": plan.train.steps,
        "step_tokens": plan.train.tokens_per_step,
        "final_loss": validated[-1].loss,
        "best_loss": min(event.loss for event in validated),
        "median_step_s": statistics.median(event.step_s for event in steps),
        "validated": [
            [event.step, event.loss, event.bigram_nats, event.standard_error] for event in validated
        ],
        "tokens": plan.train.steps * plan.train.tokens_per_step,
        "schedule": to_builtins(plan.train.schedule),
        "trained": [[event.step, round(event.loss, 4)] for event in steps[9::10]],
        "parameters": count_parameters(plan.model),
        "unique_tokens": corpus.train.tokens,
        "optimizer": to_builtins(plan.train.optimizer),
        "forecast": to_builtins(record.forecast),
        "plan": plan.hash,
        "commit": commit,
        "date": date.today().isoformat(),
        "environment": {
            key: getattr(started.environment, key) for key in started.environment.__struct_fields__
        },
    }


def ended(run: Path) -> bool:
    events = RunFolder(run).events
    return events.exists() and any(
        isinstance(e, Finished) and e.reason == "done" for e in read_events(events)
    )


def table(rows: list[dict[str, object]]) -> None:
    """Every setting's losses by text, and its step; the lowest loss first."""
    for text in sorted({str(one["text"]) for one in rows}):
        print(f"\n{text}\n  {'setting':28} {'final':>7} {'best':>7} {'step, s':>8}")
        for one in sorted(
            (one for one in rows if one["text"] == text),
            key=lambda one: float(str(one["best_loss"])),
        ):
            name = f"{one['name']}, seed {one['seed']}, {one['steps']} steps"
            print(
                f"  {name:28} {one['final_loss']:7.3f} {one['best_loss']:7.3f} "
                f"{one['median_step_s']:8.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument(
        "--texts", nargs="+", default=["pydocs", "source"], choices=["pydocs", *TEXTS]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=420)
    parser.add_argument("--work", type=Path, default=Path("runs/learning"))
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    known = (
        [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    )
    done = {(one["name"], one["text"], one["seed"], one["steps"]) for one in known}
    places = {
        name: str(text_of(name, given.work / name)) for name in given.texts if name != "pydocs"
    }
    left: SimpleQueue[tuple[str, str, int]] = SimpleQueue()
    for seed in given.seeds:
        for name in given.only:
            for text in given.texts:
                if (name, text, seed, given.steps) not in done and not (
                    "-few" in name and text == "pydocs"
                ):
                    left.put((name, text, seed))
    lock = threading.Lock()

    def work(core: int) -> None:
        while True:
            try:
                name, text, seed = left.get_nowait()
            except Empty:
                return
            run = given.work / f"{name}-{text}-{seed}-{given.steps}"
            where = places.get(text, text)
            if "-few" in name:
                where = str(few(Path(where), given.work / f"{text}-few"))
            if not ended(run):
                train(
                    core,
                    run,
                    where,
                    (*SETTINGS[name], f"train.seed={seed}", f"train.steps={given.steps}"),
                )
            with lock, open(RESULTS, "a") as results:
                known.append(row(name, text, seed, run))
                results.write(json.dumps(known[-1]) + "\n")
                print(f"{name} on {text}, seed {seed}: {known[-1]['final_loss']:.3f}", flush=True)

    threads = [
        threading.Thread(target=work, args=(core,)) for core in sorted(os.sched_getaffinity(0))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    table(known)


if __name__ == "__main__":
    main()
