"""A run's report: measured figures next to the predicted ones, and what planning again with them
would give."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from farspan.app.choose_plan import selection_task
from farspan.domain.cluster import Cluster, Device, Host
from farspan.domain.cluster_json import load_cluster_json
from farspan.domain.config import RunConfig
from farspan.domain.cost import Measurement
from farspan.domain.notebook import html_text
from farspan.domain.problems import Refusal, command
from farspan.domain.run import RunFolder
from farspan.domain.struct_files import load_yaml, write_atomically

if TYPE_CHECKING:
    from farspan.launch.slurm_accounting import Accounting
    from farspan.report.compare import Comparison, Versus
    from farspan.report.history import RunHistory

#: Another plan is proposed if it reads this share of tokens a second more.
MIN_SPEED_GAIN = 0.01


@dataclass(frozen=True, kw_only=True)
class Report:
    """A run, what it took in all, how its devices compare with their predictions, and the page of
    all that."""

    run: RunHistory
    measurement: Measurement | None
    compared: Comparison | None
    page: Path
    #: What its Slurm jobs used; None of other runs, and where Slurm keeps no accounts.
    accounting: Accounting | None = None

    def __str__(self) -> str:
        from farspan.report.text import run_report

        text = run_report(self.run, self.compared)
        return text if self.accounting is None else f"{text}\n\n{self.accounting}"

    def __repr__(self) -> str:
        from farspan.report.run_endings import ending

        history = self.run.history
        last_step = history.steps[-1].step.step if history.steps else 0
        ended = ending(history.reason, last_step)
        loss = None if self.measurement is None else self.measurement.val_loss
        reached = "" if loss is None else f", validation loss {loss:.3f}"
        return f"<Report of {self.run.folder}: {ended}{reached}>"

    def _repr_html_(self) -> str:
        return html_text(f"{self}\n\npage: {self.page}")


def write_report(path: Path, *, page: bool = True) -> Report:
    """Return the report of the run in a folder; its page is written unless it is there already and
    is not asked for. Raises Refusal (run-untrusted) for a page in a run of foreign links."""
    from farspan.launch.slurm_accounting import read_accounting
    from farspan.launch.slurm_allocation import recorded_jobs
    from farspan.launch.trust import require_own_links
    from farspan.report.compare import compare_to_prediction
    from farspan.report.history import open_run
    from farspan.report.measurement import measure_run
    from farspan.report.page import write_page

    if page:
        require_own_links(RunFolder(path))
    run = open_run(path)
    compared = compare_to_prediction(run)
    if page and compared is not None:
        rank_slowdowns: dict[int, float] = {}
        link_slowdowns: dict[tuple[str, str], float] = {}
        for drift in compared.drifts:
            rank_slowdowns.update(drift.paces)
            if drift.ends is not None:
                link_slowdowns[drift.ends] = drift.factor
        again = ""
        if rank_slowdowns or link_slowdowns:
            again = _describe_replan(run, rank_slowdowns, link_slowdowns)
        compared = replace(compared, again=again)
    where = write_page(run, compared) if page else RunFolder(path).report
    accounting = read_accounting(recorded_jobs(RunFolder(path)))
    return Report(
        run=run,
        measurement=measure_run(run),
        compared=compared,
        page=where,
        accounting=accounting,
    )


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
    """Draw one of the report's charts of the run at `path`. Raises Refusal (usage) for a name that
    the run has no chart of."""
    from farspan.report.figures import run_charts
    from farspan.report.history import open_run
    from farspan.report.page import chart_svg

    charts = {chart.name: chart for chart in run_charts(open_run(path))}
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
    """Return a record of each step of the run at `path`, oldest first, with its validation."""
    from farspan.report.history import open_run

    history = open_run(path).history
    validated = {event.step: event for event in history.validations}
    records = []
    for timed in history.steps:
        step = timed.step
        record: dict[str, float | int | None] = {
            "step": step.step,
            "time_s": timed.time_s,
            "tokens": timed.tokens,
            "loss": step.loss,
            "lr": step.lr,
            "grad_norm": step.grad_norm,
            "tokens_per_s": step.tokens / step.step_s,
            "memory_bytes": step.memory_bytes,
            "val_loss": None,
            "val_bits_per_byte": None,
        }
        if step.step in validated:
            validation = validated[step.step]
            record["val_loss"] = validation.loss
            record["val_bits_per_byte"] = validation.bits_per_byte
        records.append(record)
    return records


def compare_runs(paths: Sequence[Path]) -> Versus:
    """Compare two runs or more, side by side; one that is named twice counts once."""
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


def _describe_replan(
    run: RunHistory,
    rank_slowdowns: dict[int, float],
    link_slowdowns: dict[tuple[str, str], float],
) -> str:
    """Return the choice of a planner that knows the measured over the assumed compute time
    of ranks, and the same of links between two hosts; "" where it cannot be asked."""
    from farspan import models
    from farspan.domain.engine import load_engine
    from farspan.estimate.estimate_plan import estimate
    from farspan.planning.ranking import candidate_name

    folder = RunFolder(run.folder)
    plan = run.plan
    try:
        parallel = load_yaml(folder.config, RunConfig).parallel
        device_slowdowns = {}
        for rank, slowdown in rank_slowdowns.items():
            device = plan.devices[rank]
            device_slowdowns[device.host, device.index] = slowdown
        cluster = slow_cluster(load_cluster_json(folder.cluster), device_slowdowns, link_slowdowns)
        task = selection_task(plan.model, plan.train, cluster, plan.inputs.corpus, parallel)
        ranking = task.rank(cluster)
    except Refusal:
        return ""
    if ranking.chosen is None:
        return ""
    best = ranking.candidates[ranking.chosen]
    graph = models.graph(plan.model)
    now = estimate(plan, graph, cluster, load_engine(plan.engine))
    speed = best.estimate.tokens_per_s * best.estimate.token_efficiency
    old_speed = now.tokens_per_s * now.token_efficiency
    is_same = best.plan.replicas == plan.replicas and best.plan.devices == plan.devices
    is_no_faster = parallel.objective == "time" and speed <= (1 + MIN_SPEED_GAIN) * old_speed
    if is_same or is_no_faster:
        return "planned again with this pace, no plan would be faster than this one"
    return (
        f"planned again with this pace, {candidate_name(best)} would be chosen: "
        f"{speed / old_speed:.2g}x as many tokens a second"
    )


def slow_cluster(
    cluster: Cluster,
    device_slowdowns: dict[tuple[str, int], float],
    link_slowdowns: dict[tuple[str, str], float] | None = None,
) -> Cluster:
    """Slow a cluster's devices (by host and index there) and its links (by the two hosts at their
    ends) by these factors."""

    def slow_device(host: Host, index: int) -> Device:
        device = host.devices[index]
        slowdown = device_slowdowns.get((host.name, index), 1.0)
        return device.but(pace=device.learned.pace * slowdown)

    slower_links = []
    for (a, b), slowdown in (link_slowdowns or {}).items():
        hosts_a = [a]
        hosts_b = [b]
        site_a = cluster.site_of(a)
        site_b = cluster.site_of(b)
        if site_a.name != site_b.name:
            # One link joins the two sites: it is slower between all their hosts.
            hosts_a = [host.name for host in site_a.hosts]
            hosts_b = [host.name for host in site_b.hosts]
        for ends in product(hosts_a, hosts_b):
            link = cluster.link(*ends)
            if link is not None:
                slower_links.append(replace(link, pace=link.pace * slowdown))
    slower = cluster.with_devices(slow_device)
    # Of two links between the same hosts the first counts.
    return replace(slower, links=(*slower_links, *cluster.links))
