"""Compare a run with its prediction, device by device, and runs with each other.

Losses are put in order only where they can be: nats a token only of runs with the same tokenizer
that read the same validation text, bits a byte also across tokenizers where all of that text was
read. Time, money and memory are put in order only of one model, time and money only of the same
number of steps and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from statistics import median, quantiles
from typing import Any, NamedTuple

import msgspec

from farspan.domain.cost import Measurement
from farspan.domain.plan_words import join_counted, stage_words
from farspan.domain.problems import Refusal
from farspan.domain.run import RunFolder
from farspan.domain.run_events import IN_STEP
from farspan.domain.struct_files import content_hash, read_bytes
from farspan.domain.units import counted, format_bytes, format_seconds, format_usd, short_time
from farspan.report import losses
from farspan.report import predicted_steps as predicting
from farspan.report.drift import Drift, find_drifts
from farspan.report.history import COMPLETE, RunHistory
from farspan.report.measurement import measure_run
from farspan.report.plan_picture import Mark, part_words
from farspan.report.traces import Traces

STEP_PARTS = {
    "compute": "compute",
    "communication": "communication",
    "waiting": "waiting for others",
    "rest": "not recorded",
}
ALIGNMENT_NOTE = (
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
    """One device. What a missing log would hold is None or empty."""

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
    """A run of several devices and its prediction. `traced` is the step whose marks the rows hold,
    None without any; `slowest` the row whose step `parts` split."""

    steps: Steps
    rows: tuple[DeviceRow, ...]
    traced: int | None
    traced_s: float
    slowest: DeviceRow | None
    parts: tuple[StepPart, ...]
    drifts: tuple[Drift, ...]
    notes: tuple[str, ...]
    #: What planning again with the measured speeds would give, by the planner.
    again: str = ""

    @property
    def ends(self) -> float:
        """Seconds of the longest row."""
        ends = [0.0]
        for row in self.rows:
            ends += [mark.end for mark in (*row.measured, *row.predicted)]
        return max(ends)

    @property
    def drawn(self) -> list[DeviceRow]:
        """Rows with a measured step."""
        return [row for row in self.rows if row.measured]


def step_spread(run: RunHistory) -> tuple[float, float, float]:
    """Return the median and the quartiles of the seconds of a run's steps; it has some."""
    seconds = [timed.step.step_s for timed in run.history.timed]
    quartiles = seconds * 3
    if len(seconds) > 1:
        quartiles = quantiles(seconds, n=4, method="inclusive")
    return median(seconds), quartiles[0], quartiles[2]


def compare_to_prediction(run: RunHistory) -> Comparison | None:
    """Return None for a run of one device, or without a step or an estimate of its devices."""
    estimate = run.history.estimate
    plan = run.plan
    stages = list(chain.from_iterable(replica.stages for replica in plan.replicas))
    stage_of: dict[int, int] = {}
    for number, each in enumerate(stages):
        stage_of |= dict.fromkeys(each.mesh.ranks, number)
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
        problem = refusal.problem
        notes.append(f"No predicted rows: {problem.what} ({problem.where}).")
    devices = predicting.predict_devices(plan, costs) if costs is not None else {}
    split = predicting.predict_split(plan, estimate, costs)

    # Each device, with its marks in the last step that all of them traced.
    traces = Traces(run)
    shown = traces.steps[-1] if traces.steps else None
    rows = []
    for rank, memory in zip(sorted(stage_of), estimate.memory, strict=True):
        device = plan.devices[rank]
        history = run.histories.get(rank)
        expected = devices.get(rank)
        stage = stage_of[rank]
        words = part_words(plan, stage)
        if expected is not None and len(stages[expected.stage].rows) > 1:
            words += f"; {counted(expected.rows, 'row')}"
        kind = device.backend
        if costs is not None:
            kind = costs.network.devices[rank].kind
        measured: tuple[Mark, ...] = ()
        if shown is not None and rank in traces.ranks:
            measured = traces.step_marks(rank, shown)
        used = history.memory_bytes if history else 0
        row = DeviceRow(
            rank=rank,
            name=f"rank {rank}, {kind} in {device.host}",
            words=words,
            stage=stage,
            memory=used or None,
            memory_predicted=memory.total,
            measured=measured,
            predicted=expected.marks if expected else (),
        )
        rows.append(row)

    # The parts of the slowest device's step, where every device's spans end as its work does.
    slowest = None
    parts = list[StepPart]()
    in_step = all(plan.devices[rank].backend in IN_STEP for rank in stage_of)
    if shown is not None and in_step and all(row.measured for row in rows):
        slowest = max(rows, key=lambda row: traces.step_parts(row.rank, shown)["compute"])
        measured_s = traces.step_parts(slowest.rank, shown)
        inside_s = 0.0
        if slowest.rank in devices:
            inside_s = devices[slowest.rank].inside_s
        predicted_s = {
            "compute": split.compute_s + inside_s,
            "communication": max(0.0, split.communication_s - inside_s),
            "waiting": split.bubble_s,
        }
        for part, name in STEP_PARTS.items():
            predicted = predicted_s.get(part)
            parts.append(StepPart(name=name, predicted_s=predicted, measured_s=measured_s[part]))

    # What a reader has to know of the rows.
    if traces.steps:
        notes.append(ALIGNMENT_NOTE)
    if plan.sync is not None:
        notes.append("Times of steps leave out the replicas' synchronization.")
    traced_devices = [devices[rank] for rank in traces.ranks if rank in devices]
    if any(device.inside_s for device in traced_devices):
        notes.append("Passes hold the communication inside them, measured and predicted.")
    if any(plan.devices[rank].backend not in IN_STEP for rank in traces.ranks):
        notes.append("Marks of a GPU show when its kernels were launched.")
    missing = [row.name for row in rows if row.rank not in run.histories]
    if missing:
        notes.append(f"Logs that were kept on their hosts: {', '.join(missing)}.")

    median_s, first_quartile_s, third_quartile_s = step_spread(run)
    low, high = estimate.interval
    steps = Steps(
        measured_s=median_s,
        half=(first_quartile_s, third_quartile_s),
        predicted_s=split.step_s,
        bounds=(low * split.step_s, high * split.step_s),
    )
    traced_s = 0.0
    if shown is not None:
        traced_s = traces.of(traces.ranks[0], shown)[1].step_s
    drifting: tuple[Drift, ...] = ()
    if costs is not None:
        drifting = find_drifts(run, traces, estimate, split.step_s, devices, costs)
    return Comparison(
        steps=steps,
        rows=tuple(rows),
        traced=shown,
        traced_s=traced_s,
        slowest=slowest,
        parts=tuple(parts),
        drifts=drifting,
        notes=tuple(notes),
    )


class ComparedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One thing of every run, as text; the place of the best where they can be put in order and one
    stands out."""

    what: str
    values: tuple[str, ...]
    best: int | None = None


class Versus(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that differ, the number of those that do not, the results, and notes on them."""

    names: tuple[str, ...]
    configuration: tuple[ComparedRow, ...]
    same: int
    results: tuple[ComparedRow, ...]
    notes: tuple[str, ...]


def compare_runs(runs: Sequence[RunHistory]) -> Versus:
    """Return two runs or more side by side, named by their folders, or by their paths where two
    folders are alike."""
    configured = [run_settings(run) for run in runs]
    settings = dict.fromkeys(chain.from_iterable(configured))
    differing = []
    for name in settings:
        values = tuple(settings_of.get(name, "none") for settings_of in configured)
        if len(set(values)) > 1:
            differing.append(ComparedRow(what=name, values=values))
    folders = [run.folder.resolve().name for run in runs]
    if len(set(folders)) < len(folders):
        folders = [str(run.folder) for run in runs]

    # The results, with the best where they can be put in order.
    measured = [measure_run(run) for run in runs]
    orders, notes = _rankable_orders(runs, measured)
    lines = [ComparedRow(what="ended", values=tuple(run.history.reason for run in runs))]
    lines += _step_lines(runs, ranked="step" in orders)
    for figure in FIGURES:
        figures: list[Any] = [getattr(each, figure.field, None) for each in measured]
        shown = ["?" if value is None else figure.show(value) for value in figures]
        best = None
        if figure.order in orders and None not in figures and len(set(figures)) > 1:
            best = figures.index(min(figures))
        lines.append(ComparedRow(what=figure.what, values=tuple(shown), best=best))
    read = []
    for each in measured:
        tokens = losses.read_on(each.val_tokens, each.val_of) if each else ""
        read.append(tokens or "?")
    lines.append(ComparedRow(what="validation loss is", values=tuple(read)))
    known = [line for line in lines if set(line.values) != {"?"}]
    return Versus(
        names=tuple(folders),
        configuration=tuple(differing),
        same=len(settings) - len(differing),
        results=tuple(known),
        notes=tuple(notes),
    )


def run_settings(run: RunHistory) -> dict[str, str]:
    """Return every setting of a run by a dotted name."""
    plan = run.plan
    corpus = run.corpus
    devices = [f"{device.backend} {device.index} of {device.host}" for device in plan.devices]
    settings = {"technique": plan.technique}
    settings |= _flatten_settings("model", msgspec.to_builtins(plan.model))
    settings |= _flatten_settings("train", msgspec.to_builtins(plan.train))
    settings["text"] = f"{corpus.source} ({corpus.train.text_bytes:,} bytes)"
    settings["corpus"] = corpus.hash
    settings["tokenizer"] = f"{corpus.vocab_size} tokens, {tokenizer_hash(run)}"
    settings["devices"] = join_counted(devices)
    settings["replicas"] = str(len(plan.replicas))
    stages = chain.from_iterable(replica.stages for replica in plan.replicas)
    for number, stage in enumerate(stages, start=1):
        words = stage_words(stage, plan.model.layers)
        settings[f"stage {number}"] = f"{words}, rows {join_counted(list(map(str, stage.rows)))}"
    settings["microbatches"] = join_counted(
        [str(replica.microbatches) for replica in plan.replicas]
    )
    if plan.sync is not None:
        settings |= _flatten_settings("sync", msgspec.to_builtins(plan.sync))
    if run.history.starts:
        start, _ = run.history.starts[-1]
        for name in ENVIRONMENT:
            settings[f"environment.{name}"] = str(getattr(start.environment, name))
    return settings


def _flatten_settings(prefix: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        return {prefix: str(value)}
    flat: dict[str, str] = {}
    for key, inner in value.items():
        flat |= _flatten_settings(f"{prefix}.{key}", inner)
    return flat


def tokenizer_hash(run: RunHistory) -> str:
    """Return the hash of a run's tokenizer."""
    return content_hash(read_bytes(RunFolder(run.folder).tokenizer).decode())


def _rankable_orders(
    runs: Sequence[RunHistory], measured: Sequence[Measurement | None]
) -> tuple[set[str], list[str]]:
    """Return the orders of FIGURES that these runs can be put in, and what to know of them."""
    # The same corpus, whatever it was called where it was prepared.
    hashes = {run.corpus.hash for run in runs}
    texts = set()
    for run in runs:
        texts.add((run.corpus.source, run.corpus.val.text_bytes, run.corpus.val.documents))
    same_text = len(hashes) == 1 or len(texts) == 1
    same_tokens = same_text and len(set(map(tokenizer_hash, runs))) == 1

    # Losses of all of the split, or of the same tokens of it.
    ends = []
    whole = True
    for run in runs:
        event = losses.last_validation(run)
        if event is not None:
            ends.append(event)
            all_read = event.whole
            if event.of is None:
                all_read = run.plan.train.validate_tokens == 0
            whole = whole and all_read
    reads = {event.read for event in ends}
    # Earlier versions read the first of the split: those differ by their number, and differ from
    # all that name theirs.
    whole = whole and (None not in reads or len(reads) == 1)
    same = len(reads) < 2
    if reads == {None}:
        same = len({event.tokens for event in ends}) < 2
    nats = same_tokens and (whole or same)
    bits = nats or (same_text and whole)
    orders = set()
    if nats:
        orders.add("nats")
    if bits:
        orders.add("bits")

    # The same number of steps and tokens: only then less time, or money, is better.
    if len({run.plan.model for run in runs}) == 1:
        tokens = [run.plan.train.tokens_per_step for run in runs]
        work = {(each.steps, n) for each, n in zip(measured, tokens, strict=True) if each}
        if len(work) == 1:
            orders.add("work")
        if len(set(tokens)) == 1:
            orders.add("step")
        if all(len(run.histories) == len(run.plan.devices) for run in runs):
            orders.add("memory")
    notes = []
    if not same_text:
        notes.append("Validation texts differ: losses are not ranked.")
    elif not bits:
        notes.append("Losses are of different parts of the validation text: they are not ranked.")
    elif not same_tokens:
        notes.append("Tokenizers differ: losses are ranked in bits a byte, not in nats a token.")
    if any(run.history.reason not in COMPLETE for run in runs):
        notes.append("Unfinished runs are compared as far as they came.")
    return orders, notes


def _step_lines(runs: Sequence[RunHistory], *, ranked: bool) -> list[ComparedRow]:
    """Return the median step with its quartiles, and its ratio to the predicted one. A step is best
    only where its quartiles lie below all others'."""
    spreads = [step_spread(run) if run.history.steps else None for run in runs]
    known = [spread for spread in spreads if spread]
    best = None
    if ranked and known and len(known) == len(runs):
        least = min(known)
        if all(spread[1] > least[2] for spread in known if spread is not least):
            best = spreads.index(least)
    shown = list[str]()
    ratios = list[str]()
    for run, spread in zip(runs, spreads, strict=True):
        if spread is None:
            shown.append("?")
            ratios.append("?")
            continue
        usual, low, high = map(short_time, spread)
        shown.append(f"{usual} ({low}-{high})")
        estimate = run.history.estimate
        ratios.append(f"{spread[0] / estimate.step_s:.2f}" if estimate else "?")
    step = ComparedRow(what="step, middle half", values=tuple(shown), best=best)
    ratio = ComparedRow(what="step, measured / predicted", values=tuple(ratios))
    return [step, ratio]
