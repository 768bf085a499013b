"""What a run came to, for a person."""

from __future__ import annotations

from farspan.app.reporting import Report
from farspan.cli.console import Console


def print_result(report: Report, console: Console) -> None:
    """Print the summary of a run, and where to look next."""
    from farspan.report.text import run_summary

    console.write_facts(run_summary(report.run, report.compared))
    if report.accounting is not None:
        console.write_line(str(report.accounting))
    console.write_line(f"report: {report.page}")
