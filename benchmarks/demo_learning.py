"""The demo's training with the recipe and as it was before there was one: paired seeds, the same
two minutes.

    python -m benchmarks.demo_learning [--seeds 0 1 2] [--time 2m] [--work FOLDER]

Each run is `farspan train` of the demo's model on the built-in corpus with all cores, one at a
time, in turns. Says the loss over the whole validation split, the samples, and of the first seed
how well the vectors find documents. Writes benchmarks/results/demo_learning.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from farspan.domain.run import RunFolder, RunRecord
from farspan.domain.struct_files import load
from farspan.report.history import open_run

RESULTS = Path(__file__).parent / "results" / "demo_learning.json"
RECIPES = {"before": "plain", "recipe": "auto"}


def farspan(*words: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "farspan", *map(str, words), "--json"],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return dict(json.loads(done.stdout))


def measured(run: Path, recipe: str, seed: int, time: str) -> dict[str, Any]:
    config = run.with_suffix(".yaml")
    config.write_text(
        f"{{data: pydocs, size: tiny, budget: {{time: {time}}}, train: {{recipe: {recipe}, seed: "
        f"{seed}}}}}"
    )
    if not RunFolder(run).plan.exists():
        farspan("train", config, "--run", run)
    history = open_run(run)
    last = history.history.validations[-1]
    expected = load(RunFolder(run).record, RunRecord).forecast
    return {
        "seed": seed,
        "loss": last.loss,
        "tokens": last.tokens,
        "of": last.of,
        "steps": last.step,
        "expected": expected and expected.loss,
        "samples": [sample.text for sample in history.history.samples],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--time", default="2m")
    parser.add_argument("--work", type=Path, default=Path("runs/demo-learning"))
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in RECIPES}
    for seed in given.seeds:
        for name, recipe in RECIPES.items():
            rows[name].append(measured(given.work / f"{name}-{seed}", recipe, seed, given.time))
            print(
                name,
                seed,
                {key: rows[name][-1][key] for key in ("loss", "steps", "expected")},
                flush=True,
            )
    for name, runs in rows.items():
        runs[0]["index"] = farspan("embed", given.work / f"{name}-{given.seeds[0]}")["manifest"][
            "evaluation"
        ]
    gained = [
        before["loss"] - now["loss"]
        for before, now in zip(rows["before"], rows["recipe"], strict=True)
    ]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    print(
        f"lower by {', '.join(f'{gain:.3f}' for gain in gained)} nats: "
        f"{statistics.fmean(gained):.3f}"
    )
    RESULTS.write_text(
        json.dumps({"commit": commit, "time": given.time, "gained": gained, **rows}, indent=1)
        + "\n"
    )


if __name__ == "__main__":
    main()
