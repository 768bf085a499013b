"""Fit the expected loss (farspan/estimate/forecast.py) on the recipe's runs of benchmarks/results/learning.jsonl.

    python -m benchmarks.fit_forecast

Prints the constants, what they leave of each run, and the same where that run was left out of the fit: before training,
and from a validation after a fifth of it and later.
"""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import msgspec
import numpy as np

from benchmarks.learning import RESULTS
from farspan.domain.forecast import Forecast
from farspan.domain.train import Schedule
from farspan.estimate import forecast as law
from farspan.semantics.lr_schedule import learning_rate

#: What keeps coefficients of few runs near nothing: a prior as strong as one run that is 1 nat off.
RIDGE = 0.01
Row = dict[str, Any]


def features(row: Row, share: float = 1.0) -> list[float]:
    tokens, unique = share * row["tokens"], row["unique_tokens"]
    repeats = min(law.MOST_REPEATS, max(1.0, tokens / unique))
    return [1.0, math.log(tokens), math.log(repeats), math.log(row["parameters"])]


def counts(row: Row, share: float = 1.0) -> float:
    known = msgspec.convert(row["forecast"], Forecast)
    return law._nats(known.counted, min(share * row["tokens"], row["unique_tokens"]))


def fitted(rows: list[Row]) -> np.ndarray:
    """a, b, c and d."""
    x, y = np.array([features(row) for row in rows]), np.array([row["final_loss"] - counts(row) for row in rows])
    middle = x.mean(0)
    centred = x - middle
    slopes = np.linalg.solve(centred.T @ centred + RIDGE * np.eye(4), centred.T @ (y - y.mean()))
    slopes[0] = 0.0
    slopes[0] = y.mean() - middle @ slopes
    return slopes


def later(row: Row, solved: np.ndarray) -> list[tuple[float, float]]:
    """(share of the peak rate, final loss minus what is expected before the gap) of validations from a fifth on."""
    schedule = msgspec.structs.replace(msgspec.convert(row["schedule"], Schedule), warmup_steps=0, floor=0.0)
    found = []
    for step, loss, bigram in row["validated"]:
        share = step / row["steps"]
        if law.EARLIEST <= share < 1:
            easier = row["forecast"]["bigram_nats"] - bigram
            end, there = (counts(row, s) + np.array(features(row, s)) @ solved for s in (1.0, share))
            rate = learning_rate(schedule, 1.0, round(share * 1000), 1001)
            found.append((rate, row["final_loss"] - (end + loss + easier - there)))
    return found


def main() -> None:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    rows = [row for row in rows if row["name"].startswith("recipe") and row["forecast"]]
    solved = fitted(rows)
    pairs = np.array([pair for row in rows for pair in later(row, solved)])
    gap = -float(pairs[:, 0] @ pairs[:, 1] / (pairs[:, 0] @ pairs[:, 0]))
    print("A, B, C, D, GAP =", ", ".join(f"{value:.4f}" for value in (*solved, gap)))
    before, first, every = [], [], []
    for row in rows:
        without = fitted([other for other in rows if other is not row])
        left = row["final_loss"] - counts(row) - np.array(features(row)) @ without
        errors = [error + gap * rate for rate, error in later(row, without)]
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
