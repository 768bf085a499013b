"""How runs stand, for a person: a line each, or all of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from farspan.app.jobs import Status
from farspan.cli.paint import painter, width
from farspan.domain.problems import command
from farspan.domain.units import format_seconds
from farspan.report.endings import ending
from farspan.report.tables import table_lines
from farspan.report.text import recovery_words

HEADS = ("run", "state", "step", "done", "loss", "tokens/s", "saved", "left")
#: As rich names styles.
TINTS = {"running": "bold green", "failed": "red", "lost": "red"}


def listed(statuses: Sequence[Status], *, json: bool) -> list[str]:
    """List a line a run. `saved` is how long ago the newest checkpoint was written."""
    rows = [_row(status) for status in statuses]
    return table_lines(
        HEADS,
        rows,
        right=range(2, len(HEADS)),
        width=width(),
        wrap=(0, 1),
        colours=painter(json=json),
        tints=[TINTS.get(status.state, "") for status in statuses],
    )


def _row(status: Status) -> tuple[str, ...]:
    return (
        status.run,
        _state(status),
        f"{status.step:,}",
        f"{status.share:.0%}",
        "" if status.loss is None else f"{status.loss:.3f}",
        "" if status.tokens_per_s is None else f"{status.tokens_per_s:,.0f}",
        "" if status.saved_s is None else roughly(status.saved_s),
        "" if status.left_s is None else roughly(status.left_s),
    )


def _state(status: Status) -> str:
    """Return `running, pid 1234`, `running on box`, `finished`, `finished, deadline`, `failed,
    out-of-memory`, `lost`."""
    job = status.job
    match status.state:
        case "running" if job is not None:
            return f"running, pid {job.pid}" if job.here else f"running on {job.host}"
        case "finished" if status.reason != "done":
            return f"finished, {status.reason}"
        case "failed" if status.problem is not None:
            return f"failed, {status.problem.code}"
        case "stopped" if status.problem is not None:
            return f"stopped, {status.problem.code}"
        case "lost" if status.saving:
            return "lost, saving"
        case "new":
            return "not started"
    return status.state


def detailed(status: Status, now: float) -> Iterator[str]:
    """Lines on one run: how it stands, how far it is, and what to do next."""
    yield f"{status.run}: {_sentence(status, now)}"
    for name, fact in _facts(status):
        yield f"  {name:<11} {fact}"
    if status.problem is not None:
        yield str(status.problem)
    elif (next_words := _next(status)) is not None:
        yield f"next: {command(*next_words, status.run)}"


def _sentence(status: Status, now: float) -> str:
    job = status.job
    match status.state:
        case "running" if job is not None:
            return (
                f"running for {format_seconds(max(0.0, now - job.started))}, process {job.pid} on "
                f"{job.host}"
            )
        case "lost":
            who = "its job" if job is None else f"process {job.pid} on {job.host}"
            return f"lost: {who} is gone without a word" + (
                "; its workers save and end" if status.saving else ""
            )
        case "finished":
            return ending(status.reason or "", status.step)
        case "new":
            return "no worker has started yet"
    return _state(status)


def _facts(status: Status) -> Iterator[tuple[str, str]]:
    yield "step", f"{step_of(status)}, {status.share:.0%}"
    if status.loss is not None:
        validated = "" if status.val_loss is None else f", validation {status.val_loss:.3f}"
        yield "loss", f"{status.loss:.3f}{validated}"
    if status.tokens_per_s is not None:
        yield "speed", f"{status.tokens_per_s:,.0f} tokens/s"
    saved = "none yet"
    if status.saved_step is not None and status.saved_s is not None:
        saved = f"step {status.saved_step:,}, {_ago(status.saved_s)}"
    yield "checkpoint", saved
    if (again := status.recovered) is not None:
        yield "recovered", f"after {recovery_words(again)}"
    if status.heard_s is not None:
        yield "last heard", _ago(status.heard_s)
    if status.left_s is not None:
        yield "time left", format_seconds(status.left_s)


def step_of(status: Status) -> str:
    """`148 of 334`, or `148` where the run's time alone decides how many it makes."""
    return f"{status.step:,}" if status.total is None else f"{status.step:,} of {status.total:,}"


def _ago(seconds: float) -> str:
    return f"{format_seconds(seconds)} ago" if seconds >= 1 else "just now"


def _next(status: Status) -> tuple[str, ...] | None:
    """Return the usual next command; None while workers of a lost job still hold the run."""
    if status.state == "running":
        return "logs", "-f"
    if status.state == "finished":
        return ("report",)
    return None if status.saving else ("resume",)


def roughly(seconds: float) -> str:
    """Format a time in its largest unit: `45 s`, `12 min`, `3 h`, `2 days`."""
    for size, unit in ((2 * 86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / (86400 if unit == 'days' else size):.0f} {unit}"
    return f"{seconds:.0f} s"


def outcome(status: Status) -> str:
    """Describe what a run that was stopped came to, and what of it is kept."""
    kept = "nothing is saved"
    if status.saved_step is not None:
        at = "it" if status.saved_step == status.step else f"step {status.saved_step:,}"
        kept = f"{at} is saved"
    return f"{status.state} at step {step_of(status)}; {kept}"
