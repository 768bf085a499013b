"""Seeded questions for the planner: clusters of the catalogue's devices, models and trainings of
many shapes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import yaml
from msgspec.structs import replace

from farspan.domain.cluster import Cluster
from farspan.domain.clusterfile import load_cluster
from farspan.domain.model import ModelSpec
from farspan.domain.plan import Plan, PlannedDevice
from farspan.domain.train import TrainSpec
from farspan.planning.plan_question import model_of
from tests.runtime.random_plans import random_plan

KINDS = ("a30", "t4", "rtx6000", "a100-80", "a100-40", "h100", "cpu-avx2", "cpu-avx512")
MODELS = ("gpt2", "gpt2m", "gpt2L", "30M", "350M", "1.3B")


class World(NamedTuple):
    name: str
    model: ModelSpec
    cluster: Cluster
    train: TrainSpec
    objective: str


def world(seed: int, folder: Path) -> World:
    """A cluster of one to three sites with up to four devices each, some of them heterogeneous, and
    a job for it."""
    rng = random.Random(seed)
    known = _known()
    sites = {}
    for s in range(rng.choice((1, 1, 2, 2, 2, 3))):
        hosts = {}
        for h in range(rng.choice((1, 1, 2))):
            kinds = [rng.choice(known) for _ in range(rng.choice((1, 1, 2)))]
            devices = [_entry(kinds[i % len(kinds)]) for i in range(rng.randint(1, 3))]
            hosts[f"h{s}{h}"] = {
                "devices": devices,
                "cpus": rng.choice((8, 32)),
                "memory": rng.choice(("64GB", "512GB")),
            }
        sites[f"s{s}"] = {"hosts": hosts} | ({"lease": "8h"} if rng.random() < 0.2 else {})
    names = list(sites)
    links = [
        {
            "between": [a, b],
            "rtt": f"{rng.choice((1, 8, 57, 103))}ms",
            "bandwidth": rng.choice(("1Gbit/s", "10Gbit/s")),
        }
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    ]
    path = folder / f"world-{seed}.yaml"
    path.write_text(yaml.safe_dump({"sites": sites, "links": links}))
    cluster = load_cluster(path)
    model = model_of(rng.choice(MODELS))
    common = [
        p
        for p in ("fp32", "bf16", "fp16")
        if all(p in device.sheet.dtypes for device in cluster.devices)
    ]
    train = TrainSpec(
        steps=rng.choice((10, 1000, 20_000)),
        batch=rng.choice((8, 16, 64, 96)),
        seq_len=min(model.context, rng.choice((128, 512, 1024))),
        precision=rng.choice(common),
        attention=rng.choice(("sdpa", "sdpa", "vanilla")),
        recompute=rng.random() < 0.2,
        wan_bits=rng.choice((32, 32, 16, 8)),
    )
    priced = all(device.usd_per_hour is not None for device in cluster.devices)
    objective = rng.choice(
        ("time", "time", "fewest_devices", *(("cost", "loss_per_dollar") if priced else ()))
    )
    return World(f"world {seed}", model, cluster, train, objective)


def unplanned(seed: int, folder: Path) -> tuple[Plan, Cluster]:
    """A plan that no technique emits, on a cluster of the catalogue's devices with as many sites as
    it has."""
    rng = random.Random(10_000 + seed)
    plan = random_plan(seed)
    kinds = [rng.choice(_known()) for _ in plan.devices]
    at = [device.site for device in plan.devices]
    names = sorted(set(at))
    sites = {
        site: {
            "hosts": {
                f"h-{site}": {
                    "devices": [
                        _entry(kind) for kind, there in zip(kinds, at, strict=True) if there == site
                    ]
                }
            }
        }
        for site in names
    }
    links = [
        {"between": [a, b], "rtt": f"{rng.choice((1, 57))}ms", "bandwidth": "1Gbit/s"}
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    ]
    path = folder / f"unplanned-{seed}.yaml"
    path.write_text(yaml.safe_dump({"sites": sites, "links": links}))
    devices = list[PlannedDevice]()
    count = dict.fromkeys(names, 0)
    for kind, device in zip(kinds, plan.devices, strict=True):
        devices.append(
            replace(device, host=f"h-{device.site}", index=count[device.site], kind=kind)
        )
        count[device.site] += 1
    return replace(plan, devices=tuple(devices)), load_cluster(path)


def _entry(kind: str) -> dict[str, str]:
    """Processors come in all sizes of memory."""
    return {"kind": kind} | ({"memory": "8GB"} if kind.startswith("cpu-") else {})


def _known() -> list[str]:
    from farspan.domain import catalog

    there = catalog.load_devices()
    return [kind for kind in KINDS if kind in there]
