"""What a terminal shows: the plan before training, the summary after it, and the tables of `farspan report`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from farspan.domain.corpus import CorpusManifest
from farspan.domain.model import parameters
from farspan.domain.plan import Plan
from farspan.domain.results import Estimate, Measurement
from farspan.domain.units import format_bytes, format_count, format_seconds
from farspan.report.history import Run, open_run
from farspan.report.measure import measurement_of

#: How each end is told to a person, by `Finished.reason`; "unfinished" is a run without an end.
ENDINGS = {
    "done": "finished every step",
    "deadline": "stopped at its deadline",
    "early-stop": "stopped early: validation no longer improved",
    "interrupted": "interrupted",
    "failed": "failed",
    "unfinished": "still running, or killed",
}


def model_line(plan: Plan) -> str:
    """`gpt2-like, 6 layers x 384, 13.9 M parameters`."""
    model = plan.model
    return f"{model.family}-like, {model.layers} layers x {model.d_model}, {format_count(parameters(model))} parameters"


def plan_line(plan: Plan, estimate: Estimate, corpus: CorpusManifest) -> str:
    """One line before training: the model, what it reads, and what that is predicted to take."""
    train = plan.train
    epochs = train.steps * train.tokens_per_step / corpus.train.tokens
    times = f"{epochs:.2g}" if epochs < 10 else f"{epochs:,.0f}"
    cost = f", {money(estimate.usd)}" if estimate.usd is not None else ""
    devices = f" on {len(plan.devices)} devices" if len(plan.devices) > 1 else ""
    return (
        f"{model_line(plan)} · {format_count(corpus.train.tokens)} tokens x {times} epochs = {train.steps:,} steps"
        f" of {train.tokens_per_step:,} tokens · predicted {format_seconds(estimate.run_s)},"
        f" {format_bytes(estimate.memory_bytes)}{cost}{devices}"
    )


def summary(folder: Path) -> str:
    """The few lines after training: how it ended, what the model reached, what it took."""
    run = open_run(folder)
    return "\n".join(_summary(run, measurement_of(run)))


def report(folder: Path) -> str:
    """`farspan report` as plain text: the summary, then predicted against measured, then loss against entropies."""
    run = open_run(folder)
    measured = measurement_of(run)
    lines = [f"{run.folder.resolve().name}: {model_line(run.plan)}", *_summary(run, measured)]
    if rows := comparison(run, measured):
        lines += ["", *table([("", "predicted", "measured", "measured / predicted"), *rows])]
    if rows := references(run, measured):
        lines += ["", *table([("nats a token", "entropy", "validation loss", "difference"), *rows])]
    return "\n".join(lines)


def _summary(run: Run, measured: Measurement | None) -> list[str]:
    history, steps = run.history, run.plan.train.steps
    reason = history.finished.reason if history.finished else "unfinished"
    done = history.steps[-1].step.step if history.steps else 0
    lines = [f"{ENDINGS.get(reason, reason)} · step {done:,} of {steps:,}{_resumed(run)}"]
    if measured is not None:
        if measured.val_loss is not None:
            lines.append(
                f"validation loss {measured.val_loss:.3f} · perplexity {maybe(measured.perplexity, ',.1f')} · "
                f"{maybe(measured.bits_per_byte, '.3f')} bits a byte · "
                f"{gap(measured.val_loss, run.corpus.unigram_nats)} the unigram entropy"
            )
        lines.append(
            f"{format_seconds(measured.run_s)} · {measured.tokens_per_s:,.0f} tokens/s · "
            f"{measured.tflops_per_device:.3g} TFLOP/s a device · MFU {percent(measured.mfu)} · "
            f"{format_bytes(measured.memory_bytes)} · {money(measured.usd)}"
        )
    lines += [f"warning: {message}" for message in warnings(run)]
    if history.finished and history.finished.problem:
        lines.append(str(history.finished.problem))
    if reason not in ("done", "early-stop", "deadline"):
        lines.append(f"go on with it: farspan resume {run.folder}")
    return lines


def warnings(run: Run) -> list[str]:
    """What was warned of, before training and during it, each once."""
    return list(dict.fromkeys([*run.warnings, *(warned.message for warned in run.history.warnings)]))


def _resumed(run: Run) -> str:
    times = len(run.history.starts) - 1
    if times < 1:
        return ""
    return f" · resumed {times} time{'s' * (times > 1)}, {run.history.lost_steps:,} steps done twice or lost"


def comparison(run: Run, measured: Measurement | None) -> list[tuple[str, str, str, str]]:
    """Rows (what, predicted, measured, measured / predicted), or none where either side is missing.

    The predicted time and money of a run that ended early are those of the steps that it did.
    """
    estimate = run.history.starts[0][0].estimate if run.history.starts else None
    if estimate is None or measured is None:
        return []
    share = measured.steps / run.plan.train.steps
    part = "" if share == 1 else f" of {measured.steps:,} steps"
    rows = [
        _row("step time", estimate.step_s, measured.step_s, short_time),
        _row(f"run time{part}", estimate.run_s * share, measured.run_s, format_seconds),
        _row("tokens/s", estimate.tokens_per_s, measured.tokens_per_s, lambda rate: f"{rate:,.0f}"),
        _row("peak memory", estimate.memory_bytes, measured.memory_bytes, format_bytes),
    ]
    if estimate.usd is not None and measured.usd is not None:
        rows.append(_row(f"money{part}", estimate.usd * share, measured.usd, money))
    return rows


def _row(what: str, predicted: float, measured: float, show: Callable[[float], str]) -> tuple[str, str, str, str]:
    ratio = f"{measured / predicted:.2f}" if predicted else "n/a"
    return what, show(predicted), show(measured), ratio


def references(run: Run, measured: Measurement | None) -> list[tuple[str, str, str, str]]:
    """Rows (reference, its entropy, validation loss, loss minus entropy), in nats a token."""
    if measured is None or measured.val_loss is None:
        return []
    loss = measured.val_loss
    entropies = {"unigram": run.corpus.unigram_nats, "bigram": run.corpus.bigram_nats}
    return [(name, f"{nats:.3f}", f"{loss:.3f}", f"{loss - nats:+.3f}") for name, nats in entropies.items()]


def short_time(seconds: float) -> str:
    """Three digits for what is compared closely: `88.1 ms`, `117 ms`, `1.36 s`."""
    if seconds >= 100:
        return format_seconds(seconds)
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def gap(loss: float, entropy: float) -> str:
    """`1.62 nats below`."""
    return f"{abs(loss - entropy):.2f} nats {'below' if loss < entropy else 'above'}"


def money(usd: float | None) -> str:
    return "cost n/a" if usd is None else f"${usd:,.2f}" if usd >= 1 else f"${usd:.4f}"


def percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.1%}"


def maybe(number: float | None, how: str) -> str:
    """`number` in the given format, or n/a."""
    return "n/a" if number is None else format(number, how)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows, the first a heading, as lines of aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]
