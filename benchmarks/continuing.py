"""A model continued on another text, against one from scratch in the same time.

    python -m benchmarks.continuing TEXT OTHER [--pretrain 3m] [--time 1m] [--seeds 3]
    python -m benchmarks.continuing TEXT --model FOLDER [--time 1m] [--seeds 3]

A small model is pretrained on TEXT. It is then continued on OTHER at the defaults, and another is
trained on OTHER from scratch, each for the same time budget, once a seed; then the same with the
texts exchanged. With `--model` the model in FOLDER is continued on TEXT. Losses are bits a byte of
the validation split, as the tokenizers differ. A row a run is appended to results/continuing.jsonl.
The exit code is 1 where a continued model is worse than it was, or than the one from scratch in the
mean.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from benchmarks.chaos import read_versions
from farspan.domain.run import source_commit
from farspan.report.history import open_run

RESULTS = Path(__file__).parent / "results" / "continuing.jsonl"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    #: The text of pretraining, or the name of a model that was at hand.
    first: str
    second: str
    seed: int
    #: How long the model was pretrained; none where it was at hand.
    pretrain: str | None
    time: str
    #: Bits a byte: of the continued model before training, and the best of both.
    before: float
    continued: float
    scratch: float
    lr: float
    commit: str | None
    date: str
    versions: dict[str, str]


def train(folder: Path, text: str, time: str, seed: int, *options: str) -> Path:
    """Train on a text for a time; return the run."""
    folder.mkdir(parents=True)
    config = folder / "run.yaml"
    config.write_text(f"data: {{source: '{text}'}}\nbudget: {{time: {time}}}\n")
    settings = (f"train.seed={seed}", "parallel.technique=data", "parallel.workers=1")
    words = [sys.executable, "-m", "farspan", "train", str(config), "--run", str(folder / "run")]
    for setting in settings:
        words += ["--set", setting]
    done = subprocess.run([*words, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return folder / "run"


def best_bits(run: Path) -> tuple[float, float]:
    """Return bits a byte of the first validation, and the least of all."""
    bits = [event.bits_per_byte for event in open_run(run).history.validations]
    return bits[0], min(bits)


def pretrain(text: str, given: argparse.Namespace, folder: Path) -> Path:
    """Train a small model on a text; return the folder that it is exported to."""
    pretrained = train(folder / "first", text, given.pretrain, 0, "--set", "size=tiny")
    model = folder / "model"
    words = [sys.executable, "-m", "farspan", "export", str(pretrained), "--out", str(model)]
    subprocess.run(words, check=True, capture_output=True)
    return model


def continue_model(
    model: Path, first: str, second: str, given: argparse.Namespace, folder: Path
) -> list[Row]:
    """Continue a model on a text, once a seed, and train another from scratch."""
    rows = []
    for seed in range(given.seeds):
        run = train(folder / f"on-{seed}", second, given.time, seed, "--from", str(model))
        scratch = train(folder / f"scratch-{seed}", second, given.time, seed, *given.scratch)
        before, continued = best_bits(run)
        row = Row(
            first=Path(first).name,
            second=Path(second).name,
            seed=seed,
            pretrain=None if given.model else given.pretrain,
            time=given.time,
            before=before,
            continued=continued,
            scratch=best_bits(scratch)[1],
            lr=open_run(run).plan.train.optimizer.lr,
            commit=source_commit(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=read_versions(),
        )
        with open(RESULTS, "ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        print(
            f"{Path(first).name} -> {Path(second).name}, seed {seed}: before {row.before:.3f}, "
            f"continued {row.continued:.3f}, from scratch {row.scratch:.3f} bits a byte",
            flush=True,
        )
        rows.append(row)
    return rows


def is_worse(rows: list[Row]) -> bool:
    """Return whether continuing made a model worse, or no better than one from scratch."""
    continued = statistics.fmean(row.continued for row in rows)
    scratch = statistics.fmean(row.scratch for row in rows)
    return continued >= scratch or any(row.continued > row.before for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", help="a folder, or a source such as pydocs")
    parser.add_argument("other", nargs="?")
    parser.add_argument("--model", type=Path, help="a model to continue, as transformers saves it")
    parser.add_argument("--pretrain", default="3m")
    parser.add_argument("--time", default="1m")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    if (given.other is None) == (given.model is None):
        parser.error("give OTHER, or --model FOLDER")
    failed = False
    if given.model is not None:
        # The size from scratch is the one that the time pays for.
        given.scratch = ()
        with tempfile.TemporaryDirectory() as folder:
            rows = continue_model(given.model, given.model.name, given.text, given, Path(folder))
        sys.exit(is_worse(rows))
    given.scratch = ("--set", "size=tiny")
    for first, second in ((given.text, given.other), (given.other, given.text)):
        with tempfile.TemporaryDirectory() as folder:
            model = pretrain(first, given, Path(folder))
            rows = continue_model(model, first, second, given, Path(folder))
        failed |= is_worse(rows)
    sys.exit(failed)


if __name__ == "__main__":
    main()
