"""Resume a run that was stopped, from its newest whole checkpoint."""

from __future__ import annotations

import argparse

from farspan.cli.arguments import find_run, takes_run, takes_without
from farspan.cli.console import Console
from farspan.cli.detach import run_detached, takes_detach

HELP = "go on with a stopped run"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_run(parser)
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run its cluster's commands and follow its links also if you did not make it here",
    )
    parser.add_argument(
        "--cluster",
        metavar="CLUSTER",
        help="go on there: a cluster file, a name of `farspan cluster list`, or `here`",
    )
    parser.add_argument(
        "--technique",
        metavar="NAME",
        help="go on by this technique (default: the best of the exact)",
    )
    takes_without(parser)
    takes_detach(parser)


def run(given: argparse.Namespace, console: Console) -> None:
    folder = find_run(given, console)
    if given.detach:
        words = ["resume", folder.path]
        if given.trust:
            words.append("--trust")
        for name in ("cluster", "technique"):
            value = getattr(given, name)
            if value:
                words += [f"--{name}", value]
        for site in given.without:
            words += ["--without", site]
        run_detached(words, folder, console)
        return
    from farspan.app.training import resume_run
    from farspan.cli.report_text import print_end
    from farspan.cli.show_updates import Show

    with Show(console) as show:
        report = resume_run(
            folder,
            show,
            trust=given.trust,
            cluster=given.cluster,
            technique=given.technique,
            without=tuple(given.without),
        )
    print_end(report, console)
    console.answer({"run": str(folder.path), "measurement": report.measurement})
