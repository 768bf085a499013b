"""Two papers' runs as rows of a bench: what they printed is measured, what the estimator says of
their plans predicted.

So their tables and figures are drawn as those of one's own measurements are.
"""

from __future__ import annotations

from typing import Any

import msgspec

from farspan import models
from farspan._version import __version__
from farspan.domain.engine import Engine, load_engine
from farspan.domain.model import count_parameters
from farspan.domain.struct_files import content_hash
from farspan_studies.bench.matrix import Cell, Row, figures
from farspan_studies.papers import cost_study, fabric_study
from farspan_studies.papers.published import alpa_tflops
from farspan_studies.papers.published import cost_study as study
from farspan_studies.papers.published import fabric as published

#: The engine of what each paper ran, and where it is found.
ENGINES = {"fabric": "alpa2022", "slm-cost": "torch2024"}
SOURCES = {"fabric": "arXiv 2602.02632", "slm-cost": "arXiv 2410.19456"}


def rows(name: str) -> list[Row]:
    """Return the rows of one of ENGINES."""
    return (fabric if name == "fabric" else slm_cost)(load_engine(ENGINES[name]))


def slices(predicted: bool) -> list[fabric_study.Case]:
    """Of every slice of the FABRIC study, all devices: the plan of gpt2m with the fewest minutes,
    as printed or as predicted."""
    fewest: dict[str, tuple[float, fabric_study.Case]] = {}
    used = load_engine(ENGINES["fabric"])
    for case in fabric_study.cases():
        row = case.row
        if (
            row.model == "gpt2m"
            and row.minutes is not None
            and row.devices == len(case.cluster.devices) == 4
        ):
            minutes = fabric_study.minutes(case, used) if predicted else row.minutes
            if row.slice not in fewest or minutes < fewest[row.slice][0]:
                fewest[row.slice] = (minutes, case)
    return [case for _, case in fewest.values()]


def sizes() -> list[tuple[str, float, float, float]]:
    """Family, parameters, width and layers of the models that the cost study fitted, and of its own
    four."""
    paper = study()
    fitted = [
        (size.family, 1e9 * size.billions, float(size.d_model), float(size.layers))
        for size in paper.sizes
    ]
    own = [models.preset(name).spec for name in (*paper.fitted_on, *paper.held_out)]
    return [
        *fitted,
        *(
            ("the study's own", float(count_parameters(spec)), spec.d_model, spec.layers)
            for spec in own
        ),
    ]


def fabric(engine: Engine) -> list[Row]:
    """arXiv 2602.02632: every row of its tables and figures, on both machines and on one."""
    settings = published().settings
    table_rows = []
    run = float(settings.epochs * settings.tokens_per_epoch)
    for case, cell in zip(fabric_study.cases(), fabric_study.cells(engine), strict=True):
        train = case.plan.train
        devices = case.row.devices
        flops = 1e12 * alpa_tflops(case.model, train.batch, train.seq_len, 1.0, 1)
        steps = run / train.tokens_per_step
        step_s = None
        if case.row.minutes is not None:
            step_s = case.row.minutes * 60 / steps
        elif case.row.tflops is not None:
            step_s = flops / (case.row.tflops * 1e12 * devices)
        low, high = cell.interval
        predicted = cell.minutes * 60 / steps if cell.status == "ok" else None
        hosts = [host.name for host in case.cluster.hosts]
        link = case.cluster.link(*hosts) if len(hosts) == 2 else None
        row = _row(
            "fabric",
            Cell(
                cluster=case.row.slice,
                model=case.row.model,
                technique=case.row.technique,
                devices=str(devices),
                batch=settings.rows_per_device,
                seq_len=train.seq_len,
                precision=train.precision,
                attention="vanilla",
                repeat=0,
            ),
            status="ok" if case.row.status.startswith("ok") else "oom",
            cause=case.row.note or case.row.source,
            used=devices,
            rows=train.batch,
            parameters=count_parameters(case.model),
            step_tokens=train.tokens_per_step,
            step_flops=flops,
            run_tokens=run,
            step_s=step_s,
            predicted=predicted,
            interval=(low, high),
            memory=cell.memory_bytes,
            rtt_s=None if link is None else link.rtt_s,
        )
        # Only what was printed: of some rows minutes and TFLOP/s do not agree, of others one is
        # missing.
        printed = {} if case.row.tflops is None else {"tflops_per_device": case.row.tflops}
        table_rows.append(msgspec.structs.replace(row, minutes=case.row.minutes, **printed))
    return table_rows


def slm_cost(engine: Engine) -> list[Row]:
    """arXiv 2410.19456: its grid as predicted, and the points of its figure 3 as printed."""
    paper = study()
    grid_rows = []
    printed = {(point.model, point.scheme, point.devices): point.plotted for point in paper.points}
    tops = {
        (cell.model, cell.scheme, cell.devices, cell.batch, cell.attention): cell.published
        for cell in cost_study.study_cells(engine)
    }
    for priced in cost_study.surface(engine):
        ratio = paper.price_ratios[priced.gpu]
        model = models.preset(priced.model).spec
        tokens = priced.batch * priced.devices * paper.sequence
        usd = ratio * paper.a100_40_usd_per_hour * priced.devices
        key = (priced.model, priced.scheme, priced.devices, priced.batch, priced.attention)
        plotted = tops.get(key) if priced.gpu == "a100-80" and key[:3] in printed else None
        grid_rows.append(
            _row(
                "slm-cost",
                Cell(
                    cluster=priced.gpu,
                    model=priced.model,
                    technique=priced.scheme,
                    devices=str(priced.devices),
                    batch=priced.batch,
                    seq_len=paper.sequence,
                    precision="bf16",
                    attention="sdpa" if priced.attention == "sdpa" else "vanilla",
                    repeat=0,
                ),
                status="ok" if priced.fits else "oom",
                cause="" if priced.fits else "predicted to need more memory",
                used=priced.devices,
                rows=priced.batch * priced.devices,
                parameters=count_parameters(model),
                step_tokens=tokens,
                step_flops=1e12
                * alpa_tflops(model, priced.batch * priced.devices, paper.sequence, 1.0, 1),
                run_tokens=20.0 * count_parameters(model),
                step_s=None if plotted is None else tokens / (plotted * priced.devices * ratio),
                predicted=tokens / (priced.plotted * priced.devices * ratio)
                if priced.fits
                else None,
                interval=(1.0, 1.0),
                memory=priced.memory_bytes,
                usd_per_hour=usd,
            )
        )
    return grid_rows


def as_plotted(grid_rows: list[Row]) -> list[Row]:
    """Return the cost study's printed points alone: each is the best over batch and attention,
    which are not told (0)."""
    return [
        msgspec.structs.replace(
            row, cell=msgspec.structs.replace(row.cell, batch=0, attention="sdpa")
        )
        for row in grid_rows
        if row.step_s is not None
    ]


def _row(
    name: str,
    cell: Cell,
    *,
    step_s: float | None,
    predicted: float | None,
    interval: tuple[float, float],
    memory: int,
    **more: Any,
) -> Row:
    """Return a row whose printed step, where there is one, counts as measured."""
    low, high = interval
    row = Row(
        matrix=name,
        cell=cell,
        key=content_hash(cell),
        cluster_hash=cell.cluster,
        model_hash=cell.model,
        plan_hash=None,
        predicted_s=predicted,
        predicted_low_s=None if predicted is None else low * predicted,
        predicted_high_s=None if predicted is None else high * predicted,
        predicted_memory_bytes=memory,
        machine=f"as printed in {SOURCES[name]}",
        farspan=__version__,
        **more,
    )
    if step_s is None:
        return row
    derived = msgspec.structs.asdict(figures(row, step_s))
    return msgspec.structs.replace(row, step_s=step_s, steps_s=(step_s,), **derived)
