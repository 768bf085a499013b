"""A plan in short form (`domain.planfile`) made whole on a cluster: its devices, its model and its
training.

What it leaves open or cannot mean is refused at its place in the file, with the nearest that can
be.
"""

from __future__ import annotations

import itertools
import platform
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from farspan import models
from farspan.domain.cluster import Cluster
from farspan.domain.codec import convert
from farspan.domain.engine import engine
from farspan.domain.escapes import key_word, shell_word, yaml_word
from farspan.domain.model import ModelSpec
from farspan.domain.plan import Inputs, Plan, PlannedDevice, Sync
from farspan.domain.planfile import ModelEntry, PlanFile, PlanRefusals
from farspan.domain.problems import Refusal
from farspan.domain.suggest import any_of, suggest
from farspan.domain.train import Precision, TrainSpec
from farspan.domain.units import counted, parse_count
from farspan.estimate.compute import product_dtype
from farspan.planning.choose_model import DEFAULT_FAMILY
from farspan.planning.model_speed import common_precisions
from farspan.planning.plan_stages import StageReader
from farspan.planning.quantities import PARAMETERS, asked_rows, positive
from farspan.planning.question import CONTEXT, VOCABULARY, model_of
from farspan.planning.size import KNOBS, shape_for


def read_short(table: object, where: str, cluster: Cluster, text: str = "") -> Plan:
    """The plan that a table in short form means on a cluster. Raises Refusal, with lines of the
    `text` that the table was read from."""
    file, refusals = convert(table, PlanFile, where, text), PlanRefusals(where)
    sync = _sync(file, refusals)
    _check_engine(file, refusals)
    places = _Places(cluster, refusals).of(file)
    used = sorted(itertools.chain.from_iterable(places.values()))
    model = _model(file, refusals)
    train = _train(file, refusals, model, cluster.only(used))
    devices = _devices(cluster, used)
    ranks = {stage: tuple(used.index(place) for place in own) for stage, own in places.items()}
    reader = StageReader(models.graph(model), train, [device.site for device in devices], refusals)
    replicas = tuple(
        reader.replica(
            at, entry, batch, [ranks[f"{at}stages[{s}]"] for s in range(len(entry.stages))]
        )
        for (at, entry), batch in zip(
            file.parts, _batches(file, refusals, train.batch), strict=True
        )
    )
    return Plan(
        technique="given",
        model=model,
        train=train,
        replicas=replicas,
        devices=devices,
        engine=file.engine,
        inputs=Inputs(cluster="", corpus=""),
        sync=sync,
    )


def _check_engine(file: PlanFile, refusals: PlanRefusals) -> None:
    try:
        engine(file.engine)
    except Refusal as refusal:
        problem = refusal.problem
        remedy = problem.remedy.replace("--engine", "set engine:")
        raise refusals.value("engine", problem.what, problem.fact, remedy) from None


def check_precision(plan: Plan, cluster: Cluster, where: str) -> None:
    """Refuse a precision that a device of the plan does not compute in hardware."""
    places, precision = [place for place, _ in _planned(plan, cluster)], plan.train.precision
    lacking, devices = cluster.only(places).lacking(precision), cluster.devices
    for place, name in _planned(plan, cluster):
        device = devices[place]
        if device.kind in lacking:
            raise PlanRefusals(where).value(
                "train.precision",
                f"{device.kind} ({name}) does not compute {precision} in hardware",
                f"it computes {', '.join(device.sheet.dtypes)}",
                f"set train.precision: {common_precisions(cluster.only(places))[0]}",
            )


def check_rates(plan: Plan, cluster: Cluster) -> None:
    """Refuse a device of which nothing says how fast it computes."""
    devices, running = cluster.devices, engine(plan.engine)
    for place, name in _planned(plan, cluster):
        device = devices[place]
        precision = product_dtype(device, plan.train.precision, running)
        timed = device.times.units or any(precision in rate.flops for rate in device.times.rates)
        if not (timed or precision in device.sheet.flops or device.learned.pace != 1.0):
            raise Refusal(
                "cluster-invalid",
                what=f"nothing says how fast {device.kind} computes {precision}",
                where=f"the cluster, device {name}",
                fact="it has no flops of that precision, and no measured rates",
                remedy=(
                    f"give its flops in the cluster file: flops: {{{precision}: 50e12}}; or "
                    "measure: farspan probe"
                ),
            )


def _planned(plan: Plan, cluster: Cluster) -> list[tuple[int, str]]:
    """Each device's place in the cluster, and its name, by rank."""
    places = {name: place for place, name in enumerate(_names(cluster))}
    names = [f"{at.host}:{at.index}" for at in plan.devices]
    return [(places[name], name) for name in names]


def _names(cluster: Cluster) -> list[str]:
    """`host:index` of every device, in the cluster's order."""
    return [f"{host.name}:{index}" for host in cluster.hosts for index in range(len(host.devices))]


def _devices(cluster: Cluster, used: Sequence[int]) -> tuple[PlannedDevice, ...]:
    every = [
        PlannedDevice(
            host=host.name,
            site=site.name,
            backend=device.backend,
            index=index,
            threads=device.slot.threads,
            kind=device.kind,
        )
        for site in cluster.sites
        for host in site.hosts
        for index, device in enumerate(host.devices)
    ]
    return tuple(every[place] for place in used)


class _Places:
    """Devices that a file names, as places in the cluster."""

    def __init__(self, cluster: Cluster, refusals: PlanRefusals) -> None:
        self._refusals, self._names = refusals, _names(cluster)
        self._counts = {host.name: len(host.devices) for host in cluster.hosts if host.devices}

    def of(self, file: PlanFile) -> dict[str, tuple[int, ...]]:
        """The places of each stage, by the stage's own place in the file; no device may be named
        twice."""
        places: dict[str, tuple[int, ...]] = {}
        for at, replica in file.parts:
            if not replica.stages:
                raise self._refusals.mismatch(
                    f"{at}stages",
                    "there are no stages",
                    "a plan has one at least",
                    f"add stages: [{{on: [{yaml_word(next(iter(self._counts)))}]}}]",
                )
            for s, stage in enumerate(replica.stages):
                where, items = (
                    f"{at}stages[{s}].on",
                    (stage.on,) if isinstance(stage.on, str) else stage.on,
                )
                own = tuple(place for item in items for place in self._ranged(item, where))
                if not own:
                    raise self._refusals.mismatch(
                        where,
                        "the stage has no devices",
                        "it needs one at least",
                        f"set {key_word(where)}: [{yaml_word(self._names[0])}]",
                    )
                places[f"{at}stages[{s}]"] = own
        self._demand_once(places)
        return places

    def _demand_once(self, places: dict[str, tuple[int, ...]]) -> None:
        first: dict[int, str] = {}
        for stage, place in ((stage, place) for stage, own in places.items() for place in own):
            if place in first:
                used = set(itertools.chain.from_iterable(places.values()))
                free = next(
                    (name for other, name in enumerate(self._names) if other not in used), None
                )
                name = self._names[place]
                raise self._refusals.mismatch(
                    f"{stage}.on",
                    f"the device {name} is used twice",
                    f"{first[place]} has it already",
                    f"write {shell_word(free)}, which no stage has"
                    if free
                    else f"take {shell_word(name)} out of {key_word(stage)}.on",
                )
            first[place] = stage

    def _ranged(self, item: str, where: str) -> list[int]:
        """The places of `host`, `host:2` or `host:0-3`; `localhost` is this machine."""
        match = re.fullmatch(r"\s*(.*?)(?::(\d+)(?:-(\d+))?)?\s*", item, re.DOTALL)
        assert match is not None
        host = match[1] if match[1] != "localhost" or match[1] in self._counts else platform.node()
        count = self._counts.get(host)
        if count is None:
            meant = suggest(host, self._counts, synonyms=())
            items = [item.replace(host, best, 1) for best in meant]
            raise self._refusals.value(
                where,
                f"there is no host {host!r} with devices",
                f"known: {', '.join(self._counts)}",
                f"write {any_of(items)}" if items else "name one of them",
            )
        first = int(match[2] or 0)
        last = int(match[3] or match[2] or count - 1)
        if not first <= last < count:
            low, high = (min(bound, count - 1) for bound in sorted((first, last)))
            raise self._refusals.value(
                where,
                f"there are no devices {item}",
                f"{host} has {counted(count, 'device')}, 0 to {count - 1}",
                f"write {shell_word(host)}:{low:d}" + (f"-{high:d}" if high > low else ""),
            )
        start = self._names.index(f"{host}:0")
        return list(range(start + first, start + last + 1))


# -- model and training
#   ------------------------------------------------------------------------------------------------


def _model(file: PlanFile, refusals: PlanRefusals) -> ModelSpec:
    entry = file.model
    if isinstance(entry, str):
        return model_of(entry, "model", refusals.file)
    given = {
        key: value for key, value in msgspec.structs.asdict(entry).items() if value is not None
    }
    sources = [key for key in ("path", "preset", "params") if key in given]
    rivals = list(given) if sources[:1] == ["path"] else sources
    if len(rivals) > 1:
        a, b = (rivals[0], rivals[1]) if rivals[0] == sources[0] else (sources[0], rivals[0])
        raise refusals.value(
            f"model.{b}",
            f"model.{b} cannot stand beside model.{a}",
            f"{a} sets the same",
            f"remove model.{key_word(b)} or model.{key_word(a)}",
        )
    if entry.path is not None:
        return model_of(entry.path, "model.path", refusals.file)
    knobs = {key: given[key] for key in KNOBS if key in given}
    try:
        return _shape(file, entry, knobs, refusals)
    except ValueError as error:
        raise refusals.value(
            "model",
            "a model of this shape cannot be built",
            str(error),
            "change one of these keys under model",
        ) from None


def _shape(
    file: PlanFile, entry: ModelEntry, knobs: dict[str, Any], refusals: PlanRefusals
) -> ModelSpec:
    """The model by its preset, by its parameters, or by layers and width. Raises ValueError where
    knobs do not fit."""
    if entry.preset is not None:
        base = model_of(entry.preset, "model.preset", refusals.file)
        if entry.family not in (None, base.family):
            raise refusals.value(
                "model.family",
                f"the preset {entry.preset} is of another family",
                f"it is of family {base.family}",
                "remove model.family",
            )
        if "heads" in knobs and base.kv_heads == base.heads:
            knobs.setdefault("kv_heads", knobs["heads"])
        return models.family(base.family).shape(
            vocab_size=entry.vocab_size or base.vocab_size,
            context=entry.context or base.context,
            **{key: getattr(base, key) for key in KNOBS} | knobs,
        )
    family, vocab_size = entry.family or DEFAULT_FAMILY, entry.vocab_size or VOCABULARY
    context = entry.context or file.train.seq_len or CONTEXT
    if entry.params is not None:
        target = positive(
            parse_count, entry.params, "model.params", "30M", refusals.file, PARAMETERS
        )
        return shape_for(family, target, vocab_size=vocab_size, context=context, knobs=knobs)
    for key, example in (("layers", 24), ("d_model", 1024)):
        if key not in knobs:
            raise refusals.value(
                f"model.{key}",
                f"the model has no {key}",
                "nothing else says how large it is",
                f"add {key_word(key)}: {example:d}, or name a preset",
            )
    return models.family(family).shape(vocab_size=vocab_size, context=context, **knobs)


def _train(file: PlanFile, refusals: PlanRefusals, model: ModelSpec, used: Cluster) -> TrainSpec:
    entry = file.train
    seq_len = entry.seq_len or model.context
    if seq_len > model.context:
        raise refusals.value(
            "train.seq_len",
            f"the model cannot read {seq_len} tokens at once",
            f"it has {model.context} positions",
            f"set train.seq_len: {model.context:d}",
        )
    precision: Precision = (
        common_precisions(used)[0] if entry.precision == "auto" else entry.precision
    )
    return TrainSpec(
        steps=entry.steps,
        batch=asked_rows(entry.batch, seq_len, "train.batch", refusals.file),
        seq_len=seq_len,
        precision=precision,
        attention=entry.attention,
        recompute=entry.recompute,
        wan_bits=entry.wan_bits,
    )


def _batches(file: PlanFile, refusals: PlanRefusals, total: int) -> list[int]:
    """Sequences a step of each replica: as given, and an equal part of what is left."""
    given = [replica.batch for _, replica in file.parts]
    unsaid, rest = given.count(None), total - sum(batch or 0 for batch in given)
    if rest == 0 and not unsaid:
        return [batch or 0 for batch in given]
    if not unsaid or rest < unsaid or rest % unsaid:
        fits = total - rest + (max(1, round(rest / unsaid)) * unsaid if unsaid else 0)
        shared = (
            f"{unsaid} of them share the rest, {rest}" if unsaid else f"they read {total - rest}"
        )
        raise refusals.mismatch(
            "train.batch",
            f"{counted(len(given), 'replica')} cannot read {total} sequences a step",
            shared,
            f"set train.batch: {fits:d}",
        )
    return [batch or rest // unsaid for batch in given]


def _sync(file: PlanFile, refusals: PlanRefusals) -> Sync | None:
    """How the replicas meet, which they must."""
    if file.replicas and file.stages:
        raise refusals.mismatch(
            "stages",
            "stages stand beside replicas",
            "each replica has its own",
            "move stages into one of the replicas",
        )
    if len(file.replicas) > 1 and file.sync is None:
        raise refusals.mismatch(
            "sync",
            f"the {len(file.replicas)} replicas never meet",
            "there is no sync",
            "add sync: {every: 100}",
        )
    return file.sync
