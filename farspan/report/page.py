"""One HTML file that shows a whole run and opens without a network: charts, tables, samples, how it ended."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from farspan.domain.codec import content_hash, write_atomically
from farspan.domain.results import Environment, Measurement
from farspan.domain.run import RunFolder
from farspan.domain.units import format_bytes, format_count, format_seconds
from farspan.report.figures import charts, figure
from farspan.report.history import Run, open_run
from farspan.report.measure import measurement_of
from farspan.report.text import (
    ENDINGS,
    comparison,
    gap,
    maybe,
    model_line,
    money,
    percent,
    references,
    short_time,
    warnings,
)

_TEMPLATES = Path(__file__).parent / "template"


def write_page(folder: Path, to: Path | None = None) -> Path:
    """Write the page of the run in `folder` as `report.html` there (or `to`), and return its path."""
    path = to or RunFolder(folder).report
    write_atomically(path, page(open_run(folder)).encode())
    return path


def page(run: Run) -> str:
    """The whole page as HTML. The same events give the same bytes."""
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    measured = measurement_of(run)
    history = run.history
    reason = history.finished.reason if history.finished else "unfinished"
    chart_style = (_TEMPLATES / "chart.css").read_text()
    return templates.get_template("page.html").render(
        style=chart_style + (_TEMPLATES / "page.css").read_text(),
        script=(_TEMPLATES / "page.js").read_text(),
        name=run.folder.resolve().name,
        model=model_line(run.plan),
        reason=reason,
        ending=ENDINGS.get(reason, reason),
        problem=history.finished.problem if history.finished else None,
        tiles=tiles(run, measured),
        figures=[figure(chart, chart_style) for chart in charts(run)],
        comparison=comparison(run, measured),
        interval=_interval(run),
        references=references(run, measured),
        warnings=warnings(run),
        samples=history.samples[::-1],
        timeline=timeline(run),
        environments=_environments(run),
        plan=_plan_rows(run),
        data=_data_rows(run),
        hashes=_hashes(run),
        config=run.config,
    )


def tiles(run: Run, measured: Measurement | None) -> list[tuple[str, str, str]]:
    """The key figures: (name, value, a line below it)."""
    if measured is None:
        return []
    found = []
    if measured.val_loss is not None:
        found += [
            (
                "Validation loss",
                f"{measured.val_loss:.3f}",
                f"{gap(measured.val_loss, run.corpus.unigram_nats)} unigram",
            ),
            ("Perplexity", maybe(measured.perplexity, ",.1f"), f"{maybe(measured.bits_per_byte, '.3f')} bits a byte"),
        ]
    else:
        found.append(("Training loss", f"{measured.train_loss:.3f}", "nats a token, not validated yet"))
    speed = f"{measured.tflops_per_device:.3g} TFLOP/s a device · MFU {percent(measured.mfu)}"
    return [
        *found,
        ("Tokens a second", f"{measured.tokens_per_s:,.0f}", speed),
        ("Time", format_seconds(measured.run_s), f"{_steps(measured.steps)} · {format_count(measured.tokens)} tokens"),
        ("Peak memory", format_bytes(measured.memory_bytes), "of the largest worker"),
        (
            "Money",
            *(
                ("n/a", "no price is known")
                if measured.usd is None
                else (money(measured.usd), "at the price planned with")
            ),
        ),
    ]


def _steps(number: int) -> str:
    return f"{number:,} step{'s' * (number != 1)}"


def _interval(run: Run) -> str:
    estimate = run.history.starts[0][0].estimate if run.history.starts else None
    if estimate is None:
        return ""
    low, high = (short_time(estimate.step_s * factor) for factor in estimate.interval)
    assumed = f" Assumed: {'; '.join(estimate.assumptions)}." if estimate.assumptions else ""
    return f"A step was expected to take between {low} and {high}.{assumed}"


def clock(at: float) -> str:
    """Date and time of day, UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def timeline(run: Run) -> list[tuple[str, str, str]]:
    """(when, what, more) of starts, saves and ends, oldest first."""
    rows = []
    for started, before_s in run.history.starts:
        workers = f"{started.world} worker{'s' * (started.world > 1)}"
        after = f" · after step {started.step:,}, {format_seconds(before_s)} of work" if before_s else ""
        rows.append((started.at, "resumed" if before_s else "started", f"{workers}{after}"))
    for saved in run.history.saves:
        size = f"{format_bytes(saved.size_bytes)} in {format_seconds(saved.seconds)}"
        rows.append((saved.at, "saved", f"step {saved.step:,} · {size} · {saved.path}"))
    rows += [
        (end.at, "ended", f"step {end.step:,} · {ENDINGS.get(end.reason, end.reason)}") for end in run.history.ends
    ]
    return [(clock(at), what, more) for at, what, more in sorted(rows, key=lambda row: row[0])]


def _environments(run: Run) -> list[tuple[str, list[str]]]:
    """Rows (name, value in each unlike environment that the run had)."""
    unlike = list(dict.fromkeys(started.environment for started, _ in run.history.starts))
    show = {"memory_bytes": format_bytes}
    return [
        (name.removesuffix("_bytes"), [show.get(name, str)(getattr(one, name)) for one in unlike])
        for name in Environment.__struct_fields__
        if any(getattr(one, name) is not None for one in unlike)
    ]


def _plan_rows(run: Run) -> list[tuple[str, str]]:
    model, train = run.plan.model, run.plan.train
    hosts = {device.host for device in run.plan.devices}
    devices = f"{len(run.plan.devices)} x {run.plan.devices[0].backend} on {', '.join(sorted(hosts))}"
    heads = f"{model.heads} heads" + (f", {model.kv_heads} of keys" if model.kv_heads != model.heads else "")
    return [
        ("technique", run.plan.technique),
        ("devices", devices),
        ("model", model_line(run.plan)),
        ("shape", f"{heads} · feed-forward {model.d_ff:,} · context {model.context:,}"),
        ("vocabulary", f"{model.vocab_size:,}"),
        ("steps", f"{train.steps:,} of {train.batch:,} x {train.seq_len:,} = {train.tokens_per_step:,} tokens"),
        ("precision", f"{train.precision} · attention {train.attention}"),
        ("optimizer", f"AdamW · rate {train.optimizer.lr:g} · decay {train.optimizer.weight_decay:g} · "
                      f"betas {train.optimizer.beta1:g}, {train.optimizer.beta2:g} · clip {train.optimizer.clip:g}"),
        ("schedule", f"{train.schedule.kind} · {train.schedule.warmup_steps:,} steps of warm-up"),
        ("seed", str(train.seed)),
    ]  # fmt: skip


def _data_rows(run: Run) -> list[tuple[str, str]]:
    corpus = run.corpus
    rows = [("source", corpus.source)]
    for name, split in (("train", corpus.train), ("validation", corpus.val)):
        size = f"{format_count(split.tokens)} tokens · {split.documents:,} documents · {format_bytes(split.text_bytes)}"
        rows.append((name, size))
    rows.append(("left out", f"{corpus.exact_duplicates:,} copies · {corpus.near_duplicates:,} near copies"))
    return rows + [("skipped", reason) for reason in corpus.skipped]


def _hashes(run: Run) -> list[tuple[str, str]]:
    return [("data", run.corpus.hash), ("plan", run.plan.hash), ("configuration", content_hash(run.config))]
