"""`farspan reproduce slm-cost`: the grid of arXiv 2410.19456 priced under the engine that ran it.

The plotted unit is tokens a second and GPU divided by the GPU's price ratio (A100-40GB = 1); every
plotted point is the best over sequences a device and attention, so a prediction is the best over
the same settings, among those that fit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import msgspec

from farspan import models
from farspan.domain.cluster import Cluster
from farspan.domain.engine import Engine
from farspan.domain.plan import GradSync, Inputs, Mesh, Plan, Replica, Stage
from farspan.domain.train import TrainSpec
from farspan.estimate.estimate_plan import price
from farspan.estimate.network import Network
from farspan.estimate.stage import Costs
from farspan_studies.papers.calibrate import constant, fit, with_constants
from farspan_studies.papers.published import (
    Point,
    catalog_cluster,
    cost_study,
    mean_error,
    planned_devices,
)

#: What is fitted, all on the 100M and 1B models.
FITTED = ("composed_bandwidth",)
MOVED = (
    *FITTED,
    "efficiency",
    "launch_s",
    "bandwidth",
    "contention",
    "overlap",
    "local_rate",
    "overhead",
)
ATTENTION = ("sdpa", "vanilla")
#: PyTorch DDP's default bucket (arXiv 2006.15704).
BUCKET_BYTES = 25 * 2**20


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the grid, priced."""

    gpu: str
    model: str
    scheme: str
    devices: int
    batch: int
    attention: str
    fits: bool
    memory_bytes: int
    #: In the plotted unit, and tokens for a dollar at the A100-40GB's price in the catalogue.
    plotted: float
    tokens_per_usd: float


class StudyCell(msgspec.Struct, frozen=True, kw_only=True):
    """A published point beside its prediction, which is that of the best setting that fits."""

    model: str
    scheme: str
    devices: int
    published: float
    predicted: float
    error: float
    held_out: bool
    batch: int
    attention: str


def _plan(model: str, scheme: str, cluster: Cluster, batch: int, attention: str) -> Plan:
    study = cost_study()
    spec = models.preset(model).spec
    devices = planned_devices(cluster)
    train = TrainSpec(
        steps=10,
        batch=batch * len(devices),
        seq_len=study.sequence,
        precision="bf16",
        attention="sdpa" if attention == "sdpa" else "vanilla",
    )
    zero = study.schemes[scheme]
    mesh = Mesh(ranks=tuple(range(len(devices))), shape=(len(devices),), axes=("data",))
    # FSDP reduces in its own bf16, DDP the fp32 gradients of fp32 weights.
    sync = GradSync(bucket_bytes=BUCKET_BYTES, bits=16 if zero else 32)
    stage = Stage(
        units=(0, models.graph(spec).units),
        mesh=mesh,
        rows=(batch,) * len(devices),
        grad_sync=sync,
        zero=zero,
    )
    return Plan(
        technique=scheme,
        model=spec,
        train=train,
        replicas=(Replica(stages=(stage,)),),
        devices=devices,
        inputs=Inputs(cluster="", corpus=""),
        engine="torch2024",
    )


@functools.cache
def _case(
    gpu: str, model: str, scheme: str, devices: int, batch: int, attention: str
) -> tuple[Plan, Cluster]:
    cluster = catalog_cluster(f"slm-cost/{gpu}").first(devices)
    return _plan(model, scheme, cluster, batch, attention), cluster


def setting(
    engine: Engine, gpu: str, model: str, scheme: str, devices: int, batch: int, attention: str
) -> Setting:
    """One run of the grid priced under an engine."""
    study = cost_study()
    plan, cluster = _case(gpu, model, scheme, devices, batch, attention)
    costs = Costs(models.graph(plan.model), plan.train, Network(cluster, plan.devices, engine))
    priced = price(plan, costs)
    plotted = priced.tokens_per_s / devices / study.price_ratios[gpu]
    return Setting(
        gpu=gpu,
        model=model,
        scheme=scheme,
        devices=devices,
        batch=batch,
        attention=attention,
        fits=priced.memory_bytes <= engine.fill * cluster.devices[0].memory,
        memory_bytes=priced.memory_bytes,
        plotted=plotted,
        tokens_per_usd=plotted * 3600 / study.a100_40_usd_per_hour,
    )


def settings(
    engine: Engine,
    gpu: str,
    model: str,
    scheme: str,
    devices: int,
    attention: Sequence[str] = ATTENTION,
) -> Iterator[Setting]:
    """Yield the settings that the study does not plot: sequences a device, and attention."""
    for batch in cost_study().batches:
        for kind in attention:
            yield setting(engine, gpu, model, scheme, devices, batch, kind)


def best(grid: Iterator[Setting] | Sequence[Setting]) -> Setting | None:
    """Return the setting that fits with the most tokens a dollar."""
    return max(
        (priced for priced in grid if priced.fits), key=lambda priced: priced.plotted, default=None
    )


def study_cells(engine: Engine) -> tuple[StudyCell, ...]:
    """Every published point beside the best setting that fits."""
    study = cost_study()
    cells = []
    for point in study.points:
        own = best(settings(engine, "a100-80", point.model, point.scheme, point.devices))
        predicted = own.plotted if own else 0.0
        cells.append(
            StudyCell(
                model=point.model,
                scheme=point.scheme,
                devices=point.devices,
                published=point.plotted,
                predicted=predicted,
                error=predicted / point.plotted - 1,
                held_out=point.model in study.held_out,
                batch=own.batch if own else 0,
                attention=own.attention if own else "",
            )
        )
    return tuple(cells)


def study_error(cells: Sequence[StudyCell], models_of: Sequence[str]) -> float:
    """Mean error over the points of some models."""
    return mean_error(
        [(cell.predicted, cell.published) for cell in cells if cell.model in models_of]
    )


def fit_study(engine: Engine, rounds: int = 100) -> Engine:
    """Return the engine with `FITTED` fitted on the models that are not held out, by squares of
    logarithms."""
    study = cost_study()
    points = [point for point in study.points if point.model in study.fitted_on]
    return fit(engine, FITTED, lambda tried: _misfit(tried, points), rounds)


def _misfit(engine: Engine, points: Sequence[Point]) -> float:
    if constant(engine, "efficiency") > 1:
        return math.inf
    tops = (
        best(settings(engine, "a100-80", point.model, point.scheme, point.devices))
        for point in points
    )
    return math.fsum(
        math.log(own.plotted / point.plotted) ** 2 if own else math.inf
        for own, point in zip(tops, points, strict=True)
    )


def study_sensitivity(engine: Engine, moved: float = 0.2) -> list[dict[str, object]]:
    """Return the errors on fitted and on held-out models when one constant alone is moved."""
    study = cost_study()
    rows: list[dict[str, object]] = []
    for name in MOVED:
        for factor in (1 - moved, 1 + moved):
            after = study_cells(with_constants(engine, {name: constant(engine, name) * factor}))
            rows.append(
                {
                    "constant": name,
                    "factor": factor,
                    "fitted": study_error(after, study.fitted_on),
                    "held_out": study_error(after, study.held_out),
                }
            )
    return rows


def surface(engine: Engine) -> tuple[Setting, ...]:
    """Return the whole grid: every GPU, model, scheme, count, batch and attention."""
    study = cost_study()
    return tuple(
        priced
        for gpu in study.price_ratios
        for model in dict.fromkeys(point.model for point in study.points)
        for scheme in study.schemes
        for devices in study.devices
        for priced in settings(engine, gpu, model, scheme, devices)
    )


def study_findings(grid: Sequence[Setting]) -> list[str]:
    """Return the study's findings as its priced grid has them, on 8 GPUs of one node."""
    node = [priced for priced in grid if priced.devices == 8]
    names = sorted(
        {priced.model for priced in node}, key=("slm-100m", "slm-500m", "slm-1b", "slm-2b").index
    )
    return [
        *_schemes(node, names),
        _flash(node, names),
        _gpus(node, names),
        _saturation(node, names),
    ]


def _among(grid: Sequence[Setting], **wanted: object) -> list[Setting]:
    return [
        priced
        for priced in grid
        if all(getattr(priced, key) == value for key, value in wanted.items())
    ]


def _top(grid: Sequence[Setting], **wanted: object) -> float:
    own = best(_among(grid, **wanted))
    return own.plotted if own else 0.0


def scheme_ratios(node: Sequence[Setting], names: Sequence[str]) -> dict[str, float]:
    """Tokens a dollar of DDP over the better FSDP, on A100-80GB, for each model."""
    return {
        name: _top(node, gpu="a100-80", model=name, scheme="DDP")
        / max(
            _top(node, gpu="a100-80", model=name, scheme=scheme)
            for scheme in ("FSDP-Full", "FSDP-Grad+Opt")
        )
        for name in names
    }


def flash_gains(node: Sequence[Setting], names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Tokens a dollar with flash attention less vanilla's, both at their best, on A100-80GB, and as
    a factor."""
    gains = {}
    for name in names:
        flash, vanilla = (
            _top(node, gpu="a100-80", model=name, attention=kind) for kind in ATTENTION
        )
        gains[name] = (flash - vanilla, flash / vanilla)
    return gains


def flash_batches(node: Sequence[Setting], names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the largest batch that fits with flash attention and with vanilla, any scheme, on
    A100-80GB."""
    return {
        name: (
            max(
                priced.batch
                for priced in _among(node, gpu="a100-80", model=name, attention="sdpa")
                if priced.fits
            ),
            max(
                priced.batch
                for priced in _among(node, gpu="a100-80", model=name, attention="vanilla")
                if priced.fits
            ),
        )
        for name in names
    }


def gpu_ratios(node: Sequence[Setting], names: Sequence[str]) -> dict[str, float]:
    """Tokens a dollar of H100 over the better A100."""
    return {
        name: _top(node, gpu="h100", model=name)
        / max(_top(node, gpu="a100-40", model=name), _top(node, gpu="a100-80", model=name))
        for name in names
    }


def _schemes(node: Sequence[Setting], names: Sequence[str]) -> list[str]:
    ratios = scheme_ratios(node, names)
    by_model = ", ".join(f"{name[4:]} {ratio:.2f}" for name, ratio in ratios.items())
    largest = {
        scheme: max(
            priced.batch
            for priced in _among(node, gpu="a100-80", model=names[-1], scheme=scheme)
            if priced.fits
        )
        for scheme in ("DDP", "FSDP-Full")
    }
    return [
        f"DDP over the better FSDP, tokens a dollar on 8 A100-80GB: {by_model}.",
        f"At large batch FSDP alone runs {names[-1][4:]}: {largest['FSDP-Full']} sequences a "
        "device against DDP's "
        f"{largest['DDP']}.",
    ]


def _flash(node: Sequence[Setting], names: Sequence[str]) -> str:
    gains = flash_gains(node, names)
    by_model = ", ".join(
        f"{name[4:]} {more:+,.0f} ({factor:.2f} times)" for name, (more, factor) in gains.items()
    )
    fits = ", ".join(
        f"{name[4:]} {flash} and {vanilla}"
        for name, (flash, vanilla) in flash_batches(node, names).items()
    )
    return (
        f"Flash less vanilla attention, both at their best: {by_model}; largest batch a device "
        "with flash and with "
        f"vanilla: {fits}."
    )


def _gpus(node: Sequence[Setting], names: Sequence[str]) -> str:
    by_model = ", ".join(
        f"{name[4:]} {ratio:.2f}" for name, ratio in gpu_ratios(node, names).items()
    )
    return f"H100 over the better A100, tokens a dollar: {by_model}."


def saturation(node: Sequence[Setting], name: str) -> tuple[Setting, Setting]:
    """Of DDP with flash on 8 A100-80GB: the smallest batch within 10 % of the best, and the largest
    that fits."""
    own = [
        priced
        for priced in _among(node, gpu="a100-80", model=name, scheme="DDP", attention="sdpa")
        if priced.fits
    ]
    most = max(priced.plotted for priced in own)
    return min(
        (priced for priced in own if priced.plotted >= 0.9 * most), key=lambda priced: priced.batch
    ), own[-1]


def _saturation(node: Sequence[Setting], names: Sequence[str]) -> str:
    by_model = []
    for name in names:
        enough, largest = saturation(node, name)
        by_model.append(
            f"{name[4:]} at {enough.batch} sequences a device ({enough.memory_bytes / 1e9:.0f} GB; "
            f"{largest.batch} fit with {largest.memory_bytes / 1e9:.0f} GB)"
        )
    return f"Within 10 % of the most tokens a dollar: {', '.join(by_model)}."
