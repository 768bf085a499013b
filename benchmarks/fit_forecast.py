"""Fit the expected loss (farspan/estimate/forecast.py) on the recipe's runs of benchmarks/results/learning.jsonl, and
on those of many_epochs.jsonl whose decay is near the recipe's.

    python -m benchmarks.fit_forecast [--count CORPUS.npz ...]      # counts first, for many_epochs.jsonl's corpora

Prints the constants, what they leave of each run, and the same where that run was left out of the fit: before training,
and from a validation after a fifth of it and later.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks import many_epochs
from benchmarks.learning import RESULTS
from farspan.corpus.counting import counted
from farspan.domain.forecast import Forecast
from farspan.domain.train import Schedule
from farspan.estimate import forecast as law
from farspan.planning.recipe import studied
from farspan.planning.size import FRESH_EPOCHS
from farspan.semantics.lr_schedule import learning_rate

#: Of many_epochs.jsonl's corpora, and parts of them, what their counts say.
COUNTS = RESULTS.with_name("many_epochs_counts.json")
#: What keeps coefficients of few runs near nothing: a prior as strong as one run that is 1 nat off.
RIDGE = 0.003
#: d: 5.8 M parameters came 0.02 and 0.04 nats below 2.9 M after the same 150 steps on two texts (learning.jsonl). The
#: rest of the runs are of one size.
SIZE = -0.04
Row = dict[str, Any]


def features(row: Row, share: float = 1.0) -> list[float]:
    tokens, unique = share * row["tokens"], row["unique_tokens"]
    repeats = min(law.MOST_REPEATS, max(1.0, tokens / unique))
    return [1.0, math.log(tokens), math.log(repeats), math.log(row["parameters"]), counts(row, share)]


def counts(row: Row, share: float = 1.0) -> float:
    known = msgspec.convert(row["forecast"], Forecast)
    return law._nats(known.counted, min(share * row["tokens"], row["unique_tokens"]))


def fitted(rows: list[Row]) -> np.ndarray:
    """a to e, of which d is SIZE."""
    x = np.array([features(row) for row in rows])
    y = np.array([row["final_loss"] for row in rows]) - SIZE * x[:, 3]
    x[:, 3] = 0.0
    middle = x.mean(0)
    centred = x - middle
    slopes = np.linalg.solve(centred.T @ centred + RIDGE * np.eye(x.shape[1]), centred.T @ (y - y.mean()))
    slopes[0] = 0.0
    slopes[0] = y.mean() - middle @ slopes
    slopes[3] = SIZE
    return slopes


def later(row: Row, solved: np.ndarray) -> list[tuple[float, float]]:
    """Of validations from a fifth on: the share of the run times that of the peak rate, and what the law says without a
    gap, less the final loss."""
    schedule = msgspec.structs.replace(msgspec.convert(row["schedule"], Schedule), warmup_steps=0, floor=0.0)
    found = []
    for step, loss, bigram in row["validated"]:
        share = step / row["steps"]
        if law.EARLIEST <= share < 1:
            easier = row["forecast"]["bigram_nats"] - bigram
            end, there = (np.array(features(row, s)) @ solved for s in (1.0, share))
            rate = learning_rate(schedule, 1.0, round(share * 1000), 1001)
            found.append((share * rate, end + share * (loss + easier - there) - row["final_loss"]))
    return found


def count(paths: list[Path]) -> None:
    found = {}
    for row in many_epochs.rows():
        for path in paths:
            if path.stem == row["corpus"] and (place := f"{path.stem} {row['unique']}") not in found:
                text = many_epochs.Text(path, row["unique"])
                found[place] = counted(text.tokens, text.val, text.vocabulary, len(text.tokens))
    COUNTS.write_text(json.dumps(found, indent=1) + "\n")


def on_gpu() -> list[Row]:
    """Runs of many_epochs.jsonl as farspan's recipe would train, or nearly, in the form of learning.jsonl's."""
    counts, found = json.loads(COUNTS.read_text()), []
    for row in many_epochs.rows():
        near = studied(row["epochs"], row["steps"])
        if (
            not row["muon"]
            or row["dropout"]
            or row["mask"]
            or not row["reshuffle"]
            or row["lr"] != many_epochs.Setting().lr
        ):
            continue
        if not 0.6 <= row["decay"] / near.weight_decay <= 1.6:
            continue
        averaged = row["epochs"] > FRESH_EPOCHS
        curve = [[step, smooth if averaged else loss, 0.0] for step, loss, smooth in row["curve"]]
        known = {"loss": 0.0, "interval": [0.0, 0.0], "parameters": row["parameters"], "bigram_nats": 0.0,
                 "unique_tokens": row["unique_tokens"], "tokens": row["tokens"],
                 "counted": counts[f"{row['corpus']} {row['unique']}"]}  # fmt: skip
        found.append({
            "name": f"gpu x{row['epochs']:.2g} decay {row['decay']}", "text": row["corpus"], "steps": row["steps"],
            "tokens": row["tokens"], "unique_tokens": row["unique_tokens"], "parameters": row["parameters"],
            "final_loss": min(loss for _, loss, _ in curve), "validated": curve, "forecast": known,
            "schedule": {"kind": "linear", "floor": 0.0},
        })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", nargs="+", type=Path)
    if paths := parser.parse_args().count:
        count(paths)
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    rows = [row for row in rows if row["name"].startswith("recipe") and row["forecast"]] + on_gpu()
    solved = fitted(rows)
    pairs = np.array([pair for row in rows for pair in later(row, solved)])
    gap = float(pairs[:, 0] @ pairs[:, 1] / (pairs[:, 0] @ pairs[:, 0]))
    print("A, B, C, D, E, GAP =", ", ".join(f"{value:.4f}" for value in (*solved, gap)))
    before, first, every = [], [], []
    for row in rows:
        without = fitted([other for other in rows if other is not row])
        left = row["final_loss"] - np.array(features(row)) @ without
        errors = [error - gap * rate for rate, error in later(row, without)]
        before.append(abs(left))
        first.append(abs(errors[0]))
        every += map(abs, errors)
        name = f"{row['name']} {row['text']} {row['steps']} steps"
        print(f"{name:32} {row['final_loss']:.3f} left out {left:+.3f}, at a fifth {errors[0]:+.3f}")
    for what, values in (("before", before), ("at a fifth", first), ("from there on", every)):
        root = math.sqrt(statistics.fmean(value * value for value in values))
        print(f"{what}: median {statistics.median(values):.3f}, rms {root:.3f}")


if __name__ == "__main__":
    main()
