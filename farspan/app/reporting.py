"""A run's report: what it took beside what was predicted, and what planning again with that would
give."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farspan.app.choosing import question
from farspan.domain.cluster import Cluster, Device, Host
from farspan.domain.cluster_json import load_cluster_json
from farspan.domain.codec import load_yaml, write_atomically
from farspan.domain.config import RunConfig
from farspan.domain.notebook import html_text
from farspan.domain.problems import Refusal, command
from farspan.domain.results import Measurement
from farspan.domain.run import RunFolder

if TYPE_CHECKING:
    from farspan.report.compare import Comparison, Versus
    from farspan.report.history import RunHistory

#: Another plan is named if it reads this share of tokens a second more.
GAIN = 0.01


@dataclass(frozen=True, kw_only=True)
class Report:
    """A run, what it took in all, how its devices compare with their predictions, and the page of
    all that."""

    run: RunHistory
    measurement: Measurement | None
    compared: Comparison | None
    page: Path

    def __str__(self) -> str:
        from farspan.report.text import report

        return report(self.run, self.compared)

    def __repr__(self) -> str:
        from farspan.report.endings import ending

        history = self.run.history
        measured = self.measurement
        ended = ending(history.reason, history.steps[-1].step.step if history.steps else 0)
        loss = None if measured is None else measured.val_loss
        reached = "" if loss is None else f", validation loss {loss:.3f}"
        return f"<Report of {self.run.folder}: {ended}{reached}>"

    def _repr_html_(self) -> str:
        return html_text(f"{self}\n\npage: {self.page}")


def write_report(path: Path, *, page: bool = True) -> Report:
    """The report of the run in a folder; its page is written unless it is there already and is not
    asked for. Raises Refusal (run-untrusted) for a page in a run of somebody else's links."""
    from farspan.launch.trust import require_own_links
    from farspan.report.compare import compare_to_prediction
    from farspan.report.history import open_run
    from farspan.report.measure import measure
    from farspan.report.page import write_page

    if page:
        require_own_links(RunFolder(path))
    run = open_run(path)
    compared = compare_to_prediction(run)
    if page and compared is not None:
        paces = {rank: pace for drift in compared.drifts for rank, pace in drift.paces.items()}
        links = {drift.ends: drift.factor for drift in compared.drifts if drift.ends is not None}
        again = _planned_again(run, paces, links) if paces or links else ""
        compared = msgspec.structs.replace(compared, again=again)
    where = write_page(run, compared) if page else RunFolder(path).report
    return Report(run=run, measurement=measure(run), compared=compared, page=where)


class ChartPicture(msgspec.Struct, frozen=True, kw_only=True):
    """A chart of a run as SVG text; notebooks show it."""

    name: str
    #: What it shows, for readers without pictures.
    text: str
    svg: str

    def __repr__(self) -> str:
        return f"<{self.name}: {self.text}>"

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture as an SVG file, and return its path."""
        write_atomically(Path(path), self.svg.encode())
        return Path(path)


def draw_chart(path: Path, name: str) -> ChartPicture:
    """One of the report's charts of the run at `path`. Raises Refusal (usage) for a name that the
    run has no chart of."""
    from farspan.report.figures import figures
    from farspan.report.history import open_run
    from farspan.report.page import chart_svg

    charts = {chart.name: chart for chart in figures(open_run(path))}
    if name not in charts:
        raise Refusal(
            "usage",
            what=f"the run has no chart {name!r}",
            where=path,
            fact=f"its charts are {', '.join(charts)}" if charts else "it has made no step yet",
            remedy='name one of them, such as run.plot("loss-tokens")',
        )
    chart = charts[name]
    return ChartPicture(name=name, text=chart.text, svg=chart_svg(chart))


def history_records(path: Path) -> list[dict[str, float | int | None]]:
    """A record of each step of the run at `path`, oldest first, with the validation after it."""
    from farspan.report.history import open_run

    history = open_run(path).history
    validated = {event.step: event for event in history.validations}
    records = []
    for timed in history.steps:
        step = timed.step
        validation = validated.get(timed.step.step)
        records.append(
            {
                "step": step.step,
                "time_s": timed.time_s,
                "tokens": timed.tokens,
                "loss": step.loss,
                "lr": step.lr,
                "grad_norm": step.grad_norm,
                "tokens_per_s": step.tokens / step.step_s,
                "memory_bytes": step.memory_bytes,
                "val_loss": None if validation is None else validation.loss,
                "val_bits_per_byte": None if validation is None else validation.bits_per_byte,
            }
        )
    return records


def compare_runs(paths: Sequence[Path]) -> Versus:
    """Two runs or more, side by side; one that is named twice counts once."""
    from farspan.report import compare
    from farspan.report.history import open_run

    if len({path.resolve() for path in paths}) < 2:
        raise Refusal(
            "usage",
            what="one run cannot be compared",
            where="farspan compare",
            fact="name two runs or more",
            remedy=command("report", *paths[:1]),
        )
    return compare.compare_runs([open_run(path) for path in dict.fromkeys(paths)])


def _planned_again(
    run: RunHistory, paces: dict[int, float], links: dict[tuple[str, str], float]
) -> str:
    """What the planner would choose if it knew these ranks' paces, measured over assumed compute
    time, and those of the links between two hosts; "" where it cannot be asked."""
    from farspan import models
    from farspan.domain.engine import engine
    from farspan.estimate.price import estimate
    from farspan.planning.ranking import called

    folder = RunFolder(run.folder)
    plan = run.plan
    try:
        parallel = load_yaml(folder.config, RunConfig).parallel
        cluster = paced(
            load_cluster_json(folder.cluster),
            {
                (plan.devices[rank].host, plan.devices[rank].index): pace
                for rank, pace in paces.items()
            },
            links,
        )
        ranking = question(plan.model, plan.train, cluster, plan.inputs.corpus, parallel).rank(
            cluster
        )
    except Refusal:
        return ""
    if ranking.chosen is None:
        return ""
    best = ranking.candidates[ranking.chosen]
    now = estimate(plan, models.graph(plan.model), cluster, engine(plan.engine))
    speed, old = (priced.tokens_per_s * priced.token_efficiency for priced in (best.estimate, now))
    if (best.plan.replicas, best.plan.devices) == (plan.replicas, plan.devices) or (
        parallel.objective == "time" and speed <= (1 + GAIN) * old
    ):
        return "planned again with this pace, no plan would be faster than this one"
    return (
        f"planned again with this pace, {called(best)} would be chosen: {speed / old:.2g}x as "
        "many tokens a second"
    )


def paced(
    cluster: Cluster,
    paces: dict[tuple[str, int], float],
    links: dict[tuple[str, str], float] | None = None,
) -> Cluster:
    """The cluster whose devices, by host and place in it, take so many times as long to compute,
    and whose links, by two hosts at their ends, to carry messages."""

    def device_of(host: Host, index: int) -> Device:
        device = host.devices[index]
        return device.but(pace=device.learned.pace * paces.get((host.name, index), 1.0))

    slower = []
    for (a, b), pace in (links or {}).items():
        site_a = cluster.site_of(a)
        site_b = cluster.site_of(b)
        pairs = (
            [(a, b)]
            if site_a.name == site_b.name
            else [(x.name, y.name) for x in site_a.hosts for y in site_b.hosts]
        )
        known_links = [link for pair in pairs if (link := cluster.link(*pair)) is not None]
        slower += [msgspec.structs.replace(link, pace=link.pace * pace) for link in known_links]
    # Of two links between the same hosts the first counts.
    return msgspec.structs.replace(cluster.with_devices(device_of), links=(*slower, *cluster.links))
