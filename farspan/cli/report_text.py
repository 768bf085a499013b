"""What a run came to, for a person."""

from __future__ import annotations

from farspan.app.reporting import Report
from farspan.cli.console import Console


def say_result(report: Report, console: Console) -> None:
    """Print the summary of a run, and where to look next."""
    from farspan.report.text import summary

    console.say_facts(summary(report.run, report.compared))
    console.say(f"report: {report.page}")
