"""Measure a cluster's devices, links and collectives, and write what was found as a cluster file for the planner."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from farspan.cli import job
from farspan.cli.clusters import find
from farspan.cli.commands.cluster import show
from farspan.cli.console import Console
from farspan.domain.clusterfile import save_cluster, to_file
from farspan.domain.problems import Refusal

HELP = "measure what a cluster can do"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster", metavar="CLUSTER", required=True, help="a cluster file, or a name of one")
    parser.add_argument("-o", "--out", metavar="FILE", required=True, help="where to write the measured cluster")
    parser.add_argument("--model", default="gpt2", help="that is timed: a preset, parameters, a Hugging Face folder or "
                        "the plan.json of a run (default: gpt2)")  # fmt: skip
    parser.add_argument("--seq-len", metavar="N", type=int, help="tokens of a sequence (default: the model's context)")


def run(given: argparse.Namespace, console: Console) -> None:
    from farspan.launch.measure import measure
    from farspan.planning.question import model_of

    job.require_torch()
    model, cluster, out = model_of(given.model), find(given.cluster), Path(given.out)
    length = model.context if given.seq_len is None else given.seq_len
    if not 1 <= length <= model.context:
        raise Refusal(
            "out-of-range", what=f"{length} tokens are no sequence of {given.model}", where="--seq-len",
            fact=f"its context is {model.context}", remedy=f"--seq-len {model.context}",
        )  # fmt: skip
    job.refuse_file(out, f"farspan probe --cluster {given.cluster} -o {out.with_stem(out.stem + '-2')}")
    measured, failed, notes = measure(cluster, model, console.say, seq_len=length)
    asked = f"--cluster {given.cluster} --model {given.model} --seq-len {length}"
    lost = [f"device {index} of {host} has failed: {problem.fact}" for (host, index), problem in failed.items()]
    save_cluster(measured, out, "\n# ".join((f"Measured by farspan probe {asked}.", *notes, *lost)))
    show(measured, console)
    console.say(f"written: {out}")
    for problem in failed.values():
        others = f"; {len(failed) - 1} more have failed" if len(failed) > 1 else ""
        raise Refusal.of(msgspec.structs.replace(problem, fact=f"{problem.fact}{others}; the rest is in {out}"))
    console.answer(to_file(measured))
