"""Loss curves, answers of an index, the server's OpenAPI, keys and types of every JSON object, and
bytes over each link.

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
from unittest import mock

from msgspec.structs import replace

from farspan import models
from farspan.app.indexing import open_index
from farspan.cli.main import main
from farspan.domain.cluster import Cluster, DataSheet, Device, Host, Link, Site
from farspan.domain.engine import load_engine
from farspan.domain.plan import Plan
from farspan.domain.run import RunFolder
from farspan.domain.train import Muon, Regularization
from farspan.estimate.network import Network
from farspan.estimate.stage import Costs
from farspan.estimate.traffic import traffic
from farspan.retrieval import pooling
from farspan.retrieval.hybrid_ranking import System
from farspan.retrieval.search import search
from tests.golden.commands import RUN, desk
from tests.runtime import jobs
from tests.runtime.fleet import Fleet
from tests.runtime.plans import HAND_PICKED
from tests.runtime.random_plans import random_plan
from tests.runtime.verify import Case

#: fp32 sums in another order, over a few steps; numbers of bf16 have 8 bits.
LOSS_REL = {"fp32": 1e-4, "bf16": 2e-2}
#: Scores of words are made without a model. Fused ones count cosines in their standard deviations,
#: which are near 0.1 here.
SCORE_ABS = {"bm25": 1e-6, "model": 1e-4, "fused": 1e-3}

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
    "Document 12",
    "document 39 life",
    "year",
    "people people people",
    "the day after the year",
    "SCHOOL",
    "group of families",
    "life",
    "a thing of the world",
    "way of life",
    "time time day",
    "state school",
    "lives and times",
    "one word that no document has: zebra",
    "group thing way day",
    "time, year, people, way, day, thing, life, world, school, state, family, group",
    "who goes to school?",
    "day 3",
    "family",
    "world",
)
assert len(QUESTIONS) == 30
SYSTEMS: tuple[System, ...] = ("bm25", "model", "fused")

#: Commands whose keys the trained run below shows. `{run}` is its folder.
RUN_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("train", "own.yaml", "--run", "{run}"),
    ("status", "{run}"),
    ("logs", "{run}"),
    ("report", "{run}"),
    ("compare", "{run}", "{run}-copy"),
    ("resume", "{run}"),
    ("generate", "time", "--run", "{run}", "--tokens", "3"),
    ("embed", "{run}"),
    ("search", "time", "--run", "{run}"),
    ("search", "--run", "{run}", "--eval"),
    ("export", "{run}"),
    ("prepare", "run.yaml"),
    ("select", "own.yaml"),
    ("doctor",),
)
#: Commands of which no answer is in the dump, and why.
LEFT_OUT = {
    "ask": "it needs a language model; tests/serve/test_ask.py has one that stands in",
    "bench": "it measures for minutes",
    "cluster up": "it needs hosts behind ssh; tests/launch/test_cluster_up.py has some",
    "cluster status": "as cluster up",
    "cluster down": "as cluster up",
    "cluster export": "its files name paths of this machine; tests/launch/test_cluster_export.py",
    "cluster secure": "it makes interfaces; tests/launch/test_cluster_secure.py has a lab",
    "cluster tune": "it sets the kernel's buffers; tests/launch/test_cluster_tune.py has a lab",
    "chaos": "it trains a run for minutes, with faults",
    "demo": "it is `train`, `embed` and `search` on the built-in corpus, for minutes",
    "index": "it is `embed` without a run; tests/cli/test_index.py has its answer",
    "eval": "it needs a trained run; tests/app/test_evaluation.py has its answer",
    "fabric offers": "it needs fablib and the testbed; tests/fabric has a stand-in",
    "fabric new": "as fabric offers",
    "fabric import": "as fabric offers",
    "fabric extend": "as fabric offers",
    "fabric delete": "as fabric offers",
    "lab up": "it needs network namespaces, which not every machine allows",
    "lab status": "it needs a lab",
    "lab exec": "it needs a lab",
    "lab link": "it needs a lab",
    "lab down": "it needs a lab",
    "mcp": "it runs until its input ends; tests/serve/test_mcp.py talks to it",
    "probe": "its measurements take a quarter of a minute",
    "slurm": "it needs Slurm; tests/slurm has one",
    "serve": "it runs until it is stopped; its OpenAPI is a part of its own",
    "stop": "it needs a run that has not ended; its answer is that of `logs`",
    "tune": "it fits for half a minute; its manifest is that of `embed`",
    # Other answers of commands that are run here.
    "doctor --cluster": "it measures the links of a cluster",
    "report BENCH": "it needs a bench",
    "train --detach": "it leaves a job behind",
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
    """Losses and gradient norms of every step and the last validation loss of twenty trainings."""
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
    """Payload bytes of a step between each two hosts, by purpose, as the price counts them."""
    plans = dict(HAND_PICKED) | {f"random {seed}": random_plan(seed) for seed in range(20)}
    plans |= {f"curve {name}": curve_plan(name) for name in CURVES}
    for name, plan in plans.items():
        yield f"bytes {name}", priced_bytes(plan, cpu_cluster(plan), "farspan")


def priced_bytes(plan: Plan, cluster: Cluster, engine_name: str) -> dict[str, dict[str, Any]]:
    """Payload bytes of a step between each two hosts of a cluster, by purpose, exact."""
    network = Network(cluster, plan.devices, load_engine(engine_name))
    costs = Costs(models.graph(plan.model), plan.train, network)
    return {
        exchange.purpose: {
            f"{a} - {b}": int(size) if size.is_integer() else bits(size)
            for (a, b), size in sorted(exchange.by_hosts.items())
        }
        for exchange in traffic(plan, costs)
    }


# -- a small run: its index's answers, and the keys of what commands print
#   ------------------------------------------------------------------------------------------------


def run_command(*words: str) -> Any:
    """What a command prints with `--json`, in this process; None where it prints no object."""
    out = io.StringIO()
    said = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            main([*words, "--json"])
        except SystemExit:
            return None
    text = out.getvalue()
    return json.loads(text) if text.startswith("{") else None


#: Fields that map names, such as those of devices or packages, to values of one type.
MAPPINGS = {"devices", "flops", "kinds", "leave_one_out", "measured", "plans", "splits", "versions"}


def keys_of(value: Any) -> dict[str, Any]:
    """Types of a JSON value, with the keys of an object and the types of a list's items: such as
    `{"object": {"step": {"number": {}}, "names": {"array": {"string": {}}}}}`.

    Where keys are no fields, but names or numbers, there is one entry `*`.
    """
    match value:
        case dict():
            return {"object": _fields_of(value)}
        case list():
            return {"array": functools.reduce(_merged, map(keys_of, value), {})}
        case bool():
            return {"boolean": {}}
        case int() | float():
            return {"number": {}}
        case str():
            return {"string": {}}
    return {"null": {}}


def _fields_of(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, part in sorted(value.items()):
        types = keys_of(part)
        if key in MAPPINGS and isinstance(part, dict):
            types = {"object": {"*": functools.reduce(_merged, map(keys_of, part.values()), {})}}
        name = key if re.fullmatch(r"[a-z][a-z_]*[0-9]{0,2}", key) else "*"
        found[name] = _merged(found.get(name, {}), types)
    return found


def _merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    return {key: _merged(a.get(key, {}), b.get(key, {})) for key in sorted({*a, *b})}


def small_run(folder: Path) -> Iterator[tuple[str, Any]]:
    """The keys of what commands print of a run of four steps, and what its index answers to thirty
    questions."""
    fp32 = mock.patch.object(pooling, "bf16_is_fast", return_value=False)
    with desk() as here, fp32:
        # One CPU, whatever else the machine has, also of units for bf16.
        (here / "own.yaml").write_text(
            RUN.replace("{cluster: cluster.yaml}", "{workers: 1, device: cpu}")
        )
        for words in RUN_COMMANDS:
            found = run_command(*(word.replace("{run}", "runs/small") for word in words))
            if words[0] == "train":
                shutil.copytree("runs/small", "runs/small-copy")
            yield f"small keys farspan {' '.join(words)}", {"keys": json.dumps(keys_of(found))}
        with open_index(RunFolder(here / "runs" / "small")) as index:
            for query, system in itertools.product(QUESTIONS, SYSTEMS):
                answer = search(index, query, 5, system)
                yield (
                    f"small answers {system} {query}",
                    {
                        "answers": [
                            {"id": result.id, "score": bits(result.score, abs=SCORE_ABS[system])}
                            for result in answer.results
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
    # As lines, so that no field is left out as volatile. Docstrings are no part of the API.
    documented = without_descriptions(schema)
    yield "openapi", json.dumps(documented, sort_keys=True, indent=1).splitlines()


def without_descriptions(schema: Any) -> Any:
    """Return a schema without the sentences that describe its parts."""
    if isinstance(schema, list):
        return [without_descriptions(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: without_descriptions(part)
        for key, part in schema.items()
        if not (key == "description" and isinstance(part, str))
    }
