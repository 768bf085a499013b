"""One plan that is given, priced: a whole Plan, or a short form that a person wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from farspan import models
from farspan.app import clusters
from farspan.app.plans import check_devices, whole_plan
from farspan.app.updates import Progress, silent
from farspan.domain.cluster import Cluster
from farspan.domain.codec import parse_json, parse_yaml, read_bytes
from farspan.domain.config import RunConfig
from farspan.domain.engine import engine as find_engine
from farspan.domain.escapes import yaml_word
from farspan.domain.plan import Plan
from farspan.domain.problems import Refusal
from farspan.domain.results import Estimate
from farspan.estimate.network import NoLink
from farspan.estimate.price import estimate
from farspan.planning.planfile import check_precision, check_rates, read_short

#: A file, a table in short form, or a plan.
Given = str | os.PathLike[str] | Mapping[str, Any] | Plan
#: Where a plan that stands in no file is refused.
NO_FILE = "the plan"


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
        hosts, fill = (
            {host.name: host for host in self.cluster.hosts},
            find_engine(self.plan.engine).fill,
        )
        return [fill * hosts[at.host].devices[at.index].memory for at in self.plan.devices]

    @property
    def fits(self) -> bool:
        return all(
            part.total <= most for part, most in zip(self.memory, self.capacity, strict=True)
        )

    @property
    def estimate(self) -> Estimate:
        """The estimate alone."""
        return Estimate(**{name: getattr(self, name) for name in Estimate.__struct_fields__})

    def as_json(self) -> dict[str, Any]:
        """One object, as `farspan price --json` prints it."""
        memory = dict(zip(self.devices, (part.total for part in self.memory), strict=True))
        return {
            "engine": self.plan.engine,
            "devices": self.devices,
            "fits": self.fits,
            "estimate": {
                **self.estimate.as_json(),
                "minutes": self.equal_loss_s / 60,
                "memory_bytes": memory,
            },
            "plan": self.plan,
        }


def price_given(
    given: Given,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    engine: str | None = None,
    progress: Progress = silent,
    config: RunConfig | None = None,
) -> PricedPlan:
    """Price one plan on a cluster (None: run.yaml's, or this machine) as an engine would run it
    (None: the plan's own).

    Raises Refusal for what cannot be, at its place in the file.
    """
    if not isinstance(cluster, Cluster) and cluster is not None:
        cluster = clusters.find(os.fspath(cluster))
    if cluster is None and config is not None:
        cluster = clusters.given_cluster(config, reach=False)
    document, where, text = _document(given)

    def plan_on(there: Cluster) -> Plan:
        return _plan(document, where, text, there, engine)

    if cluster is None:
        cluster = _here(plan_on, config, progress)
    plan = plan_on(cluster)
    if not _whole(document):
        check_rates(plan, cluster)
    try:
        priced = estimate(plan, models.graph(plan.model), cluster, find_engine(plan.engine))
    except NoLink as error:
        raise Refusal(
            "cluster-invalid",
            what=f"nothing says how {error.a} reaches {error.b}",
            where="the cluster, links",
            fact="the plan has both, and no link leads from one to the other",
            remedy=(
                f"add to links: {{between: [{yaml_word(error.a)}, {yaml_word(error.b)}], "
                "rtt: 20ms, bandwidth: 1Gbit/s}"
            ),
        ) from None
    figures = {name: getattr(priced, name) for name in Estimate.__struct_fields__}
    return PricedPlan(plan=plan, cluster=cluster, **figures)


def _document(given: Given) -> tuple[object, str, str]:
    """What was given as plain values or a Plan, where it stands, and the text of a file."""
    if isinstance(given, Plan):
        return given, NO_FILE, ""
    if isinstance(given, Mapping):
        return dict(given), NO_FILE, ""
    path = Path(given)
    content = read_bytes(path)
    if path.suffix == ".json":
        return parse_json(content, object, path), str(path), ""
    text = content.decode(errors="replace")
    return parse_yaml(text, path), str(path), text


def _whole(document: object) -> bool:
    """Whether it is a Plan, and no short form of one."""
    return isinstance(document, Plan) or (isinstance(document, dict) and "devices" in document)


def _plan(document: object, where: str, text: str, cluster: Cluster, engine: str | None) -> Plan:
    if isinstance(document, Plan):
        plan = document
    elif isinstance(document, dict) and _whole(document):
        # By what it was made from nothing is priced.
        plan = whole_plan({"inputs": {"cluster": "", "corpus": ""}, **document}, Path(where))
    else:
        plan = read_short(document, where, cluster, text)
    check_devices(plan, cluster, where, "give --cluster the one that the plan is for")
    check_precision(plan, cluster, where)
    return (
        plan if engine is None else msgspec.structs.replace(plan, engine=find_engine(engine).name)
    )


def _here(plan_on: Any, config: RunConfig | None, progress: Progress) -> Cluster:
    """This machine, its devices as fast as a trial of the plan's model shows."""
    from farspan.app.resolving import tried_here

    def asked(cluster: Cluster) -> Any:
        plan = plan_on(cluster)
        return plan.model, plan.train

    return tried_here(config or RunConfig(data="pydocs"), asked, progress)
