"""What a run came to, for a person."""

from __future__ import annotations

from farspan.app.reporting import Report
from farspan.cli.console import Console
from farspan.domain.problems import command


def print_end(report: Report, console: Console) -> None:
    """Print what training came to, and what makes a finished run searchable."""
    from farspan.report.history import COMPLETE

    print_result(report, console)
    if report.run.history.reason in COMPLETE:
        console.write_line(f"next: {command('embed', report.run.folder)}")


def print_result(report: Report, console: Console) -> None:
    """Print the summary of a run, and where to look next."""
    from farspan.report.text import run_summary

    console.write_facts(run_summary(report.run, report.compared))
    if report.accounting is not None:
        console.write_line(str(report.accounting))
    console.write_line(f"report: {report.page}")
