"""What a terminal shows: the plan before training, the summary after it, and the tables of `farspan
report`."""

from __future__ import annotations

from collections.abc import Sequence

from farspan import models
from farspan.domain.corpus import CorpusManifest
from farspan.domain.cost import Estimate, Measurement
from farspan.domain.forecast import Forecast
from farspan.domain.model import count_parameters
from farspan.domain.plan import Plan
from farspan.domain.run import RunFolder
from farspan.domain.run_events import Recovered
from farspan.domain.units import (
    counted,
    format_bytes,
    format_count,
    format_seconds,
    format_usd,
)
from farspan.report import losses
from farspan.report.compare import Comparison
from farspan.report.compare_text import comparison_tables, step_lines
from farspan.report.history import COMPLETE, RunHistory
from farspan.report.measurement import measure_run
from farspan.report.run_endings import ended_at
from farspan.report.tables import table_lines

#: The summary names the last of a run's recoveries, at most this number.
RECOVERIES_SHOWN = 5
#: What a nat below the unigram entropy means.
UNIGRAM_GLOSS = "the loss of token frequencies alone; 1 nat is 1.44 bits"


def model_line(plan: Plan) -> str:
    """`gpt2-like, 6 layers x 384, 13.9 M parameters`."""
    model = plan.model
    layers = counted(model.layers, "layer")
    count = format_count(count_parameters(model))
    line = f"{model.family}-like, {layers} x {model.d_model}, {count} parameters"
    if model.lora:
        trained = format_count(models.count_trained(model))
        line += f", trained: {trained} of adapters of rank {model.lora.rank}"
    return line


def plan_line(
    plan: Plan, estimate: Estimate, corpus: CorpusManifest, forecast: Forecast | None = None
) -> str:
    """One line before training: the model, what it reads, and what that is predicted to take."""
    train = plan.train
    epoch_tokens = corpus.epoch_tokens(train.shares)
    epochs = train.steps * train.tokens_per_step / epoch_tokens
    times = f"{epochs:.2g}" if epochs < 10 else f"{epochs:,.0f}"
    reads = f"{format_count(epoch_tokens)} tokens x {times} epoch"
    if times != "1":
        reads += "s"
    steps = f"{counted(train.steps, 'step')} of {train.tokens_per_step:,} tokens"
    takes = f"{format_seconds(estimate.run_s)}, {format_bytes(estimate.memory_bytes)}"
    if estimate.usd is not None:
        takes += f", {money(estimate.usd)}"
    if len(plan.devices) > 1:
        takes += f" on {len(plan.devices)} devices"
    if forecast is not None:
        low, high = forecast.interval
        takes += f", validation loss {forecast.loss:.2f} ({low:.2f} to {high:.2f})"
    return f"{model_line(plan)} · {reads} = {steps} · predicted {takes}"


def run_summary(run: RunHistory, compared: Comparison | None = None) -> str:
    """Return the lines after training: how it ended, what the model reached, what it took.

    Of several devices also how that compares with the prediction.
    """
    history = run.history
    done = history.steps[-1].step.step if history.steps else 0
    ended = ended_at(history.reason, done, run.plan.train)
    lines = [f"{ended}{_restarts_text(run)}"]
    if (measured := measure_run(run)) is not None:
        if measured.val_loss is not None:
            assert measured.unigram_nats is not None
            above = gap(measured.val_loss, measured.unigram_nats)
            facts = [
                f"validation loss {losses.format_headline(measured)}",
                f"perplexity {maybe(measured.perplexity, ',.1f')}",
                f"{maybe(measured.bits_per_byte, '.3f')} bits a byte",
                f"{above} the unigram entropy ({UNIGRAM_GLOSS})",
            ]
            lines.append(" · ".join(facts))
            lines += losses.loss_notes(run, measured)
        facts = [
            tokens_line(measured),
            f"{measured.tokens_per_s:,.0f} tokens/s within steps",
            f"{measured.tflops_per_device:.3g} TFLOP/s a device",
            f"MFU {maybe(measured.mfu, '.1%')}",
            format_bytes(measured.memory_bytes),
            money(measured.usd),
        ]
        lines.append(" · ".join(facts))
    lines += step_lines(compared) if compared else []
    shown = history.recoveries[-RECOVERIES_SHOWN:]
    lines += [f"recovered after {recovery_words(again)}" for again in shown]
    lines += [f"warning: {message}" for message in run.warnings]
    if history.finished and history.finished.problem:
        lines.append(str(history.finished.problem))
    if history.reason not in COMPLETE:
        lines.append(f"go on with it: {RunFolder(run.folder).resume_command()}")
    return "\n".join(lines)


def recovery_words(again: Recovered) -> str:
    """`step 41: rank 1 on star was preempted, 0 steps lost`."""
    return f"step {again.step:,}: {again.fault.what}, {counted(again.lost, 'step')} lost"


def tokens_line(measured: Measurement) -> str:
    """Format `270 k tokens in 2 min 41 s, 1,677 tokens/s with all else`: steps, validations, saves
    and the start together."""
    text = f"{format_count(measured.tokens)} tokens in {format_seconds(measured.run_s)}"
    if not measured.run_s:
        return text
    return f"{text}, {measured.tokens / measured.run_s:,.0f} tokens/s with all else"


def _restarts_text(run: RunHistory) -> str:
    restarts = len(run.history.starts) - 1
    if restarts < 1:
        return ""
    recovered = len(run.history.recoveries)
    parts = []
    if restarts > recovered:
        parts.append(f"resumed {counted(restarts - recovered, 'time')}")
    if recovered:
        parts.append(f"recovered {counted(recovered, 'time')} by itself")
    lost = counted(run.history.lost_steps, "step")
    return f" · {' and '.join(parts)}, {lost} done twice or lost"


def run_report(run: RunHistory, compared: Comparison | None = None) -> str:
    """`farspan report` as plain text: the summary, then predicted against measured, of several
    devices also by part and by device, then loss against entropies."""
    measured = measure_run(run)
    name = run.folder.resolve().name
    lines = [f"{name}: {model_line(run.plan)}", run_summary(run, compared)]
    if duplicates := run.corpus.duplicates_line:
        lines.append(duplicates)
    for rows in comparison_tables(run, measured, compared):
        lines += ["", *align_table(rows)]
    if rows := entropy_rows(run, measured):
        heads = ("nats a token", "entropy", "validation loss", "difference")
        lines += ["", *align_table([heads, *rows])]
        assert measured is not None
        if where := losses.read_on(measured.val_tokens, measured.val_of):
            lines.append(f"loss and entropies {where}")
    if run.history.samples:
        verbatim = run.history.samples[-1].verbatim
        if verbatim is not None:
            lines.append(f"{verbatim:.0%} of the last sample stands in the text word for word")
    return "\n".join(lines)


def entropy_rows(run: RunHistory, measured: Measurement | None) -> list[tuple[str, str, str, str]]:
    """Return rows (reference, its entropy, validation loss, loss minus entropy), in nats a
    token."""
    if measured is None or measured.val_loss is None:
        return []
    loss = measured.val_loss
    rows = []
    for name, nats in losses.entropies(run, losses.last_validation(run)).items():
        rows.append((name, f"{nats:.3f}", f"{loss:.3f}", f"{loss - nats:+.3f}"))
    return rows


def gap(loss: float, entropy: float) -> str:
    """`1.62 nats below`."""
    return f"{abs(loss - entropy):.2f} nats {'below' if loss < entropy else 'above'}"


def money(usd: float | None) -> str:
    return "cost n/a" if usd is None else format_usd(usd)


def maybe(number: float | None, how: str) -> str:
    """Format `number`, or return n/a."""
    return "n/a" if number is None else format(number, how)


def align_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align rows, the first a heading, in columns: the first to the left, the others to the
    right."""
    heads, *body = rows
    head, *lines = table_lines(heads, body, right=range(1, len(heads)))
    return [head, "-" * len(head), *lines]
