"""Judge a trained model beyond its loss: the next word of held-out text, and tasks of the LM
Evaluation Harness."""

from __future__ import annotations

import argparse

from farspan.cli.arguments import find_run, parse_positive, takes_run
from farspan.cli.console import Console

HELP = "judge the model: words of held-out text, tasks of lm-eval"


def configure(parser: argparse.ArgumentParser) -> None:
    takes_run(parser)
    parser.add_argument(
        "--questions",
        type=parse_positive,
        default=500,
        help="words of held-out text to ask for (default: 500)",
    )
    parser.add_argument("--seed", type=int, default=0, help="which words (default: 0)")
    parser.add_argument(
        "--tasks",
        metavar="TASK,TASK",
        help="tasks of the LM Evaluation Harness instead, by its names or as its YAML files",
    )
    parser.add_argument(
        "--limit", type=parse_positive, metavar="N", help="questions of each task (default: all)"
    )


def run(given: argparse.Namespace, console: Console) -> None:
    folder = find_run(given, console)
    from farspan.app import evaluation
    from farspan.cli.show_updates import Show

    if given.tasks is not None:
        with Show(console) as show:
            results = evaluation.run_tasks(folder, given.tasks.split(","), show, limit=given.limit)
        for task, values in results.items():
            for name, value in values.items():
                if isinstance(value, float):
                    console.write_line(f"{task} · {name.removesuffix(',none')} {value:.4f}")
        console.answer({"run": str(folder.path), "tasks": results})
        return
    with Show(console) as show:
        cloze, step = evaluation.measure_cloze(
            folder, show, questions=given.questions, seed=given.seed
        )
    console.write_line(
        f"the next word: {cloze.accuracy:.1%} ± {cloze.standard_error:.1%} (standard error) of "
        f"{cloze.questions:,} words · {cloze.nats:.2f} nats a word · the commonest word alone: "
        f"{cloze.commonest:.1%}"
    )
    console.answer({"run": str(folder.path), "step": step, "cloze": cloze})
