"""Fit the expected loss (farspan/estimate/loss_forecast.py) on runs of the recipe, and judge it by
texts that no fit saw.

    python -m benchmarks.fit_forecast [--count WORK] [--pack CORPUS.npz ...]

The runs are those of benchmarks/results/learning.jsonl whose name begins with "recipe", and those
of many_epochs.jsonl whose decay is near the recipe's. `--count` counts the texts of learning.py's
folder of runs first, `--pack` those of many_epochs.py. Prints the constants, and what is left of
each run where its whole text was left out of the fit: before training, and from a validation after
a fifth of it and later. Then the same of the texts that are in no fit, under the constants that
stand in the code.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks import many_epochs
from benchmarks.learning import RESULTS
from farspan.corpus.counting import measure_counts
from farspan.corpus.token_files import TokenFile
from farspan.domain.corpus import CorpusManifest
from farspan.domain.forecast import Counted, Forecast
from farspan.domain.run import RunFolder
from farspan.domain.struct_files import load
from farspan.domain.train import Schedule
from farspan.estimate import loss_forecast as law
from farspan.planning.recipe import studied_recipe
from farspan.planning.size import FRESH_EPOCHS

#: What counts say of each text, by text and tokens that are read.
COUNTS = RESULTS.with_name("forecast_counts.json")
#: h: 5.8 M parameters came 0.02 and 0.04 nats below 2.9 M after the same 150 steps on two texts
#: (learning.jsonl). The rest of the fit is of one size.
SIZE = -0.04
#: What the factors are near where runs say little, each kind of count a third of the difficulty;
#: and how near.
NEAR = np.array([0.0, 0.0, 0.0, 0.0, 1 / 3, 1 / 3, 1 / 3, SIZE])
RIDGE = 0.03
#: Texts that were chosen after the formula, which no fit has seen.
UNSEEN = ("java", "javascript", "manual", "modules", "cloud", "man")
Row = dict[str, Any]
Floats = np.ndarray[Any, np.dtype[np.float64]]


def text_of(row: Row) -> str:
    """many_epochs.jsonl calls the source of Python's standard library "code"."""
    return "source" if row["text"] == "code" else str(row["text"])


def told(row: Row) -> Forecast:
    return Forecast(
        loss=0.0,
        interval=(0.0, 0.0),
        parameters=row["parameters"],
        unique_tokens=row["unique_tokens"],
        tokens=row["tokens"],
        steps=row["steps"],
        counted=msgspec.convert(row["counted"], tuple[Counted, ...]),
        bigram_nats=row["bigram_nats"],
    )


def fitted(rows: Sequence[Row]) -> Floats:
    """Fit a to h; h is SIZE. Every text weighs as the root of its runs."""
    x = np.array([law.features(told(row)) for row in rows])
    y = np.array([row["final_loss"] for row in rows]) - x @ NEAR
    texts = [text_of(row) for row in rows]
    weights = np.array([texts.count(text) ** -0.5 for text in texts])
    x = x[:, :-1]
    middle = weights @ x / weights.sum()
    level = weights @ y / weights.sum()
    centred = (x - middle) * weights[:, None] ** 0.5
    prior = RIDGE * np.eye(x.shape[1])
    slopes = np.linalg.solve(centred.T @ centred + prior, centred.T @ ((y - level) * weights**0.5))
    slopes[0] = level - middle[1:] @ slopes[1:]
    return NEAR + np.append(slopes, 0.0)


def expected(row: Row, factors: Floats, share: float = 1.0) -> float:
    return float(factors @ np.array(law.features(told(row), share)))


def later(row: Row, factors: Floats) -> list[tuple[float, float, float]]:
    """Of validations from a fifth on: the share of the run, that of the peak rate, and that of what
    the loss is above a run's that ends there, less what this run will be above the law at its
    end."""
    schedule = msgspec.convert(row["schedule"], Schedule)
    found = []
    end = row["final_loss"] - expected(row, factors)
    for step, loss, bigram, *_ in row["validated"]:
        share = step / row["steps"]
        if law.EARLIEST <= share < 1:
            worse = loss + row["bigram_nats"] - bigram - expected(row, factors, share)
            found.append((share, law.rate(schedule, share), share * worse - end))
    return found


def from_learning() -> list[Row]:
    """Return runs of learning.jsonl whose text was counted, with what that says."""
    counts = json.loads(COUNTS.read_text())
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    rows = [
        row
        for row in rows
        if row["name"].startswith("recipe") and row["forecast"] and place_of(row) in counts
    ]
    return [
        {**row, "bigram_nats": row["forecast"]["bigram_nats"], "counted": counts[place_of(row)]}
        for row in rows
    ]


def place_of(row: Row) -> str:
    few = "-few" if "-few" in row["name"] else ""
    return f"{row['text']}{few} {row['tokens']}"


def from_many_epochs() -> list[Row]:
    """Return runs of many_epochs.jsonl as farspan's recipe would train, or nearly."""
    counts = json.loads(COUNTS.read_text())
    found = []
    for row in many_epochs.rows():
        near = studied_recipe(row["epochs"], row["steps"])
        plain = row["muon"] and not row["dropout"] and not row["mask"] and row["reshuffle"]
        if (
            not plain
            or row["lr"] != many_epochs.Setting().lr
            or not 0.6 <= row["decay"] / near.weight_decay <= 1.6
        ):
            continue
        averaged = row["epochs"] > FRESH_EPOCHS
        curve = [[step, smooth if averaged else loss, 0.0] for step, loss, smooth in row["curve"]]
        found.append(
            {
                **row,
                "name": f"gpu x{row['epochs']:.2g} decay {row['decay']}",
                "text": row["corpus"],
                "bigram_nats": 0.0,
                "counted": counts[f"{row['corpus']} unique {row['unique']}"],
                "validated": curve,
                "final_loss": min(loss for _, loss, _ in curve),
                "schedule": {"kind": "linear", "floor": 0.0},
            }
        )
    return found


def count(work: Path | None, packed: Iterable[Path]) -> None:
    found = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    for path in packed:
        for unique in {row["unique"] for row in many_epochs.rows() if row["corpus"] == path.stem}:
            text = many_epochs.Text(path, unique)
            found[f"{path.stem} unique {unique}"] = measure_counts(
                text.tokens, text.val, text.vocabulary, len(text.tokens)
            )
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if work else []
    texts: dict[str, tuple[TokenFile, TokenFile, int]] = {}
    for run in work.glob("recipe*-0-*/corpus.json") if work else ():
        corpus = load(RunFolder(run.parent).corpus, CorpusManifest)
        name = (
            run.parent.name.removeprefix("recipe")
            .removeprefix("-6m")
            .removeprefix("-15m")
            .removeprefix("-")
        )
        few = name.startswith("few-")
        text = name.removeprefix("few-").split("-")[0]
        folder = Path(json.loads(RunFolder(run.parent).record.read_text())["corpus"])
        opened = (TokenFile.open(folder, split, corpus) for split in ("train", "val"))
        texts[f"{text}{'-few' * few}"] = (*opened, corpus.vocab_size)
    for row in rows:
        text = place_of(row).split()[0]
        if row["name"].startswith("recipe") and text in texts and place_of(row) not in found:
            train, val, vocabulary = texts[text]
            found[place_of(row)] = measure_counts(
                train.tokens, val.tokens, vocabulary, row["tokens"]
            )
    COUNTS.write_text(json.dumps(msgspec.to_builtins(found), indent=1) + "\n")


def show(rows: Sequence[Row], factors: Sequence[Floats], gap: float) -> None:
    """Return what is left of each run under its factors, and in all."""
    before = []
    first = []
    every = []
    for row, factor in zip(rows, factors, strict=True):
        left = row["final_loss"] - expected(row, factor)
        errors = [share * gap * rate - error for share, rate, error in later(row, factor)]
        before.append(abs(left))
        first.append(abs(errors[0]))
        every.append(statistics.median(map(abs, errors)))
        name = f"{row['name']} {row['text']} {row['steps']} steps"
        print(
            f"{name:36} {row['final_loss']:.3f} {left:+.3f}, at a fifth {errors[0]:+.3f}, later "
            f"{every[-1]:.3f}"
        )
    for what, values in (("before", before), ("at a fifth", first), ("from there on", every)):
        root = math.sqrt(statistics.fmean(value * value for value in values))
        print(f"{what}: median {statistics.median(values):.3f}, rms {root:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=Path)
    parser.add_argument("--pack", nargs="+", type=Path, default=[])
    given = parser.parse_args()
    if given.count or given.pack:
        count(given.count, given.pack)
    rows = from_learning()
    inside = [row for row in rows if row["text"] not in UNSEEN] + from_many_epochs()
    outside = [row for row in rows if row["text"] in UNSEEN]
    solved = fitted(inside)
    texts = {text_of(row) for row in inside}
    without = {text: fitted([row for row in inside if text_of(row) != text]) for text in texts}
    told_later = [triple for row in inside for triple in later(row, without[text_of(row)])]
    pairs = np.array([(share * rate, error) for share, rate, error in told_later])
    gap = float(pairs[:, 0] @ pairs[:, 1] / (pairs[:, 0] @ pairs[:, 0]))
    print("FACTORS =", ", ".join(f"{value:.4f}" for value in solved), "GAP =", f"{gap:.4f}")
    show(inside, [without[text_of(row)] for row in inside], gap)
    if outside:
        print("\ntexts that are in no fit")
        show(outside, [np.array(law.FACTORS)] * len(outside), law.GAP)


if __name__ == "__main__":
    main()
