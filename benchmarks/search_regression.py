"""Today's search against that of an earlier commit, on the same questions: no plan may be slower.

    python benchmarks/search_regression.py [--base COMMIT] [--kept FILE]       # writes
    results/search_regression.json

The earlier commit plans in a process of its own, out of a worktree under the temporary folder. What
it chose for every technique and every part of a cluster is priced here, by today's estimator,
beside what is chosen today. Its answers take long: with --kept they are asked for once. Questions:
the gap and grid cases of benchmarks/planner.py, and 60 random clusters of 2 to 24 devices in 1 to 4
sites.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))

import msgspec

from farspan import models
from farspan.domain.cluster import Cluster, Device, Host, Link, Site
from farspan.domain.engine import load_engine
from farspan.domain.model import ModelSpec
from farspan.domain.plan import Plan
from farspan.domain.train import TrainSpec
from farspan.estimate.estimate_plan import estimate
from farspan.planning.rank_plans import rank_plans

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "search_regression.json"
RANDOM = range(5000, 5060)
#: A plan may take longer by rounding.
SAME = 1 + 1e-9


class Question(msgspec.Struct):
    """What both searches are asked."""

    name: str
    model: ModelSpec
    cluster: Cluster
    train: TrainSpec


class Answer(msgspec.Struct):
    """What one search chose: (technique, part of the cluster, plan), and the seconds that it
    took."""

    name: str
    seconds: float
    plans: list[tuple[str, str, Plan]]


def questions() -> Iterator[Question]:
    """All cases, by name."""
    from benchmarks.planner import RESULTS as PLANNER
    from benchmarks.planner import gap_case, grid_case

    tables = json.loads(PLANNER.read_text())
    for table, case in (("gap", gap_case), ("grid", grid_case)):
        for row in tables[table]:
            asked = case(row["seed"])
            yield Question(f"{table} {row['seed']}", asked.model, asked.cluster, asked.train)
    for seed in RANDOM:
        yield random_question(seed)


def random_question(seed: int) -> Question:
    """2 to 24 devices of mixed kinds in 1 to 4 sites, and a random model."""
    from tests.techniques.worlds import KINDS, random_model

    rng = random.Random(seed)
    count = rng.randint(2, 24)
    sites = rng.randint(1, 4)
    places = sorted(rng.sample(range(1, count), min(sites, count) - 1))
    shares = [b - a for a, b in zip((0, *places), (*places, count), strict=True)]
    made = tuple(
        Site(name=f"s{s}", hosts=tuple(_hosts(rng, s, share, KINDS)))
        for s, share in enumerate(shares)
    )
    links = tuple(
        Link(
            a=a.name,
            b=b.name,
            rtt_s=rng.choice((1e-3, 0.02, 0.1)),
            bandwidth=rng.choice((1e9, 1e10)) / 8,
        )
        for i, a in enumerate(made)
        for b in made[i + 1 :]
    )
    train = TrainSpec(steps=1000, batch=rng.choice((16, 32, 48, 64)), seq_len=256, precision="fp16")
    model = random_model(rng, layers=rng.choice((2, 4, 6, 10, 16)))
    return Question(f"random {seed}", model, Cluster(sites=made, links=links), train)


def _hosts(rng: random.Random, site: int, left: int, kinds: dict[str, Device]) -> Iterator[Host]:
    """Hosts of up to 8 devices, mostly of one kind each."""
    number = 0
    while left:
        count = min(left, rng.choice((1, 2, 4, 8)))
        names = (
            [rng.choice(list(kinds))] * count
            if rng.random() < 0.8
            else rng.choices(list(kinds), k=count)
        )
        yield Host(name=f"s{site}h{number}", devices=tuple(kinds[name] for name in names))
        left = left - count
        number = number + 1


def answered(question: Question) -> Answer:
    """Return what the search of the farspan that is imported here chooses."""
    began = time.perf_counter()
    ranking = rank_plans(question.model, question.cluster, question.train, load_engine("farspan"))
    plans = [
        (candidate.technique, candidate.where, candidate.plan) for candidate in ranking.candidates
    ]
    return Answer(question.name, time.perf_counter() - began, plans)


def asked_of(commit: str, folder: Path, told: Path) -> list[Answer]:
    """Return the answers of an earlier commit, which a process of its own writes to a file; or
    those that are there."""
    if told.exists():
        return msgspec.json.decode(told.read_bytes(), type=list[Answer])
    tree = folder / "tree"
    asked = folder / "asked.json"
    asked.write_bytes(msgspec.json.encode(list(questions())))
    subprocess.run(
        ["git", "-C", ROOT, "worktree", "add", "--detach", tree, commit],
        check=True,
        capture_output=True,
    )
    try:
        words = [sys.executable, Path(__file__), "--asked", asked, "--told", told]
        subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": str(tree)})
    finally:
        subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)
    return msgspec.json.decode(told.read_bytes(), type=list[Answer])


def compared(question: Question, before: Answer) -> dict[str, Any]:
    """Seconds of a step by technique and part, then and now, under one estimator."""
    graph = models.graph(question.model)
    now = answered(question)

    def steps(answer: Answer) -> dict[str, float]:
        return {
            f"{technique} on {where}": estimate(
                plan, graph, question.cluster, load_engine("farspan")
            ).step_s
            for technique, where, plan in answer.plans
        }

    old = steps(before)
    new = steps(now)
    row = {
        "case": question.name,
        "devices": len(question.cluster.devices),
        "plans": len(old),
        "lost": sorted(set(old) - set(new)),
        "worse": {
            name: [old[name], new[name]]
            for name in old
            if name in new and new[name] > old[name] * SAME
        },
        "better": {
            name: [old[name], new[name]]
            for name in old
            if name in new and new[name] * SAME < old[name]
        },
        "search_s": [round(before.seconds, 2), round(now.seconds, 2)],
    }
    print(
        f"{row['case']}: {len(old)} plans, {len(row['lost'])} lost, {len(row['worse'])} worse, "
        f"{len(row['better'])} better; {before.seconds:.2f} s, now {now.seconds:.2f} s",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--base", default="1a992f1", help="the earlier commit (default: %(default)s)"
    )
    parser.add_argument(
        "--kept", type=Path, help="a file for the earlier commit's answers, or with them"
    )
    parser.add_argument("--asked", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--told", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.asked is not None:
        asked = msgspec.json.decode(given.asked.read_bytes(), type=list[Question])
        given.told.write_bytes(msgspec.json.encode(list(map(answered, asked))))
        return
    with tempfile.TemporaryDirectory() as folder:
        before = asked_of(given.base, Path(folder), given.kept or Path(folder) / "told.json")
    rows = [compared(*pair) for pair in zip(questions(), before, strict=True)]
    summary = {"cases": len(rows), "plans": sum(row["plans"] for row in rows)}
    summary |= {key: sum(len(row[key]) for row in rows) for key in ("lost", "worse", "better")}
    RESULTS.write_text(
        json.dumps({"base": given.base, "summary": summary, "cases": rows}, indent=1) + "\n"
    )
    print(json.dumps(summary))
    raise SystemExit(1 if summary["lost"] or summary["worse"] else 0)


if __name__ == "__main__":
    main()
