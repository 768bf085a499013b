"""One plan that is given, priced: a whole Plan, or a short form that a person wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from farspan import models
from farspan.app import clusters
from farspan.app.plans import check_devices, convert_plan, device_places, planned_devices
from farspan.app.updates import Progress, ignore_update
from farspan.domain.cluster import Cluster, DataSheet, MatmulRate
from farspan.domain.config import RunConfig
from farspan.domain.cost import Estimate
from farspan.domain.engine import load_engine as find_engine
from farspan.domain.escapes import shell_word, yaml_word
from farspan.domain.model import ModelSpec
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.struct_files import parse_json, parse_yaml, read_bytes
from farspan.domain.train import TrainSpec
from farspan.estimate.compute import product_dtype
from farspan.estimate.estimate_plan import estimate
from farspan.estimate.network import NoLink
from farspan.planning.plan_question import precision_of
from farspan.planning.short_plan import read_short_plan

#: A file, a table in short form or a whole one, or a plan.
Given = str | os.PathLike[str] | Mapping[str, Any] | Plan


class PricedPlan(Estimate, frozen=True, kw_only=True):
    """The estimate of a plan, with the plan and the cluster that it was made for."""

    plan: Plan
    cluster: Cluster

    @property
    def devices(self) -> list[str]:
        """`host/backend:index` of each rank, as `--json` names devices."""
        return [f"{at.host}/{at.backend}:{at.index}" for at in self.plan.devices]

    @property
    def capacity(self) -> list[float]:
        """Bytes that a plan may fill on each rank's device."""
        fill = find_engine(self.plan.engine).fill
        devices = planned_devices(self.plan, self.cluster)
        return [fill * device.memory for device in devices]

    @property
    def fits(self) -> bool:
        pairs = zip(self.memory, self.capacity, strict=True)
        return all(part.total <= most for part, most in pairs)

    @property
    def estimate(self) -> Estimate:
        """The estimate alone."""
        return Estimate(**{name: getattr(self, name) for name in Estimate.__struct_fields__})

    def as_json(self) -> dict[str, Any]:
        """Return one object, as `farspan price --json` prints it."""
        totals = [part.total for part in self.memory]
        memory = dict(zip(self.devices, totals, strict=True))
        figures = {"minutes": self.equal_loss_s / 60, "memory_bytes": memory}
        return {
            "engine": self.plan.engine,
            "devices": self.devices,
            "fits": self.fits,
            "estimate": {**self.estimate.as_json(), **figures},
            "plan": self.plan,
        }


def price_given(
    given: Given,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    engine: str | None = None,
    progress: Progress = ignore_update,
    config: RunConfig | None = None,
) -> PricedPlan:
    """Price one plan on a cluster (None: run.yaml's, or this machine) as an engine would run it
    (None: the plan's own).

    Raises Refusal for what cannot be, at its place in the file.
    """
    if not isinstance(cluster, Cluster) and cluster is not None:
        cluster = clusters.find_cluster(os.fspath(cluster))
    if cluster is None and config is not None:
        cluster = clusters.given_cluster(config, reach=False)
    document, where, text = _read_document(given)
    if isinstance(document, dict) and "devices" in document:
        # By what it was made from nothing is priced.
        inputs = {"cluster": "", "corpus": ""}
        document = convert_plan({"inputs": inputs, **document}, Path(where))

    def plan_on(there: Cluster) -> Plan:
        if isinstance(document, Plan):
            plan = document
            check_devices(plan, there, where, "give --cluster the one that the plan is for")
            places = device_places(there)
            used = there.only([places.index((at.host, at.index)) for at in plan.devices])
            precision_of(plan.train.precision, used, "train.precision", where)
        else:
            plan = read_short_plan(document, where, there, text)
        if engine is None:
            return plan
        return replace(plan, engine=find_engine(engine).name)

    if cluster is None:
        from farspan.app.resolving import calibrate_here

        def asked(here: Cluster) -> tuple[ModelSpec, TrainSpec]:
            plan = plan_on(here)
            return plan.model, plan.train

        # This machine, its devices as fast as a trial of the plan's model shows.
        cluster = calibrate_here(config or RunConfig(data="pydocs"), asked, progress)
    plan = plan_on(cluster)
    running = find_engine(plan.engine)
    if not isinstance(document, Plan):
        # Refuse a device of unknown speed.
        devices = planned_devices(plan, cluster)
        for at, device in zip(plan.devices, devices, strict=True):
            if device.times.units or device.learned.pace != 1.0:
                continue
            precision = product_dtype(device, plan.train.precision, running)
            rates: list[DataSheet | MatmulRate] = [device.sheet, *device.times.rates]
            if not any(precision in rate.flops for rate in rates):
                fix = f"flops: {{{shell_word(precision)}: 50e12}}"
                raise Refusal(
                    "cluster-invalid",
                    what=f"nothing says how fast {device.kind} computes {precision}",
                    where=f"the cluster, device {at.host}:{at.index}",
                    fact="it has no flops of that precision, and no measured rates",
                    remedy=f"give its {fix} in the cluster file; or measure: farspan probe",
                )
    try:
        priced = estimate(plan, models.graph(plan.model), cluster, running)
    except NoLink as error:
        host_words = f"{yaml_word(error.a)}, {yaml_word(error.b)}"
        raise Refusal(
            "cluster-invalid",
            what=f"nothing says how {error.a} reaches {error.b}",
            where="the cluster, links",
            fact="the plan has both, and no link leads from one to the other",
            remedy=f"add to links: {{between: [{host_words}], rtt: 20ms, bandwidth: 1Gbit/s}}",
        ) from None
    return PricedPlan(plan=plan, cluster=cluster, **msgspec.structs.asdict(priced))


def _read_document(given: Given) -> tuple[Any, str, str]:
    """Return the plan or its table, where it stands, and the text of a file that has lines."""
    if isinstance(given, Plan | Mapping):
        return given if isinstance(given, Plan) else dict(given), "the plan", ""
    path = Path(given)
    content = read_bytes(path)
    if path.suffix == ".json":
        return parse_json(content, object, path), str(path), ""
    text = content.decode(errors="replace")
    return parse_yaml(text, path), str(path), text
