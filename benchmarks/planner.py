"""The planner's own promises: how fast it searches, how near its additive objective comes to the
full estimator's best, and how it compares with an exhaustive grid of even splits.

    python benchmarks/planner.py [--quick] [--only TABLE]       # writes results/planner.json

Four tables, each with its seeds:

- time: `farspan plan --json` as a process, import included, over 4 to 512 devices;
- price: one given plan of 64 devices, in a warm process;
- gap: clusters of up to 6 unlike devices and models of up to 6 layers; every contiguous cut, mesh,
  ZeRO level and recompute choice over the searched orders priced by the full estimator, against
  what the search returns;
- grid: 16 to 64 devices; the best data x tensor x pipeline split with equal stages and equal rows,
  against the search.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from farspan.domain.cluster import Cluster, Host, Link, Site
from farspan.domain.clusterfile import save_cluster
from farspan.domain.plan import Replica
from farspan.domain.problems import Problem
from farspan.estimate.estimate_plan import price, step
from farspan.estimate.network import Network
from farspan.estimate.stage import Costs
from farspan.planning.plan_question import model_of
from farspan.techniques import Task, pipeshard
from farspan.techniques._search.even_grid import even_splits
from farspan.techniques._search.slices import Tables, slices, stage_of
from tests.techniques.worlds import KINDS, random_cluster, random_model, task

RESULTS = Path(__file__).parent / "results" / "planner.json"
GAP_CASES = 40
GRID_CASES = 40


# -- time ------------------------------------------------------------


def many(sites: int, hosts: int, devices: int, kinds: tuple[str, ...], seed: int) -> Cluster:
    """Sites of equal hosts, a catalogue kind a site in turn, or a host where there is one site,
    linked by random round trips and rates."""
    from farspan.domain import catalog

    rng = random.Random(seed)
    known = catalog.load_devices()
    made = []
    for s in range(sites):
        turns = [kinds[(s if sites > 1 else h) % len(kinds)] for h in range(hosts)]
        hosts_ = tuple(
            Host(name=f"s{s}h{h}", devices=(known[kind].device(kind),) * devices)
            for h, kind in enumerate(turns)
        )
        made.append(Site(name=f"s{s}", hosts=hosts_))
    links = tuple(
        Link(
            a=a.name,
            b=b.name,
            rtt_s=rng.choice((5, 20, 40, 80, 120)) / 1e3,
            bandwidth=rng.choice((1, 5, 10)) * 1e9 / 8,
        )
        for a, b in itertools.combinations(made, 2)
    )
    return Cluster(sites=tuple(made), links=links)


#: By name: sites, hosts a site, devices a host, kinds.
SIZES = {
    4: (2, 1, 2, ("a30", "rtx6000")),
    8: (2, 1, 4, ("a30", "rtx6000")),
    16: (4, 1, 4, ("a30", "rtx6000", "t4", "l4")),
    32: (4, 1, 8, ("a30", "rtx6000", "t4", "l4")),
    64: (8, 1, 8, ("a30", "rtx6000", "t4", "l4")),
    128: (8, 2, 8, ("a100-40", "a30", "l4")),
    256: (8, 4, 8, ("a100-40", "a30", "l4")),
    512: (8, 8, 8, ("a100-40", "a30", "l4")),
}
ONE_SITE = (1, 4, 8, ("a30", "rtx6000"))


def times(quick: bool) -> list[dict[str, Any]]:
    """Seconds of `farspan plan` by devices, the median of three runs (one beyond 64 devices)."""
    rows = []
    for shape in (*SIZES.values(), ONE_SITE):
        devices = shape[0] * shape[1] * shape[2]
        if quick and devices > 16:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cluster.yaml"
            save_cluster(many(*shape, seed=devices), path, "a benchmark's cluster")
            words = [
                sys.executable,
                "-m",
                "farspan",
                "plan",
                "--model",
                "gpt2m",
                "--cluster",
                str(path),
                "--json",
            ]
            took = []
            for _ in range(3 if devices <= 64 else 1):
                began = time.perf_counter()
                subprocess.run(
                    [*words, "--tokens", "1B"], check=True, stdout=subprocess.DEVNULL, timeout=600
                )
                took.append(time.perf_counter() - began)
        rows.append(
            {"devices": devices, "sites": shape[0], "kinds": len(shape[3]), "seconds": took}
        )
        print(
            f"{devices:4} devices, {len(shape[3])} kinds, {shape[0]} sites: "
            f"{statistics.median(took):6.2f} s",
            flush=True,
        )
    return rows


def priced() -> list[dict[str, Any]]:
    """Milliseconds to price one plan of 64 devices that nothing was priced of before, the process
    warm: the median of nine, one stage and a pipeline of eight."""
    where = many(*SIZES[64], seed=64)
    rows = []
    for stages in (1, 8):
        took = []
        for batch in range(10):
            asked = task(model_of("gpt2m"), where, batch=256 * (batch + 1), seq_len=1024)
            even = (one for one in even_splits(asked, [16]) if len(one.stages) == stages)
            plan = asked.plan("given", [next(even)])
            fresh = Costs(asked.graph, plan.train, Network(where, plan.devices, asked.engine))
            began = time.perf_counter()
            price(plan, fresh)
            took.append(time.perf_counter() - began)
        rows.append({"stages": stages, "milliseconds": [1e3 * seconds for seconds in took[1:]]})
        print(
            f"a plan of 64 devices, {stages} stages: "
            f"{statistics.median(rows[-1]['milliseconds']):.1f} ms",
            flush=True,
        )
    return rows


# -- gap ------------------------------------------------------------


def everything(asked: Task, parts: int) -> Iterator[Replica]:
    """Every pipeline of two and more stages over the searched orders: cuts of devices and units,
    meshes, ZeRO levels, recompute; as many microbatches in flight as there are stages to come."""
    tables = Tables(asked, parts)
    for order in pipeshard.orders(asked):
        allowed = set(slices(asked, order))
        for inner in range(1, min(len(order), asked.graph.units)):
            for cuts in itertools.combinations(range(1, len(order)), inner):
                runs = list(itertools.pairwise((0, *cuts, len(order))))
                if not all(run in allowed for run in runs):
                    continue
                options = [tables.options([order[i] for i in range(*run)]) for run in runs]
                for units in itertools.combinations(range(1, asked.graph.units), inner):
                    bounds = list(itertools.pairwise((0, *units, asked.graph.units)))
                    for picks in itertools.product(*options):
                        stages = [
                            stage_of([order[i] for i in range(*run)], option, cut, parts)
                            for run, option, cut in zip(runs, picks, bounds, strict=True)
                        ]
                        yield asked.replica(
                            stages, parts, [len(stages) - i for i in range(len(stages))]
                        )


def gap_case(seed: int) -> Task:
    """Up to 6 unlike devices and a model of up to 6 layers."""
    rng = random.Random(seed)
    return task(random_model(rng, layers=rng.randint(1, 6)), random_cluster(rng, 6), batch=8)


def gaps(cases: int, most_space: int) -> list[dict[str, Any]]:
    """How much longer the found plan's step is than that of the best of everything, under the full
    estimator."""
    rows = []
    seed = 0
    while len(rows) < cases:
        seed += 1
        asked = gap_case(seed)
        if len(asked.ranks) < 2:
            continue
        best = math.inf
        space = 0
        for parts in pipeshard.microbatch_counts(asked):
            for replica in everything(asked, parts):
                space += 1
                if space > most_space:
                    break
                if (took := step(replica, asked.costs).seconds) < best and asked.fits(replica):
                    best = took
            if space > most_space:
                break
        found = pipeshard.best_pipeline(asked)
        if space > most_space or found is None or best == math.inf:
            continue
        gap = found[0] / best - 1
        rows.append(
            {"seed": seed, "devices": len(asked.ranks), "space": space, "best_s": best, "gap": gap}
        )
        print(
            f"seed {seed}: {len(asked.ranks)} devices, {space:,} pipelines, gap {gap:+.2%}",
            flush=True,
        )
    return rows


# -- grid ------------------------------------------------------------


def grid_case(seed: int) -> Task:
    """16 to 64 devices of one kind, or of two by host, in up to 4 sites."""
    rng = random.Random(seed)
    unlike = seed % 4 != 0
    sites = rng.choice((1, 2, 4))
    per_site = rng.choice([count for count in (4, 8, 16) if 16 <= count * sites <= 64])
    kind = rng.choice(list(KINDS))
    made = []
    for s in range(sites):
        per_host = rng.choice((4, 8)) if per_site >= 8 else 4
        kinds = [
            rng.choice(("fast", "slow")) if unlike else kind for _ in range(per_site // per_host)
        ]
        hosts = tuple(
            Host(name=f"s{s}h{h}", devices=(KINDS[k],) * per_host) for h, k in enumerate(kinds)
        )
        made.append(Site(name=f"s{s}", hosts=hosts))
    links = tuple(
        Link(
            a=a.name,
            b=b.name,
            rtt_s=rng.choice((1e-3, 0.02, 0.1)),
            bandwidth=rng.choice((1e9, 1e10)) / 8,
        )
        for a, b in itertools.combinations(made, 2)
    )
    model = random_model(rng, layers=rng.choice((8, 12, 16)))
    return task(model, Cluster(sites=tuple(made), links=links), batch=256)


def grids(cases: int) -> list[dict[str, Any]]:
    """Return the search's step against the best even split's, 16 to 64 devices, like and unlike."""
    rows = []
    for seed in range(1000, 1000 + cases):
        asked = grid_case(seed)
        grid = even_splits(asked, pipeshard.microbatch_counts(asked))
        fitting = [step(replica, asked.costs).seconds for replica in grid if asked.fits(replica)]
        found = pipeshard.plan(asked)
        if not fitting or isinstance(found, Problem):
            continue
        ours = price(found, asked.costs).step_s
        kinds_ = {device.kind for device in asked.costs.network.devices}
        rows.append(
            {
                "seed": seed,
                "devices": len(asked.ranks),
                "sites": len(asked.sites),
                "unlike": len(kinds_) > 1,
                "grid": len(fitting),
                "grid_s": min(fitting),
                "ours_s": ours,
                "ratio": ours / min(fitting),
            }
        )
        print(
            f"seed {seed}: {len(asked.ranks)} devices in {len(asked.sites)} sites, unlike "
            f"{len(kinds_) > 1}: "
            f"{ours / min(fitting):.3f} of the best of {len(fitting)} even splits",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="few cases, small clusters; writes nothing"
    )
    parser.add_argument(
        "--only",
        choices=("time", "price", "gap", "grid"),
        help="this table; the others stay as they are written",
    )
    given = parser.parse_args()
    tables = json.loads(RESULTS.read_text()) if RESULTS.exists() and given.only else {}
    if given.only in (None, "gap"):
        tables["gap"] = gaps(6 if given.quick else GAP_CASES, 3_000 if given.quick else 12_000)
    if given.only in (None, "grid"):
        tables["grid"] = grids(8 if given.quick else GRID_CASES)
    if given.only in (None, "time"):
        tables["time"] = times(given.quick)
    if given.only in (None, "price"):
        tables["price"] = priced()
    summary = summarised(tables["gap"], tables["grid"])
    print(json.dumps(summary, indent=1))
    if not given.quick:
        about = {"python": platform.python_version(), "platform": platform.platform(), "threads": 1}
        RESULTS.write_text(json.dumps({**tables, **about, "summary": summary}, indent=1) + "\n")


def summarised(gap: list[dict[str, Any]], grid: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures that were promised."""
    of_gaps = sorted(row["gap"] for row in gap)
    unlike = [row["ratio"] for row in grid if row["unlike"]]
    return {
        "gap_p95": of_gaps[math.ceil(0.95 * len(of_gaps)) - 1],
        "gap_worst": of_gaps[-1],
        "grid_worse": sum(row["ratio"] > 1 + 1e-9 for row in grid),
        "unlike_better": sum(ratio < 0.999 for ratio in unlike),
        "unlike": len(unlike),
        "unlike_median_ratio": statistics.median(unlike),
    }


if __name__ == "__main__":
    main()
