"""A cell of a bench to a plan and its prediction."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from farspan import models, techniques
from farspan.domain.cluster import Cluster
from farspan.domain.cost import Estimate
from farspan.domain.engine import Engine
from farspan.domain.escapes import shell_word
from farspan.domain.model import ModelSpec
from farspan.domain.plan import Plan, Replica, find_flaw
from farspan.domain.problems import Problem, Refusal
from farspan.domain.struct_files import content_hash, load
from farspan.domain.suggest import advise
from farspan.domain.train import Schedule, TrainSpec
from farspan.domain.units import parse_count
from farspan.estimate.estimate_plan import estimate
from farspan.planning.plan_question import model_of
from farspan.planning.quantities import parse_positive
from farspan.techniques import Task
from farspan_studies.bench.matrix import Cell, Matrix, Shape
from farspan_studies.papers.published import fabric, published_plan

#: Before the name of a plan that the FABRIC paper ran.
PUBLISHED = "published:"
#: Where refusals say that a key is.
MATRIX = "the matrix"


class Case(NamedTuple):
    """What a cell means: the plan with its prediction, or why there is none. `train` is of the
    whole run."""

    cell: Cell
    model: ModelSpec
    cluster: Cluster
    train: TrainSpec
    places: tuple[int, ...]
    made: Plan | Problem
    estimate: Estimate | None


def spec_of(entry: str | Shape) -> ModelSpec:
    """Return the model that a matrix names. Raises Refusal (out-of-range) for one that cannot
    be."""
    if isinstance(entry, str):
        return model_of(entry, "models", MATRIX)
    knobs = {"heads": entry.heads} if entry.heads is not None else {}
    try:
        return models.family(entry.family).shape(
            d_model=entry.d_model,
            layers=entry.layers,
            vocab_size=entry.vocab,
            context=entry.context,
            tied=entry.tied,
            **knobs,
        )
    except ValueError as error:
        raise Refusal(
            "out-of-range",
            what="the matrix names a model that cannot be",
            where="key models",
            fact=str(error),
            remedy="choose d_model as a multiple of heads",
        ) from None


def seq_len_of(cell: Cell, model: ModelSpec) -> int:
    """Tokens of a cell's sequences."""
    return cell.seq_len or model.context


def places_of(cluster: Cluster, devices: str) -> tuple[int, ...] | Problem:
    """Return the devices that a cell means, by place; the Problem device-missing where the cluster
    has them not."""
    everything = [site.name for site in cluster.sites for host in site.hosts for _ in host.devices]
    if devices == "all":
        return tuple(range(len(everything)))
    if devices in everything:
        return tuple(place for place, site in enumerate(everything) if site == devices)
    if devices.isdigit() and 1 <= int(devices) <= len(everything):
        return tuple(range(int(devices)))
    sites = list(dict.fromkeys(everything))
    site_words = ", ".join(map(shell_word, sites))
    return Problem(
        code="device-missing",
        what=f"the cluster has no devices {devices!r}",
        where="key devices",
        fact=f"it has {len(everything)} devices at {', '.join(sites)}",
        remedy=f"use all, 1 to {len(everything)}, or one of {site_words}",
    )


def check_techniques(matrix: Matrix) -> None:
    """Refuse names that are no technique, no published plan and no file."""
    known = [*techniques.technique_names(), *(PUBLISHED + name for name in fabric().plans)]
    for name in matrix.techniques:
        if name not in known and not (name.endswith(".json") and Path(name).is_file()):
            raise Refusal(
                "out-of-range",
                what=f"there is no technique {name!r}",
                where="key techniques",
                fact=f"neither a plan file nor one of {', '.join(known)}",
                remedy=advise(name, known),
            )


def case(cell: Cell, matrix: Matrix, cluster: Cluster, engine: Engine, corpus: str = "") -> Case:
    """Return the plan of a cell, priced on its cluster. Raises Refusal for what the matrix says
    that cannot be."""
    model = spec_of(matrix.models[cell.model])
    available = places_of(cluster, cell.devices)
    places = () if isinstance(available, Problem) else available
    seq_len = seq_len_of(cell, model)
    batch = cell.batch * max(1, len(places))
    tokens = parse_positive(parse_count, matrix.tokens, "tokens", "10M", MATRIX)
    train = TrainSpec(
        steps=max(1, round(tokens / (batch * seq_len))),
        batch=batch,
        seq_len=seq_len,
        precision=cell.precision,
        attention=cell.attention,
        seed=matrix.seed,
        schedule=Schedule(kind="constant"),
    )
    planned: Plan | Problem
    if isinstance(available, Problem):
        planned = available
    elif seq_len > model.context:
        planned = Problem(
            code="out-of-range",
            what=f"{cell.model} has {model.context} positions",
            where="key seq_len",
            fact=f"{seq_len} are asked for",
            remedy=f"set seq_len: [{model.context:d}]",
        )
    else:
        planned = _plan(cell, model, cluster, train, places, engine, corpus)
    estimated = None
    if isinstance(planned, Plan):
        try:
            estimated = estimate(planned, models.graph(model), cluster, engine)
        except (KeyError, ValueError) as error:
            planned = Problem(
                code="cannot-plan",
                what="the plan does not fit this cluster",
                where=str(cell),
                fact=str(error.args[0]),
                remedy="leave this combination out",
            )
    return Case(cell, model, cluster, train, places, planned, estimated)


def _plan(
    cell: Cell,
    model: ModelSpec,
    cluster: Cluster,
    train: TrainSpec,
    places: tuple[int, ...],
    engine: Engine,
    corpus: str,
) -> Plan | Problem:
    only = None if len(places) == len(cluster.devices) else places
    task = Task(model, models.graph(model), cluster, train, engine, corpus, only)
    if cell.technique.endswith(".json"):
        return _of_file(load(Path(cell.technique), Plan), task, cell)
    if not cell.technique.startswith(PUBLISHED):
        return techniques.plan(cell.technique, task)
    published = fabric()
    settings = msgspec.structs.replace(
        published.settings,
        sequence=train.seq_len,
        rows_per_device=cell.batch,
        precision=cell.precision,
    )
    name = cell.technique.removeprefix(PUBLISHED)
    if len(places) % (stages := published.plans[name].stages):
        return Problem(
            code="cannot-plan",
            what=f"the published plan {name} has {stages} equal stages",
            where=str(cell),
            fact=f"there are {len(places)} devices",
            remedy=f"choose a multiple of {stages:d} devices",
        )
    try:
        plan = published_plan(name, published.plans[name], model, cluster.only(places), settings)
    except ValueError as error:  # What was published divides rows and devices in its own way.
        return Problem(
            code="cannot-plan",
            what=f"the published plan {name} cannot be made here",
            where=str(cell),
            fact=str(error),
            remedy="choose heads that the devices divide, and a batch that 4 microbatches do",
        )
    return msgspec.structs.replace(
        plan,
        train=train,
        devices=task.devices,
        inputs=task.inputs,
        engine=engine.name,
        replicas=tuple(_gathered_singly(replica) for replica in plan.replicas),
    )


def _gathered_singly(replica: Replica) -> Replica:
    """ZeRO as it was published gathers weights tensor by tensor; our runtime gathers them in the
    buckets in which their gradients are summed, which Alpa sums in one."""
    single = tuple(
        stage
        if stage.zero == 0
        else msgspec.structs.replace(
            stage, grad_sync=msgspec.structs.replace(stage.grad_sync, bucket_bytes=None)
        )
        for stage in replica.stages
    )
    return msgspec.structs.replace(replica, stages=single)


def _of_file(plan: Plan, task: Task, cell: Cell) -> Plan | Problem:
    """Return a plan that a file holds, where the cell asks for what it was made for."""
    train = task.train
    unlike = {
        "the model": plan.model != task.model,
        "the devices": {(at.host, at.index) for at in plan.devices}
        != {(at.host, at.index) for at in task.devices},
        **{
            name: getattr(plan.train, name) != getattr(train, name)
            for name in ("batch", "seq_len", "precision", "attention", "compile")
        },
    }
    differs = ", ".join(name for name, other in unlike.items() if other)
    if differs or (wrong := find_flaw(plan)):
        return Problem(
            code="cannot-plan",
            what=f"{cell.technique} is of another setting",
            where=str(cell),
            fact=f"unlike: {differs}" if differs else wrong,
            remedy="make a plan for this one: farspan plan -o PLAN.JSON",
        )
    return msgspec.structs.replace(plan, train=train, inputs=task.inputs)


def key_of(matrix: Matrix, priced: Case, cluster_hash: str) -> str:
    """Return what a row must have for it to be an answer to a cell: its settings and all that they
    mean."""
    plan = priced.made if isinstance(priced.made, Plan) else priced.made.code
    what = (plan.replicas, plan.sync, plan.devices) if isinstance(plan, Plan) else plan
    return content_hash(
        priced.cell, priced.model, priced.train, cluster_hash, what, matrix.steps, matrix.seed
    )
