"""What farspan computes, beside what it says: loss curves, answers of an index, the server's
OpenAPI, keys of every JSON object, and bytes over each link.

Objects with `bits`, `answers` or `keys` are compared as tests/golden/compare.py says: on one
machine to the last bit, between kinds of processors within a tolerance.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from farspan import models
from farspan.cli.main import main
from farspan.domain.cluster import Cluster, DataSheet, Device, Host, Link, Site
from farspan.domain.engine import engine
from farspan.domain.plan import Plan
from farspan.domain.train import Muon, Regularization
from farspan.estimate.network import Network
from farspan.estimate.stage import Costs
from farspan.estimate.traffic import traffic
from tests.golden.commands import RUN, desk
from tests.runtime import jobs
from tests.runtime.fleet import Fleet
from tests.runtime.plans import HAND_PICKED
from tests.runtime.random_plans import random_plan
from tests.runtime.verify import Case

#: fp32 sums in another order, over a few steps; numbers of bf16 have 8 bits.
LOSS_REL = {"fp32": 1e-4, "bf16": 2e-2}
#: Scores of words are made without a model.
SCORE_ABS = {"bm25": 1e-6, "model": 1e-4, "fused": 1e-4}

#: Twenty trainings: plans that stand for each technique, and what is changed of their training.
CURVES: dict[str, tuple[str, dict[str, Any]]] = {
    "one worker": ("one worker", {}),
    "one worker, muon": ("one worker", {"muon": True}),
    "one worker, bf16": ("one worker", {"precision": "bf16"}),
    "data": ("uneven rows, fewer than microbatches", {}),
    "data, hierarchical": ("hierarchical", {}),
    "data, hierarchical, 8 bits": ("hierarchical", {"bits": 8}),
    "data, dropout, mask, reshuffle, average": ("one bucket", {"regularized": True}),
    "zero1": ("zero 1", {}),
    "zero1, muon": ("zero 1", {"muon": True}),
    "zero2": ("zero 2", {}),
    "fsdp": ("zero 3", {}),
    "fsdp, muon": ("zero 3", {"muon": True}),
    "hsdp": ("hybrid 3", {}),
    "shard": ("megatron, sequences and vocabulary", {}),
    "shard, muon": ("megatron", {"muon": True}),
    "pipeshard": ("a unit each, several streams", {}),
    "pipeshard, unlike widths": ("tensor widths by stage", {}),
    "pipeshard, bf16": ("two stages", {"precision": "bf16"}),
    "diloco": ("replicas unlike", {}),
    "diloco, overlapped, muon": ("replicas unlike, overlapped", {"muon": True}),
}
assert len(CURVES) == 20

QUESTIONS = (
    "time",
    "school family",
    "people state group",
    "world of life",
    "a year and a day",
    "way thing",
    "document 7",
    "state of the world",
    "families at school",
    "what people do in a group",
)
SYSTEMS = ("bm25", "model", "fused")

#: Commands whose keys the trained run below shows. `{run}` is its folder.
RUN_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("train", "own.yaml", "--run", "{run}"),
    ("status", "{run}"),
    ("logs", "{run}"),
    ("report", "{run}"),
    ("compare", "{run}", "{run}-copy"),
    ("resume", "{run}"),
    ("stop", "{run}"),
    ("generate", "time", "--run", "{run}", "--tokens", "3"),
    ("embed", "{run}"),
    ("search", "time", "--run", "{run}"),
    ("search", "--run", "{run}", "--eval"),
    ("export", "{run}"),
    ("prepare", "run.yaml"),
    ("select", "own.yaml"),
    ("doctor",),
    ("lab", "status"),
    ("chaos", "nowhere"),
    ("bench", "nowhere.yaml"),
)
#: Commands with `--json` that are not run here.
LEFT_OUT = {
    "demo": "it is `train` and `search` on the built-in corpus",
    "probe": "its measurements take a quarter of a minute",
    "serve": "it goes on until it is stopped; its OpenAPI is a part of its own",
    "tune": "it is a fit of half a minute",
}


def bits(value: float, **tolerance: float) -> dict[str, Any]:
    """A number to be compared as the docstring of this file says."""
    return {"bits": float(value).hex(), **tolerance}


# -- loss curves
#   ------------------------------------------------------------------------------------------------


def curve_plan(name: str) -> Plan:
    base, changes = CURVES[name]
    plan = HAND_PICKED[base]
    train = plan.train
    if "precision" in changes:
        train = replace(train, precision=changes["precision"])
    if changes.get("muon"):
        train = replace(train, optimizer=replace(train.optimizer, muon=Muon(embedding=3.0)))
    if changes.get("regularized"):
        train = replace(
            train,
            regularization=Regularization(dropout=0.2, mask=0.2, reshuffle=True),
            optimizer=replace(train.optimizer, average=0.8),
        )
    if "bits" in changes:
        (whole,) = plan.replicas
        stages = tuple(
            replace(stage, grad_sync=replace(stage.grad_sync, bits=changes["bits"]))
            for stage in whole.stages
        )
        plan = replace(plan, replicas=(replace(whole, stages=stages),))
    return replace(plan, train=train)


def curves(folder: Path) -> Iterator[tuple[str, Any]]:
    """Losses and gradient norms of every step, and the last validation, of twenty trainings."""
    with Fleet() as fleet:
        for name in CURVES:
            plan = curve_plan(name)
            case = Case(folder, plan)
            trained = fleet.run(jobs.train, case.world, plan, case.path)
            rel = LOSS_REL[plan.train.precision]
            yield (
                f"curves {name}",
                {
                    "losses": [
                        [bits(loss, rel=rel) for loss in trained[rank].losses]
                        for rank in case.firsts
                    ],
                    "norms": [
                        [bits(norm, rel=10 * rel) for norm in trained[rank].norms]
                        for rank in case.firsts
                    ],
                    "validation": bits(trained[0].validation or 0.0, rel=rel),
                },
            )


# -- bytes over links
#   ------------------------------------------------------------------------------------------------


def cpu_cluster(plan: Plan) -> Cluster:
    """Sites and hosts of a plan, all of CPUs, 50 ms and 1 Gbit/s between any two sites."""
    device = Device(
        kind="cpu",
        backend="cpu",
        memory=2**30,
        sheet=DataSheet(flops={"fp32": 1e11}, bandwidth=1e10),
    )
    hosts = dict.fromkeys((device.site, device.host) for device in plan.devices)
    sites = [
        Site(name=site, hosts=(Host(name=host, devices=(device,) * len(plan.devices)),))
        for site, host in hosts
    ]
    links = (
        Link(a=a.name, b=b.name, rtt_s=0.05, bandwidth=1e8)
        for a, b in itertools.combinations(sites, 2)
    )
    return Cluster(sites=tuple(sites), links=tuple(links))


def link_bytes(folder: Path) -> Iterator[tuple[str, Any]]:
    """Payload bytes of a step between each two hosts, by purpose."""
    plans = dict(HAND_PICKED) | {f"random {seed}": random_plan(seed) for seed in range(20)}
    for name, plan in plans.items():
        network = Network(cpu_cluster(plan), plan.devices, engine("farspan"))
        costs = Costs(models.graph(plan.model), plan.train, network)
        yield (
            f"bytes {name}",
            {
                exchange.purpose: {
                    f"{a} - {b}": size for (a, b), size in sorted(exchange.by_hosts.items())
                }
                for exchange in traffic(plan, costs)
            },
        )


# -- a small run: its index's answers, and the keys of what commands print
#   ------------------------------------------------------------------------------------------------


def run_command(*words: str) -> Any:
    """What a command prints with `--json`, in this process; None where it prints no object."""
    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            main([*words, "--json"])
        except SystemExit:
            return None
    text = out.getvalue()
    return json.loads(text) if text.startswith("{") else None


def keys_of(value: Any) -> dict[str, Any]:
    """Keys of a JSON value, as nested objects: a list has those of its items, a scalar none.

    Objects whose keys are names or numbers, such as devices, have one entry `*`.
    """
    match value:
        case dict():
            found: dict[str, Any] = {}
            for key, part in sorted(value.items()):
                is_field = re.fullmatch(r"[a-z][a-z_]*[0-9]{0,2}", key)
                name = key if is_field else "*"
                found[name] = _merged(found.get(name, {}), keys_of(part))
            return found
        case list():
            return functools.reduce(_merged, map(keys_of, value), {})
    return {}


def _merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    return {key: _merged(a.get(key, {}), b.get(key, {})) for key in sorted({*a, *b})}


def small_run(folder: Path) -> Iterator[tuple[str, Any]]:
    """The keys of what commands say of a run of four steps, and thirty answers of its index."""
    with desk() as here:
        (here / "own.yaml").write_text(RUN.replace("parallel: {cluster: cluster.yaml}\n", ""))
        for words in RUN_COMMANDS:
            found = run_command(*(word.replace("{run}", "runs/small") for word in words))
            if words[0] == "train":
                shutil.copytree("runs/small", "runs/small-copy")
            yield f"small keys farspan {' '.join(words)}", {"keys": json.dumps(keys_of(found))}
        for query, system in itertools.product(QUESTIONS, SYSTEMS):
            found = run_command("search", query, "--run", "runs/small", "--system", system)
            yield (
                f"small answers {system} {query}",
                {
                    "answers": [
                        {"id": result["id"], "score": bits(result["score"], abs=SCORE_ABS[system])}
                        for result in found["answer"]["results"]
                    ]
                },
            )


# -- the server
#   ------------------------------------------------------------------------------------------------


def openapi(folder: Path) -> Iterator[tuple[str, Any]]:
    from tests.serve.conftest import make_run, running

    with running(make_run(folder / "papers")) as server:
        schema = server.get("/openapi.json").json()
    schema["info"].pop("version", None)
    # As lines, of which none is left out as volatile or as prose.
    yield "openapi", json.dumps(schema, sort_keys=True, indent=1).splitlines()
