"""Measure a cluster's devices, links and collectives, and write what was found as a cluster file
for the planner."""

from __future__ import annotations

import argparse
from pathlib import Path

from farspan.cli.cluster_text import print_cluster
from farspan.cli.console import Console
from farspan.cli.show_updates import Show
from farspan.domain.cluster import Cluster
from farspan.domain.clusterfile import to_file

HELP = "measure what a cluster can do"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cluster", metavar="CLUSTER", required=True, help="a cluster file, or a name of one"
    )
    parser.add_argument(
        "-o", "--out", metavar="FILE", required=True, help="where to write the measured cluster"
    )
    parser.add_argument(
        "--model",
        default="gpt2",
        help="that is timed: a preset, parameters, a Hugging Face folder or "
        "the plan.json of a run (default: gpt2)",
    )
    parser.add_argument(
        "--seq-len",
        metavar="N",
        type=int,
        help="tokens of a sequence (default: the model's context)",
    )


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.app.examine_machines import probe_cluster

    def progress(update: object) -> None:
        if isinstance(update, Cluster):
            print_cluster(update, console)
            console.write_line(f"written: {given.out}")
        else:
            show(update)

    with Show(console) as show:
        measured = probe_cluster(
            given.cluster, Path(given.out), progress, model=given.model, seq_len=given.seq_len
        )
    console.answer(to_file(measured))
