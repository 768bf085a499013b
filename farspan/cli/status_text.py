"""How runs stand, for a person: a line each, or all of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from farspan.app.jobs import Status
from farspan.cli.paint import text_width, wants_colours
from farspan.domain.escapes import shell_line
from farspan.domain.problems import command
from farspan.domain.run import RunFolder
from farspan.domain.units import format_seconds
from farspan.report.run_endings import ending
from farspan.report.tables import table_lines
from farspan.report.text import recovery_words

if TYPE_CHECKING:
    from farspan.app.slurm_jobs import QueuedRun

STATUS_HEADS = ("run", "state", "step", "done", "loss", "tokens/s", "saved", "left")
#: As rich names styles.
STATE_STYLES = {"running": "bold green", "failed": "red", "lost": "red"}


def list_runs(statuses: Sequence[Status], *, json: bool) -> list[str]:
    """List a line a run. `saved` is when the newest checkpoint was written."""
    rows = []
    for status in statuses:
        row = [status.run, _state_text(status), f"{status.step:,}", f"{status.share:.0%}"]
        row.append(_format_known(status.loss, "{:.3f}".format))
        row.append(_format_known(status.tokens_per_s, "{:,.0f}".format))
        row.append(_format_known(status.saved_s, _format_largest_unit_ago))
        row.append(_format_known(status.left_s, format_largest_unit))
        rows.append(row)
    right = range(2, len(STATUS_HEADS))
    tints = [STATE_STYLES.get(status.state, "") for status in statuses]
    colours = wants_colours(json=json)
    return table_lines(
        STATUS_HEADS,
        rows,
        right=right,
        width=text_width(),
        wrap=(0, 1),
        colours=colours,
        tints=tints,
    )


def _format_known(value: float | None, format_value: Callable[[float], str]) -> str:
    return "" if value is None else format_value(value)


def _state_text(status: Status) -> str:
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


def describe_run(status: Status, now: float, queued: QueuedRun | None = None) -> Iterator[str]:
    """Yield lines on one run: how it stands, how far it is, its Slurm job if that waits or starts,
    and what to do next."""
    yield f"{status.run}: {_state_sentence(status, now)}"
    for name, fact in _status_facts(status):
        yield f"  {name:<11} {fact}"
    if status.problem is not None:
        yield str(status.problem)
    if queued is not None:
        yield from _queue_lines(queued)
    elif status.problem is not None:
        return
    elif status.state == "running":
        yield f"next: {command('logs', '-f', status.run)}"
    elif status.state == "finished":
        yield f"next: {command('report', status.run)}"
    elif not status.saving:  # Else workers of a lost job still hold the run.
        yield f"next: {RunFolder(Path(status.run)).resume_command()}"


def describe_queued_run(queued: QueuedRun) -> Iterator[str]:
    """Yield lines on a run that has not begun: the state of its Slurm job, and its log."""
    states = {
        "PENDING": "waits in the queue",
        "CONFIGURING": "is starting",
        "RUNNING": "runs and prepares the run",
        "COMPLETING": "is ending",
    }
    state = states.get(queued.job.state, f"is {queued.job.state.lower()}")
    yield f"{queued.run}: not begun; its Slurm job {state}"
    yield from _queue_lines(queued)


def _queue_lines(queued: QueuedRun) -> Iterator[str]:
    yield f"  {'queue':<11} {queued.job}"
    if queued.stuck is not None:
        yield f"  {'':<11} {queued.stuck}"
    yield f"  {'log':<11} {queued.log}"
    if Path(queued.log).exists():
        yield f"next: {shell_line('tail', '-f', queued.log)}"
    else:
        yield f"next: {shell_line('squeue', '--jobs', queued.job.id)}"


def _state_sentence(status: Status, now: float) -> str:
    job = status.job
    process = "its job" if job is None else f"process {job.pid} on {job.host}"
    match status.state:
        case "running" if job is not None:
            elapsed_s = max(0.0, now - job.started)
            return f"running for {format_seconds(elapsed_s)}, {process}"
        case "lost":
            saving = "; its workers save and end" if status.saving else ""
            return f"lost: {process} is gone without a word{saving}"
        case "finished":
            return ending(status.reason or "", status.step)
        case "new":
            return "no worker has started yet"
    return _state_text(status)


def _status_facts(status: Status) -> Iterator[tuple[str, str]]:
    yield "step", f"{step_of(status)}, {status.share:.0%}"
    if status.loss is not None:
        validated = "" if status.val_loss is None else f", validation {status.val_loss:.3f}"
        yield "loss", f"{status.loss:.3f}{validated}"
    if status.tokens_per_s is not None:
        yield "speed", f"{status.tokens_per_s:,.0f} tokens/s"
    saved = "none yet"
    if status.saved_step is not None and status.saved_s is not None:
        saved = f"step {status.saved_step:,}, {_format_ago(status.saved_s)}"
    yield "checkpoint", saved
    if (again := status.recovered) is not None:
        yield "recovered", f"after {recovery_words(again)}"
    if status.heard_s is not None:
        yield "last heard", _format_ago(status.heard_s)
    if status.left_s is not None:
        yield "time left", format_seconds(status.left_s)


def step_of(status: Status) -> str:
    """Format `148 of 334`, or `148` where the run's time alone decides how many it makes."""
    step = f"{status.step:,}"
    return step if status.total is None else f"{step} of {status.total:,}"


def _format_ago(seconds: float) -> str:
    return f"{format_seconds(seconds)} ago" if seconds >= 1 else "just now"


def _format_largest_unit_ago(seconds: float) -> str:
    return f"{format_largest_unit(seconds)} ago"


def format_largest_unit(seconds: float) -> str:
    """Format a time in its largest unit: `45 s`, `12 min`, `3 h`, `2 days`."""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.0f} days"
    if seconds >= 3600:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def describe_stop(status: Status) -> str:
    """Describe what a run that was stopped came to, and what of it is kept."""
    kept = "nothing is saved"
    if status.saved_step == status.step:
        kept = "it is saved"
    elif status.saved_step is not None:
        kept = f"step {status.saved_step:,} is saved"
    return f"{status.state} at step {step_of(status)}; {kept}"
