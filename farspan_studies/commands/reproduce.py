"""Compare predictions with what papers printed: their plans, priced under the engine that ran
them."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from farspan.cli.console import Console
from farspan.domain.cluster import Cluster
from farspan.domain.cost import Estimate
from farspan.domain.engine import Engine, load_engine
from farspan.domain.model import ModelSpec
from farspan.domain.train import TrainSpec
from farspan.report.tables import table_lines

HELP = "compare predictions with what others measured and published"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paper",
        choices=("fabric", "slm-cost", "published"),
        help="arXiv 2602.02632, arXiv 2410.19456, or runs and block times of many sources",
    )


def run(given: argparse.Namespace, console: Console) -> None:
    {"fabric": _fabric, "slm-cost": _slm_cost, "published": _published}[given.paper](console)


def _fabric(console: Console) -> None:
    from farspan_studies.papers import fabric_study, findings
    from farspan_studies.papers.published import fabric, mean_error

    used = load_engine("alpa2022")
    published = fabric()
    cells = fabric_study.cells(used, best_plan)
    scored = fabric_study.score(cells)
    left_out = fabric_study.leave_one_out(used)
    known = fabric_study.one_cell_known(used)
    moved = fabric_study.sensitivity(used)
    known_median = statistics.median(abs(error) for by in known.values() for error in by.values())
    errors = [abs(cell.error) for cell in cells if cell.counted and cell.error is not None]
    open_cells = fabric_study.open_cells(cells)
    rest = [
        (c.tflops, c.published_tflops)
        for c in cells
        if c.published_tflops is not None and not c.counted
    ]
    answer = {
        "cells": [{**msgspec.to_builtins(cell), "inside": cell.inside} for cell in cells],
        "mape": fabric_study.mape(cells),
        "median": statistics.median(errors),
        "largest": max(errors),
        "parameters": parameters(used),
        "settings": published.settings,
        "software": published.software,
        "plans": published.plans,
        "verdicts": scored,
        "leave_one_out": left_out,
        "open_inside": sum(bool(cell.inside) for cell in open_cells),
        "open": len(open_cells),
        "one_cell_known": known,
        "one_cell_known_median": known_median,
        "tflops_error": mean_error(rest),
        "sensitivity": moved,
        "findings": findings.findings(cells),
    }
    _say_fabric(console, answer, cells)
    console.answer(answer)


def _say_fabric(console: Console, answer: dict[str, Any], cells: Sequence[Any]) -> None:
    settings = answer["settings"]
    console.write_line(
        f"arXiv 2602.02632 under engine alpa2022. Assumed: sequences of {settings.sequence} "
        "tokens, "
        f"{settings.rows_per_device} a device, {settings.microbatches} microbatches, "
        f"{settings.precision}, "
        f"{settings.epochs} epochs of {settings.tokens_per_epoch:,} tokens ({settings.source})."
    )
    table = Table(
        "slice",
        "GPUs",
        "model",
        "technique",
        ">published",
        ">predicted",
        ">error",
        "ran / fits",
        ">ours",
    )
    for cell in cells:
        minutes = cell.published_minutes is not None
        printed = (
            f"{cell.published_minutes:.0f} min"
            if minutes
            else _number(cell.published_tflops, "TF/s")
        )
        own = (
            f"{cell.minutes:.0f} min"
            if minutes or cell.published_tflops is None
            else f"{cell.tflops:.2f} TF/s"
        )
        error = (
            cell.error
            if minutes
            else cell.tflops / cell.published_tflops - 1
            if cell.published_tflops
            else None
        )
        table.add(
            cell.slice,
            cell.gpus,
            cell.model,
            cell.technique,
            printed,
            own,
            "" if error is None else f"{error:+.0%}",
            f"{cell.published_status} / {cell.short or 'ok'}",
            _number(cell.best_minutes, "min"),
        )
    table.say(console)
    for line in _fabric_summary(answer):
        console.write_line(line)
    _say_rest(console, answer, ("mape", "largest_change", "verdicts_right"))


def _fabric_summary(answer: dict[str, Any]) -> list[str]:
    score = answer["verdicts"]
    known = answer["one_cell_known"]
    out = ", ".join(f"{name} {error:.1%}" for name, error in answer["leave_one_out"].items())
    links = "; ".join(
        f"{name} " + ", ".join(f"{kind} {error:+.0%}" for kind, error in by.items())
        for name, by in known.items()
    )
    return [
        f"Twelve cells of the first three slices: mean error {answer['mape']:.1%}, median "
        f"{answer['median']:.1%}, "
        f"largest {answer['largest']:.1%}; left out of the fit: {out}.",
        f"Out of memory: {score.right} of {score.of} verdicts right, balanced accuracy "
        f"{score.balanced:.0%}; "
        f"'gpt2L fails' has {score.baseline}, the paper's contradictions leave {score.ceiling}.",
        f"Last two slices: {answer['open_inside']} of {answer['open']} cells inside their "
        "interval.",
        f"TFLOP/s of the other rows: mean error {answer['tflops_error']:.0%}.",
        "One Data cell a link known: median error of the others "
        f"{answer['one_cell_known_median']:.1%} ({links}).",
    ]


def _slm_cost(console: Console) -> None:
    from farspan_studies.papers import cost_study
    from farspan_studies.papers.published import cost_study as published

    used = load_engine("torch2024")
    study = published()
    cells = cost_study.study_cells(used)
    surface = cost_study.surface(used)
    errors = [abs(cell.error) for cell in cells if cell.held_out]
    answer = {
        "cells": cells,
        "mape": statistics.fmean(errors),
        "median": statistics.median(errors),
        "fitted_mape": cost_study.study_error(cells, study.fitted_on),
        "parameters": parameters(used),
        "unit": study.unit,
        "price_ratios": study.price_ratios,
        "sensitivity": cost_study.study_sensitivity(used),
        "findings": cost_study.study_findings(surface),
        "surface": surface,
    }
    console.write_line(
        f"arXiv 2410.19456 under engine torch2024, A100-80GB. Unit: {study.unit}. {study.note}."
    )
    table = Table(
        "model", "scheme", ">GPUs", ">published", ">predicted", ">error", ">batch", "attention", ""
    )
    for cell in cells:
        table.add(
            cell.model[4:],
            cell.scheme,
            str(cell.devices),
            f"{cell.published:,.0f}",
            f"{cell.predicted:,.0f}",
            f"{cell.error:+.0%}",
            str(cell.batch),
            cell.attention,
            "held out" if cell.held_out else "fitted",
        )
    table.say(console)
    console.write_line(
        f"Mean error: {answer['mape']:.1%} on {', '.join(study.held_out)}, which were held out; "
        f"{answer['fitted_mape']:.1%} on {', '.join(study.fitted_on)}."
    )
    _say_surface(console, surface)
    _say_rest(console, answer, ("fitted", "held_out"))
    console.answer(answer)


def _published(console: Console) -> None:
    """Return runs that nothing was fitted to, each priced as a user gets it: from the catalogue
    alone."""
    from farspan_studies.papers import unseen_runs

    rows = unseen_runs.unseen_runs()
    blocks = unseen_runs.unseen_blocks()
    table = Table("run", "GPUs", "plan", "", "engine", ">measured", ">predicted", ">error", "")
    for row in rows:
        table.add(
            row.id,
            f"{row.gpus} {row.gpu.removeprefix('NVIDIA ')}",
            row.parallel,
            row.precision,
            row.engine,
            f"{row.measured_s:.3g} s",
            f"{row.predicted_s:.3g} s",
            f"{row.error:+.0%}",
            "" if row.inside else "outside its interval",
        )
    table.say(console)
    by_engine = {
        name: [row for row in rows if row.engine == name]
        for name in sorted({row.engine for row in rows})
    }
    scores = {
        "all": unseen_runs.score(rows),
        **{name: unseen_runs.score(own) for name, own in by_engine.items()},
    }
    for name, one in scores.items():
        console.write_line(
            f"{name}: {one.runs} runs, median error {one.median:.1%} ({one.usual_median:.1%} if "
            "all had "
            f"{unseen_runs.USUAL_MFU:.0%} MFU), {one.inside:.0%} inside intervals that are "
            f"{one.width:.2f} to 1 wide; "
            f"interval score {one.interval_score:.2f}."
        )
    sources = unseen_runs.source_scores(rows)
    _say_sources(console, sources)
    assumed = [row for row in rows if row.assumed_gbit is not None]
    _say_assumed(console, assumed)
    kinds = unseen_runs.block_scores(blocks)
    console.write_line(
        "Blocks, median error by GPU from the data sheet, and with one other shape known:"
    )
    table = Table("GPU", "", ">times", ">data sheet", ">one known")
    for kind in kinds:
        known = "" if kind.known_median is None else f"{kind.known_median:.0%}"
        table.add(kind.gpu, kind.precision, str(kind.times), f"{kind.median:.0%}", known)
    table.say(console)
    console.answer(
        {
            "cells": rows,
            "median": scores["all"].median,
            "source_median": statistics.median(one.median for one in sources),
            "scores": scores,
            "sources": sources,
            "assumed": unseen_runs.score(assumed),
            "blocks": blocks,
            "block_scores": kinds,
        }
    )


def _say_sources(console: Console, sources: Sequence[Any]) -> None:
    """Median errors by source, and their median."""
    over = statistics.median(one.median for one in sources)
    usual = statistics.median(one.usual_median for one in sources)
    console.write_line(
        f"By source: {len(sources)} sources, median of their median errors {over:.1%} "
        f"({usual:.1%} if all had the same MFU)."
    )
    table = Table("source", ">runs", ">median error", ">inside")
    for one in sources:
        table.add(one.origin, str(one.runs), f"{one.median:.1%}", f"{one.inside:.0%}")
    table.say(console)


def _say_assumed(console: Console, rows: Sequence[Any]) -> None:
    """How far off runs on several hosts are whose source states no network."""
    from farspan_studies.papers.unseen_runs import score

    own = score(rows)
    console.write_line(
        f"{own.runs} runs on several hosts state no network, so that what is assumed between hosts "
        f"decides: median error {own.median:.1%}, {own.inside:.0%} inside."
    )


def _say_surface(console: Console, surface: Sequence[Any]) -> None:
    """Return the four figures: the best over what each does not show, for every GPU."""
    from farspan_studies.papers.cost_study import best

    shown = {
        "by GPUs": "devices",
        "by sequences a device on 8 GPUs": "batch",
        "by scheme on 8 GPUs": "scheme",
        "by attention on 8 GPUs": "attention",
    }
    for title, axis in shown.items():
        values = list(dict.fromkeys(getattr(setting, axis) for setting in surface))
        table = Table("GPU", "model", *(f">{value}" for value in values))
        for gpu, model in dict.fromkeys((setting.gpu, setting.model) for setting in surface):
            own = [setting for setting in surface if (setting.gpu, setting.model) == (gpu, model)]
            own = own if axis == "devices" else [setting for setting in own if setting.devices == 8]
            tops = [
                best([setting for setting in own if getattr(setting, axis) == value])
                for value in values
            ]
            table.add(
                gpu, model[4:], *("-" if top is None else f"{top.plotted:,.0f}" for top in tops)
            )
        console.write_line(f"Predicted, {title}:")
        table.say(console)


def _say_rest(console: Console, answer: dict[str, Any], columns: Sequence[str]) -> None:
    for finding in answer["findings"]:
        console.write_line(f"- {finding}")
    console.write_line("Fitted constants (all global):")
    for parameter in answer["parameters"]:
        console.write_line(
            f"  {parameter['name']} = {parameter['value']:.4g}: {parameter['fitted_on']}"
        )
    table = Table("constant", "moved to", *(f">{column}" for column in columns))
    for row in answer["sensitivity"]:
        cells = [
            f"{row[column]}" if isinstance(row[column], int) else f"{row[column]:.1%}"
            for column in columns
        ]
        table.add(str(row["constant"]), f"{row['factor']:.0%}", *cells)
    table.say(console)


def parameters(used: Engine) -> list[dict[str, Any]]:
    """Return the engine's fitted constants: name, value, and what they were fitted on."""
    from farspan_studies.papers.calibrate import constant

    return [
        {"name": name, "value": constant(used, name), "fitted_on": on}
        for name, on in used.fitted.items()
    ]


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.4g} {unit}"


def best_plan(model: ModelSpec, cluster: Cluster, train: TrainSpec) -> Estimate | None:
    """Return what our own best plan would take under our own engine, on the cluster or a part of
    it."""
    from farspan.planning.rank_plans import rank_plans

    ranking = rank_plans(model, cluster, train, load_engine("farspan"))
    return None if ranking.chosen is None else ranking.candidates[ranking.chosen].estimate


class Table:
    """Rows of text in aligned columns: to the right where a column's name begins with `>`."""

    def __init__(self, *columns: str) -> None:
        self.right = [column.startswith(">") for column in columns]
        self.rows = [[column.removeprefix(">") for column in columns]]

    def add(self, *cells: str) -> None:
        self.rows.append(list(cells))

    def say(self, console: Console) -> None:
        right = [place for place, is_right in enumerate(self.right) if is_right]
        for line in table_lines(self.rows[0], self.rows[1:], right=right):
            console.write_line(f"  {line}".rstrip())
