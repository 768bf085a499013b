"""Reports: of a run, what it took beside what was predicted, and what planning again with that would give; of a bench
or a paper, its clusters drawn with their plans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farspan.domain.cluster import Cluster, Device, Host
from farspan.domain.codec import load, load_yaml
from farspan.domain.config import RunConfig
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farspan.domain.bench import Row
    from farspan.domain.plan import Plan
    from farspan.report.compared import Compared
    from farspan.report.drawn import Drawn
    from farspan.report.history import Run

#: Another plan is named if it reads this share of tokens a second more.
GAIN = 0.01


def write_report(path: Path) -> tuple[Run, Compared | None, Path]:
    """A run, what is told of its devices if it has several, and its page, written."""
    from farspan.report.compared import compare
    from farspan.report.history import open_run
    from farspan.report.page import write_page

    run = open_run(path)
    found = compare(run)
    if found is not None:
        paces = {rank: pace for drift in found.drifts for rank, pace in drift.paces.items()}
        links = {drift.ends: drift.factor for drift in found.drifts if drift.ends is not None}
        found = msgspec.structs.replace(found, again=planned_again(run, paces, links) if paces or links else "")
    return run, found, write_page(run, found)


def planned_again(run: Run, paces: dict[int, float], links: dict[tuple[str, str], float]) -> str:
    """What the planner would choose if it knew these ranks' paces, measured over assumed compute time, and those of the
    links between two hosts; "" where it cannot be asked."""
    from farspan import models
    from farspan.cli import selecting
    from farspan.domain.engine import engine
    from farspan.estimate.price import estimate
    from farspan.planning.compare import called

    folder, plan = RunFolder(run.folder), run.plan
    try:
        asked = load_yaml(folder.config, RunConfig).parallel
        cluster = paced(load(folder.cluster, Cluster), {
            (plan.devices[rank].host, plan.devices[rank].index): pace for rank, pace in paces.items()
        }, links)  # fmt: skip
        ranking = selecting.question(plan.model, plan.train, cluster, plan.inputs.corpus, asked).rank(cluster)
    except Refusal:
        return ""
    best = None if ranking.chosen is None else ranking.candidates[ranking.chosen]
    if best is None or best.plan is None or best.estimate is None:
        return ""
    now = estimate(plan, models.graph(plan.model), cluster, engine(plan.engine))
    speed, old = (one.tokens_per_s * one.token_efficiency for one in (best.estimate, now))
    if (best.plan.replicas, best.plan.devices) == (plan.replicas, plan.devices) or (
        asked.objective == "time" and speed <= (1 + GAIN) * old
    ):
        return "planned again with this pace, no plan would be faster than this one"
    return f"planned again with this pace, {called(best)} would be chosen: {speed / old:.2g}x as many tokens a second"


def paced(
    cluster: Cluster, paces: dict[tuple[str, int], float], links: dict[tuple[str, str], float] | None = None
) -> Cluster:
    """The cluster whose devices, by host and place in it, take so many times as long to compute, and whose links, by
    two hosts at their ends, to carry messages."""

    def device_of(host: Host, index: int) -> Device:
        device = host.devices[index]
        return msgspec.structs.replace(device, pace=device.pace * paces.get((host.name, index), 1.0))

    slower = []
    for (a, b), pace in (links or {}).items():
        here, there = cluster.site_of(a), cluster.site_of(b)
        pairs = [(a, b)] if here.name == there.name else [(x.name, y.name) for x in here.hosts for y in there.hosts]
        found = [link for pair in pairs if (link := cluster.link(*pair)) is not None]
        slower += [msgspec.structs.replace(link, pace=link.pace * pace) for link in found]
    # Of two links between the same hosts the first counts.
    return msgspec.structs.replace(cluster.with_devices(device_of), links=(*slower, *cluster.links))


def drawn_slices(*, predicted: bool) -> list[Drawn]:
    """The FABRIC study's slices with their fastest published plans."""
    from farspan.planning.paper_rows import slices

    return [_drawn(case.row.slice, case.plan, case.cluster, f"{case.row.technique} of {case.row.model}")
            for case in slices(predicted)]  # fmt: skip


def drawn_bench(rows: Sequence[Row], folder: Path, *, predicted: bool) -> list[Drawn]:
    """A bench's clusters with the plan of each that was fastest, or was predicted to be."""
    from farspan.cli.benching import Results
    from farspan.cli.trying import as_tried
    from farspan.report.drawn import Drawn

    results, found = Results(folder), list[Drawn]()
    for name in dict.fromkeys(row.cell.cluster for row in rows):
        here = [row for row in rows if row.cell.cluster == name]
        cluster = results.cluster(here[0].cluster_hash)
        done = [(step_s / row.step_tokens, row) for row in here
                if (step_s := row.predicted_s if predicted else row.step_s) is not None]  # fmt: skip
        top = min(done, key=lambda pair: pair[0])[1] if done else None
        if top is None or top.plan_hash is None:
            found.append(Drawn(name, cluster))
        else:
            told, plan = f"{top.cell.technique} of {top.cell.model}", results.plan(top.plan_hash)
            found.append(_drawn(name, plan, as_tried(results.trials, cluster, top.cluster_hash, plan), told))
    return found


def _drawn(name: str, plan: Plan, cluster: Cluster, told: str) -> Drawn:
    from farspan.estimate.price import price
    from farspan.planning.why import costs_of
    from farspan.report.drawn import Drawn
    from farspan.report.plan_picture import picture

    costs = costs_of(plan, cluster)
    return Drawn(name, cluster, told, picture(plan, price(plan, costs), costs))
