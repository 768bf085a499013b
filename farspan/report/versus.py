"""Runs side by side: first what was configured differently, then what came out, with its spread.

Losses are put in order only where they can be: nats a token only of runs with the same tokenizer
that read the same validation text, bits a byte also across tokenizers where all of that text was
read. Time, money and memory are put in order only of one model, time and money only of as many
steps of as many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import NamedTuple

import msgspec

from farspan.domain.codec import content_hash, read_bytes
from farspan.domain.results import Environment, Measurement, Validated
from farspan.domain.run import RunFolder
from farspan.domain.units import format_bytes, format_seconds, format_usd, short_time
from farspan.domain.words import listed, stage_words
from farspan.report import losses
from farspan.report.history import RunHistory
from farspan.report.measure import measure

#: Of the environment what is told apart from the machine that it ran on.
ENVIRONMENT = ("farspan", "commit", "python", "torch", "device", "threads")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One thing of every run, as text; the place of the best where they can be put in order and one
    stands out."""

    what: str
    values: tuple[str, ...]
    best: int | None = None


class Versus(msgspec.Struct, frozen=True, kw_only=True):
    """What differs, how many settings do not, the results, and what has to be known of them."""

    names: tuple[str, ...]
    configuration: tuple[Line, ...]
    same: int
    results: tuple[Line, ...]
    notes: tuple[str, ...]


def versus(runs: Sequence[RunHistory]) -> Versus:
    """Two runs or more, against each other."""
    configured = [configuration(run) for run in runs]
    names = list(dict.fromkeys(name for settings in configured for name in settings))
    lines = [
        Line(what=name, values=tuple(settings.get(name, "none") for settings in configured))
        for name in names
    ]
    differing = tuple(line for line in lines if len(set(line.values)) > 1)
    results, notes = _results(runs)
    return Versus(
        names=_names(runs),
        configuration=differing,
        same=len(lines) - len(differing),
        results=results,
        notes=notes,
    )


def _names(runs: Sequence[RunHistory]) -> tuple[str, ...]:
    """Folder names; with their paths where two are alike."""
    short = [run.folder.resolve().name for run in runs]
    return tuple(short if len(set(short)) == len(short) else map(str, (run.folder for run in runs)))


def configuration(run: RunHistory) -> dict[str, str]:
    """Every setting of a run by a dotted name."""
    plan, settings = run.plan, {"technique": run.plan.technique}
    for part, value in (("model", plan.model), ("train", plan.train)):
        settings |= _flat(part, msgspec.to_builtins(value))
    settings |= {
        "text": f"{run.corpus.source} ({run.corpus.train.text_bytes:,} bytes)",
        "corpus": run.corpus.hash,
        "tokenizer": f"{run.corpus.vocab_size} words, {tokenizer(run)}",
        "devices": listed(
            [f"{device.backend} {device.index} of {device.host}" for device in plan.devices]
        ),
        "replicas": str(len(plan.replicas)),
    }
    for number, stage in enumerate(
        (stage for replica in plan.replicas for stage in replica.stages), start=1
    ):
        settings[f"stage {number}"] = (
            f"{stage_words(stage, plan.model.layers)}, rows {listed(list(map(str, stage.rows)))}"
        )
    settings["microbatches"] = listed([str(replica.microbatches) for replica in plan.replicas])
    if plan.sync is not None:
        settings |= _flat("sync", msgspec.to_builtins(plan.sync))
    environment = run.history.starts[-1][0].environment if run.history.starts else None
    return settings | ({} if environment is None else _environment(environment))


def _flat(prefix: str, value: object) -> dict[str, str]:
    if isinstance(value, dict):
        flat: dict[str, str] = {}
        for key, inner in value.items():
            flat |= _flat(f"{prefix}.{key}", inner)
        return flat
    return {prefix: str(value)}


def _environment(environment: Environment) -> dict[str, str]:
    return {f"environment.{name}": str(getattr(environment, name)) for name in ENVIRONMENT}


def tokenizer(run: RunHistory) -> str:
    """What a run's tokenizer is known by."""
    return content_hash(read_bytes(RunFolder(run.folder).tokenizer).decode())


def text(run: RunHistory) -> tuple[object, ...]:
    """What the validation text of a run is known by: where it came from, and how much of it there
    is."""
    val = run.corpus.val
    return run.corpus.source, val.text_bytes, val.documents


def read_whole(run: RunHistory, event: Validated) -> bool:
    """Whether a run's last validation read all of the split."""
    return run.plan.train.validate_tokens == 0 if event.of is None else event.whole


def read_same(events: Sequence[Validated]) -> bool:
    """Whether validations of one corpus read the same tokens. Earlier versions read the first of
    the split: theirs are told by their number, and never the same as those of a run that names its
    tokens."""
    names = {event.read for event in events}
    return len(names) < 2 and (names != {None} or len({event.tokens for event in events}) < 2)


# -- results
#   ------------------------------------------------------------------------------------------------


def _results(runs: Sequence[RunHistory]) -> tuple[tuple[Line, ...], tuple[str, ...]]:
    measured = [measure(run) for run in runs]
    orders, notes = _orders(runs, measured)
    lines = [
        Line(what="ended", values=tuple(run.history.reason for run in runs)),
        *_step_lines(runs),
        _line(
            "tokens/s within steps",
            measured,
            lambda m: m.tokens_per_s,
            "{:,.0f}".format,
            most=True,
            ranked=False,
        ),
        _line(
            "TFLOP/s a device",
            measured,
            lambda m: m.tflops_per_device,
            "{:.3g}".format,
            most=True,
            ranked=False,
        ),
        _line("MFU", measured, lambda m: m.mfu, "{:.1%}".format, most=True, ranked=False),
        _line("run", measured, lambda m: m.run_s, format_seconds, ranked=orders.work),
        _line("steps", measured, lambda m: float(m.steps), "{:,.0f}".format, ranked=False),
        _line(
            "peak memory",
            measured,
            lambda m: float(m.memory_bytes),
            format_bytes,
            ranked=orders.memory,
        ),
        _line("money", measured, lambda m: m.usd, format_usd, ranked=orders.work),
        _line(
            "validation loss, nats a token",
            measured,
            lambda m: m.val_loss,
            "{:.4f}".format,
            ranked=orders.nats,
        ),
        _line(
            "validation loss, bits a byte",
            measured,
            lambda m: m.bits_per_byte,
            "{:.4f}".format,
            ranked=orders.bits,
        ),
        Line(
            what="validation loss is",
            values=tuple(_read_on(measurement) for measurement in measured),
        ),
    ]
    return tuple(line for line in lines if set(line.values) != {"?"}), tuple(notes)


def _read_on(measured: Measurement | None) -> str:
    return (losses.read_on(measured.val_tokens, measured.val_of) if measured else "") or "?"


class _Orders(NamedTuple):
    """What of some runs can be put in order: their losses a token and a byte, their time and money,
    their memory."""

    nats: bool
    bits: bool
    work: bool
    memory: bool


def _orders(
    runs: Sequence[RunHistory], measured: Sequence[Measurement | None]
) -> tuple[_Orders, list[str]]:
    """And what has to be known of it."""
    notes = []
    # The same corpus, whatever it was called where it was prepared.
    same_text = len({run.corpus.hash for run in runs}) == 1 or len({text(run) for run in runs}) == 1
    same_tokens = same_text and len({tokenizer(run) for run in runs}) == 1
    ends = [(run, event) for run in runs if (event := losses.last(run)) is not None]
    named = len({event.read is None for _, event in ends}) < 2
    whole = named and all(read_whole(run, event) for run, event in ends)
    nats = same_tokens and (whole or read_same([event for _, event in ends]))
    bits = nats or (same_text and whole)
    one_model = len({run.plan.model for run in runs}) == 1
    # As many steps of as many tokens: only then less time, or money, is better.
    same_work = (
        one_model
        and len(
            {
                (measurement.steps, run.plan.train.tokens_per_step)
                for measurement, run in zip(measured, runs, strict=True)
                if measurement
            }
        )
        == 1
    )
    every_rank = all(len(run.histories) == len(run.plan.devices) for run in runs)
    if not same_text:
        notes.append("Losses are of unlike texts: none is called better.")
    elif not bits:
        notes.append("Losses are of unlike parts of the validation text: none is called better.")
    elif not same_tokens:
        notes.append("Losses a token are of unlike tokenizers: only bits a byte are compared.")
    if any(run.history.reason not in ("done", "deadline", "early-stop") for run in runs):
        notes.append("A run that has not ended is compared as far as it came.")
    return _Orders(nats, bits, same_work, one_model and every_rank), notes


def _step_lines(runs: Sequence[RunHistory]) -> list[Line]:
    """The median step with its middle half, and what it is of the predicted one. A step is called
    best only where its middle half is below all others'."""
    spans = []
    for run in runs:
        steps = [timed.step.step_s for timed in run.history.timed]
        quarters = quantiles(steps, n=4, method="inclusive") if len(steps) > 1 else steps * 3
        spans.append((median(steps), quarters[0], quarters[-1]) if steps else None)
    values = tuple(
        "?" if s is None else f"{short_time(s[0])} ({short_time(s[1])}-{short_time(s[2])})"
        for s in spans
    )
    known = [(s[0], i) for i, s in enumerate(spans) if s is not None]
    alike = len({(run.plan.model, run.plan.train.tokens_per_step) for run in runs}) == 1
    best = min(known)[1] if alike and len(known) == len(spans) and known else None
    if best is not None and any(s[1] <= spans[best][2] for i, s in enumerate(spans) if i != best):  # type: ignore[index]
        best = None
    ratios = [
        None
        if span is None or run.history.estimate is None
        else span[0] / run.history.estimate.step_s
        for span, run in zip(spans, runs, strict=True)
    ]
    shown = tuple("?" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
    return [
        Line(what="step, middle half", values=values, best=best),
        Line(what="step, measured / predicted", values=shown),
    ]


def _line(
    what: str,
    measured: Sequence[Measurement | None],
    value: Callable[[Measurement], float | None],
    show: Callable[[float], str],
    *,
    most: bool = False,
    ranked: bool = True,
) -> Line:
    values = [None if measurement is None else value(measurement) for measurement in measured]
    known = [figure for figure in values if figure is not None]
    best = None
    if ranked and len(known) == len(values) and len(set(known)) > 1:
        best = values.index((max if most else min)(known))
    return Line(
        what=what,
        values=tuple("?" if figure is None else show(figure) for figure in values),
        best=best,
    )
