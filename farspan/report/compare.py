"""Compare a run with its prediction, device by device, and runs with each other.

Losses are put in order only where they can be: nats a token only of runs with the same tokenizer
that read the same validation text, bits a byte also across tokenizers where all of that text was
read. Time, money and memory are put in order only of one model, time and money only of as many
steps of as many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Any, NamedTuple

import msgspec

from farspan.domain.codec import content_hash, read_bytes
from farspan.domain.problems import Refusal
from farspan.domain.results import IN_STEP, Measurement, Validated
from farspan.domain.run import RunFolder
from farspan.domain.units import counted, format_bytes, format_seconds, format_usd, short_time
from farspan.domain.words import listed, stage_words
from farspan.report import expected as predicting
from farspan.report import losses
from farspan.report.drift import Drift, drifts
from farspan.report.history import RunHistory
from farspan.report.measure import measure
from farspan.report.plan_picture import Mark, part_words
from farspan.report.traces import Traces

PARTS = {"compute": "compute", "communication": "communication", "waiting": "waiting for others"}
ALIGNED = (
    "A row begins where its device began the step: clocks of hosts are not compared. Communication "
    "holds the waiting for devices that come to it later."
)
#: What is compared of the environment, apart from the machine that a run was on.
ENVIRONMENT = ("farspan", "commit", "python", "torch", "device", "threads")


class Figure(NamedTuple):
    """A field of Measurement, which Estimate may have too. `order` is what must be alike in runs
    for the least to be best; figures without one are never put in order."""

    what: str
    field: str
    show: Callable[[Any], str]
    order: str = ""


FIGURES = (
    Figure("tokens/s within steps", "tokens_per_s", "{:,.0f}".format),
    Figure("TFLOP/s a device", "tflops_per_device", "{:.3g}".format),
    Figure("MFU", "mfu", "{:.1%}".format),
    Figure("run time", "run_s", format_seconds, "work"),
    Figure("steps", "steps", "{:,.0f}".format),
    Figure("peak memory", "memory_bytes", format_bytes, "memory"),
    Figure("money", "usd", format_usd, "work"),
    Figure("validation loss, nats a token", "val_loss", "{:.4f}".format, "nats"),
    Figure("validation loss, bits a byte", "bits_per_byte", "{:.4f}".format, "bits"),
)


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step: the measured median, the quartiles of the steps, predicted with its
    bounds."""

    measured_s: float
    half: tuple[float, float]
    predicted_s: float
    bounds: tuple[float, float]

    @property
    def inside(self) -> bool:
        return self.bounds[0] <= self.measured_s <= self.bounds[1]


class DeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One device. What its missing log would say is None or empty."""

    rank: int
    name: str
    words: str
    stage: int
    memory: int | None
    memory_predicted: int
    measured: tuple[Mark, ...] = ()
    predicted: tuple[Mark, ...] = ()


class StepPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the step of the slowest device, in seconds; None is not predicted."""

    name: str
    predicted_s: float | None
    measured_s: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A run of several devices beside its prediction. `traced` is the step whose marks the rows
    hold, None without any; `slowest` the row whose step `parts` split."""

    steps: Steps
    rows: tuple[DeviceRow, ...]
    traced: int | None
    traced_s: float
    slowest: DeviceRow | None
    parts: tuple[StepPart, ...]
    drifts: tuple[Drift, ...]
    notes: tuple[str, ...]
    #: What planning again with the measured paces would give, by the planner.
    again: str = ""

    @property
    def ends(self) -> float:
        """Seconds of the longest row."""
        marks = [mark for row in self.rows for mark in (*row.measured, *row.predicted)]
        return max((mark.end for mark in marks), default=0.0)

    @property
    def drawn(self) -> list[DeviceRow]:
        """Rows with a measured step."""
        return [row for row in self.rows if row.measured]


def step_spread(run: RunHistory) -> tuple[float, float, float]:
    """Return the median and the quartiles of the seconds of a run's steps, of which it has some."""
    seconds = [timed.step.step_s for timed in run.history.timed]
    quarters = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return median(seconds), quarters[0], quarters[2]


def compare_to_prediction(run: RunHistory) -> Comparison | None:
    """Return None for a run of one device, or without a step or an estimate of its devices."""
    estimate = run.history.estimate
    plan = run.plan
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    stage_of = {rank: number for number, stage in enumerate(stages) for rank in stage.mesh.ranks}
    if len(stage_of) < 2 or estimate is None or not run.history.steps:
        return None
    if len(estimate.memory) != len(stage_of):
        return None

    # The prediction of each device; a cluster of another version may not be readable.
    costs = None
    notes = []
    try:
        costs = predicting.costs_of_run(RunFolder(run.folder), plan)
    except Refusal as refusal:
        notes.append(f"No predicted rows: {refusal.problem.what} ({refusal.problem.where}).")
    devices = predicting.expected(plan, costs) if costs is not None else {}
    split = predicting.split(plan, estimate, costs)

    # Each device, with its marks in the last step that all of them traced.
    traces = Traces(run)
    shown = traces.steps[-1] if traces.steps else None
    rows = []
    for rank, memory in zip(sorted(stage_of), estimate.memory, strict=True):
        device = plan.devices[rank]
        history = run.histories.get(rank)
        expected = devices.get(rank)
        words = part_words(plan, stage_of[rank])
        if expected is not None and len(stages[expected.stage].rows) > 1:
            words += f"; {counted(expected.rows, 'row')}"
        kind = costs.network.devices[rank].kind if costs is not None else device.backend
        traced = shown is not None and rank in traces.ranks
        row = DeviceRow(
            rank=rank,
            name=f"rank {rank}, {kind} in {device.host}",
            words=words,
            stage=stage_of[rank],
            memory=(history.memory_bytes or None) if history else None,
            memory_predicted=memory.total,
            measured=traces.marks(rank, shown) if traced and shown is not None else (),
            predicted=expected.marks if expected is not None else (),
        )
        rows.append(row)

    # The parts of the slowest device's step, where every device's spans end as its work does.
    slowest = None
    parts = list[StepPart]()
    in_step = all(plan.devices[row.rank].backend in IN_STEP for row in rows)
    if shown is not None and in_step and all(row.measured for row in rows):
        slowest = max(rows, key=lambda row: traces.parts(row.rank, shown)["compute"])
        measured_s = traces.parts(slowest.rank, shown)
        inside_s = devices[slowest.rank].inside_s if slowest.rank in devices else 0.0
        predicted_s = {
            "compute": split.compute_s + inside_s,
            "communication": max(0.0, split.communication_s - inside_s),
            "waiting": split.bubble_s,
        }
        for part, name in {**PARTS, "rest": "not recorded"}.items():
            predicted = predicted_s.get(part)
            parts.append(StepPart(name=name, predicted_s=predicted, measured_s=measured_s[part]))

    # What a reader has to know of the rows.
    if traces.steps:
        notes.append(ALIGNED)
    if plan.sync is not None:
        notes.append("Times of steps leave out the replicas' synchronization.")
    if any(rank in devices and devices[rank].inside_s for rank in traces.ranks):
        notes.append("Passes hold the communication inside them, measured and predicted.")
    if any(plan.devices[rank].backend not in IN_STEP for rank in traces.ranks):
        notes.append("Marks of a GPU show when its kernels were launched.")
    if missing := [row for row in rows if row.rank not in run.histories]:
        names = ", ".join(row.name for row in missing)
        notes.append(f"Logs that were kept on their hosts: {names}.")

    usual_s, *half = step_spread(run)
    low, high = (bound * split.step_s for bound in estimate.interval)
    return Comparison(
        steps=Steps(
            measured_s=usual_s,
            half=(half[0], half[1]),
            predicted_s=split.step_s,
            bounds=(low, high),
        ),
        rows=tuple(rows),
        traced=shown,
        traced_s=0.0 if shown is None else traces.of(traces.ranks[0], shown)[1].step_s,
        slowest=slowest,
        parts=tuple(parts),
        drifts=drifts(run, traces, estimate, split.step_s, devices, costs) if costs else (),
        notes=tuple(notes),
    )


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One thing of every run, as text; the place of the best where they can be put in order and one
    stands out."""

    what: str
    values: tuple[str, ...]
    best: int | None = None


class Versus(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that differ, the number of those that do not, the results, and notes on them."""

    names: tuple[str, ...]
    configuration: tuple[Line, ...]
    same: int
    results: tuple[Line, ...]
    notes: tuple[str, ...]


def compare_runs(runs: Sequence[RunHistory]) -> Versus:
    """Return two runs or more beside each other, named by their folders, or by their paths where
    two folders are alike."""
    configured = [configuration(run) for run in runs]
    settings = list(dict.fromkeys(name for each in configured for name in each))
    lines = [
        Line(what=name, values=tuple(each.get(name, "none") for each in configured))
        for name in settings
    ]
    differing = [line for line in lines if len(set(line.values)) > 1]
    names = [run.folder.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.folder) for run in runs]
    results, notes = _results(runs)
    return Versus(
        names=tuple(names),
        configuration=tuple(differing),
        same=len(lines) - len(differing),
        results=tuple(line for line in results if set(line.values) != {"?"}),
        notes=tuple(notes),
    )


def configuration(run: RunHistory) -> dict[str, str]:
    """Return every setting of a run by a dotted name."""
    plan = run.plan
    starts = run.history.starts
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    devices = [f"{device.backend} {device.index} of {device.host}" for device in plan.devices]
    numbered = enumerate(stages, start=1)
    environment = starts[-1][0].environment if starts else None
    return {
        "technique": plan.technique,
        **_flat("model", msgspec.to_builtins(plan.model)),
        **_flat("train", msgspec.to_builtins(plan.train)),
        "text": f"{run.corpus.source} ({run.corpus.train.text_bytes:,} bytes)",
        "corpus": run.corpus.hash,
        "tokenizer": f"{run.corpus.vocab_size} tokens, {tokenizer(run)}",
        "devices": listed(devices),
        "replicas": str(len(plan.replicas)),
        **{
            f"stage {n}": f"{stage_words(each, plan.model.layers)}, rows "
            f"{listed([str(rows) for rows in each.rows])}"
            for n, each in numbered
        },
        "microbatches": listed([str(replica.microbatches) for replica in plan.replicas]),
        **(_flat("sync", msgspec.to_builtins(plan.sync)) if plan.sync is not None else {}),
        **{
            f"environment.{name}": str(getattr(environment, name))
            for name in ENVIRONMENT
            if environment is not None
        },
    }


def _flat(prefix: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        return {prefix: str(value)}
    flat: dict[str, str] = {}
    for key, inner in value.items():
        flat |= _flat(f"{prefix}.{key}", inner)
    return flat


def tokenizer(run: RunHistory) -> str:
    """Return the hash of a run's tokenizer."""
    return content_hash(read_bytes(RunFolder(run.folder).tokenizer).decode())


def _results(runs: Sequence[RunHistory]) -> tuple[list[Line], list[str]]:
    measured = [measure(run) for run in runs]
    orders, notes = _orders(runs, measured)
    lines = [
        Line(what="ended", values=tuple(run.history.reason for run in runs)),
        *_step_lines(runs, ranked="step" in orders),
    ]
    for figure in FIGURES:
        values = [getattr(each, figure.field, None) for each in measured]
        known = [value for value in values if value is not None]
        alone = len(known) == len(values) and len(set(known)) > 1
        lines.append(
            Line(
                what=figure.what,
                values=tuple("?" if value is None else figure.show(value) for value in values),
                best=values.index(min(known)) if alone and figure.order in orders else None,
            )
        )
    read = [losses.read_on(each.val_tokens, each.val_of) if each else "" for each in measured]
    lines.append(Line(what="validation loss is", values=tuple(each or "?" for each in read)))
    return lines, notes


def _orders(
    runs: Sequence[RunHistory], measured: Sequence[Measurement | None]
) -> tuple[set[str], list[str]]:
    """Return the orders of FIGURES that these runs can be put in, and what to know of them."""
    # The same corpus, whatever it was called where it was prepared.
    texts = {
        (run.corpus.source, run.corpus.val.text_bytes, run.corpus.val.documents) for run in runs
    }
    same_text = len({run.corpus.hash for run in runs}) == 1 or len(texts) == 1
    same_tokens = same_text and len({tokenizer(run) for run in runs}) == 1
    ends = [(run, event) for run in runs if (event := losses.last(run)) is not None]
    whole = all(read_whole(run, event) for run, event in ends)
    whole = whole and len({event.read is None for _, event in ends}) < 2
    nats = same_tokens and (whole or read_same([event for _, event in ends]))
    bits = nats or (same_text and whole)

    # As many steps of as many tokens: only then less time, or money, is better.
    one_model = len({run.plan.model for run in runs}) == 1
    tokens = [run.plan.train.tokens_per_step for run in runs]
    work = {(each.steps, n) for each, n in zip(measured, tokens, strict=True) if each}
    orders = {
        "nats": nats,
        "bits": bits,
        "work": one_model and len(work) == 1,
        "step": one_model and len(set(tokens)) == 1,
        "memory": one_model and all(len(run.histories) == len(run.plan.devices) for run in runs),
    }
    notes = []
    if not same_text:
        notes.append("Validation texts differ: losses are not ranked.")
    elif not bits:
        notes.append("Losses are of different parts of the validation text: they are not ranked.")
    elif not same_tokens:
        notes.append("Tokenizers differ: losses are ranked in bits a byte, not in nats a token.")
    if any(run.history.reason not in ("done", "deadline", "early-stop") for run in runs):
        notes.append("Unfinished runs are compared as far as they came.")
    return {order for order, holds in orders.items() if holds}, notes


def read_whole(run: RunHistory, event: Validated) -> bool:
    """Return whether a run's last validation read all of the split."""
    return run.plan.train.validate_tokens == 0 if event.of is None else event.whole


def read_same(events: Sequence[Validated]) -> bool:
    """Return whether validations of one corpus read the same tokens. Earlier versions read the
    first of the split: those are told apart by their number, and differ from all that name
    theirs."""
    names = {event.read for event in events}
    return len(names) < 2 and (names != {None} or len({event.tokens for event in events}) < 2)


def _step_lines(runs: Sequence[RunHistory], *, ranked: bool) -> list[Line]:
    """Return the median step with its quartiles, and its ratio to the predicted one. A step is best
    only where its quartiles lie below all others'."""
    spreads = [step_spread(run) if run.history.steps else None for run in runs]
    known = [spread for spread in spreads if spread is not None]
    best = None
    if ranked and known and len(known) == len(runs):
        least = min(known)
        if all(spread[1] > least[2] for spread in known if spread is not least):
            best = spreads.index(least)
    shown = list[str]()
    ratios = list[str]()
    for run, spread in zip(runs, spreads, strict=True):
        estimate = run.history.estimate
        texts = [short_time(seconds) for seconds in spread or ()]
        shown.append(f"{texts[0]} ({texts[1]}-{texts[2]})" if texts else "?")
        ratios.append(f"{spread[0] / estimate.step_s:.2f}" if spread and estimate else "?")
    return [
        Line(what="step, middle half", values=tuple(shown), best=best),
        Line(what="step, measured / predicted", values=tuple(ratios)),
    ]
