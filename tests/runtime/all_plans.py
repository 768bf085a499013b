"""`python -m tests.runtime.all_plans`: every plan by hand, all that techniques emit on random
clusters, and random valid ones, each run by real workers against the reference. A table says how
many there were, and the worst."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from msgspec.structs import replace

from farspan.domain.plan import Plan
from tests.runtime.fleet import Failed, Fleet
from tests.runtime.planned import planned, structure
from tests.runtime.plans import HAND_PICKED
from tests.runtime.random_plans import random_plan
from tests.runtime.verify import Verdict, verify

KINDS = ("hand", "compiled", "planned", "random")
#: Plans by hand that are run compiled too, where there is a C++ compiler: it takes half a minute
#: each.
COMPILED = ("a site axis", "recomputed", "megatron", "two stages")


def named(seeds: range) -> Iterator[tuple[str, Plan]]:
    """Every plan, each structure that techniques emit once, by `kind:seed` or `kind:name`."""
    yield from ((f"hand:{name}", plan) for name, plan in HAND_PICKED.items())
    for name in COMPILED if shutil.which("g++") else ():
        plan = HAND_PICKED[name]
        yield f"compiled:{name}", replace(plan, train=replace(plan.train, compile=True))
    seen = set[object]()
    for seed in seeds:
        for i, plan in enumerate(planned(seed)):
            if (key := structure(plan)) not in seen:
                seen.add(key)
                yield f"planned:{seed}.{i}", plan
    yield from ((f"random:{seed}", random_plan(seed)) for seed in seeds)


def mechanisms(plan: Plan) -> Iterator[str]:
    """What of the runtime a plan exercises."""
    yield "replicas" if len(plan.replicas) > 1 else "one replica"
    for replica in plan.replicas:
        yield "pipeline" if len(replica.stages) > 1 else "one stage"
        if any(edge.streams > 1 for edge in replica.edges):
            yield "several streams"
        for stage in replica.stages:
            mesh = stage.mesh
            yield f"ZeRO {stage.zero if mesh.size('data') > 1 else 0}"
            if mesh.size("tensor") > 1:
                yield "tensor axis by rows" if "b" in stage.splits.values() else "tensor axis"
            if mesh.size("site") > 1 and mesh.size("data") > 1:
                yield "hybrid"
            if stage.grad_sync.topology == "hierarchical" and len(mesh.ranks) > 1:
                yield "hierarchical"
            if stage.recompute:
                yield "recompute"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=150, help="clusters to plan for, and random plans"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=20, help="of each training")
    parser.add_argument("--only", default="", help="a kind, or one plan: random:97")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    tried = Counter[str]()
    failed = Counter[str]()
    worst = dict.fromkeys(KINDS, (0.0, 0.0))
    seconds = dict.fromkeys(KINDS, 0.0)
    seen = Counter[str]()
    with Fleet() as fleet:
        for name, plan in named(range(asked.first, asked.first + asked.seeds)):
            kind = name.split(":")[0]
            if asked.only not in ("", kind, name):
                continue
            began = time.monotonic()
            verdict = checked(
                fleet, name, replace(plan, train=replace(plan.train, steps=asked.steps))
            )
            seconds[kind] += time.monotonic() - began
            tried[kind] += 1
            failed[kind] += bool(verdict.faults)
            seen.update(set(mechanisms(plan)))
            worst[kind] = max(worst[kind][0], verdict.gradient), max(worst[kind][1], verdict.scalar)
    print(
        f"\n{'plans':<12}{'tried':>8}{'failed':>8}{'gradient':>10}{'loss, norm':>12}{'seconds':>9}"
    )
    for kind in KINDS:
        print(
            f"{kind:<12}{tried[kind]:>8}{failed[kind]:>8}{worst[kind][0]:>10.3f}{worst[kind][1]:>12.3f}"
            f"{seconds[kind]:>9.0f}"
        )
    print("\nThe worst errors are shares of what is allowed. Plans by what they exercise:")
    print(", ".join(f"{what} {count}" for what, count in sorted(seen.items())))
    return 1 if failed.total() else 0


def checked(fleet: Fleet, name: str, plan: Plan) -> Verdict:
    """The verdict on one plan; faults are told as they are found."""
    folder = Path(tempfile.mkdtemp(prefix="all-plans-"))
    try:
        verdict = verify(fleet, folder, plan)
    except Failed as error:
        verdict = Verdict(0.0, 0.0, [str(error)])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if verdict.faults:
        print(
            f"--- {name}, {len(verdict.faults)} faults", *verdict.faults[:8], sep="\n", flush=True
        )
    return verdict


if __name__ == "__main__":
    sys.exit(main())
