"""Measure a matrix of models, clusters, techniques and settings, one cell after another;
predictions come first.

A matrix is a file, or one that ships with farspan: fabric, fabric-memory, slm-cost. What was
measured already is not measured again, so the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path
from typing import Any

from farspan.cli.console import Console
from farspan.domain.problems import Refusal, command
from farspan.domain.suggest import advise

HELP = "measure a matrix of settings"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "matrix", metavar="MATRIX.YAML", help="a file, or fabric, fabric-memory or slm-cost"
    )
    parser.add_argument(
        "-o", "--out", metavar="FOLDER", type=Path, help="for the results (default: bench/NAME)"
    )
    parser.add_argument("--yes", action="store_true", help="measure also where that takes long")
    parser.add_argument("--retry", action="store_true", help="run cells that failed again")


def run(given: argparse.Namespace, console: Console) -> None:
    from collections import Counter

    from farspan.app.preflight_checks import require_torch
    from farspan.domain.struct_files import load_yaml
    from farspan_studies.bench.matrix import Matrix
    from farspan_studies.bench.measuring import Results, measure

    require_torch()
    matrix = load_yaml(path_of(given.matrix), Matrix)
    results = Results(given.out or Path("bench") / matrix.name)
    rows = measure(matrix, results, console.write_line, agreed=given.yes, retry=given.retry)
    counts: dict[str, Any] = dict(Counter(row.status for row in rows))
    by_status = ", ".join(f"{count} {status}" for status, count in counts.items())
    console.write_line(
        f"{len(rows)} cells: {by_status}; {results.table}; look at them: "
        f"{command('report', results.folder)}"
    )
    console.answer(
        {"folder": str(results.folder), "table": str(results.table), "counts": counts, "rows": rows}
    )


def path_of(name: str) -> Path:
    """Return the file of a matrix. Raises Refusal (path-missing)."""
    folder = Path(str(resources.files("farspan_studies").joinpath("matrices")))
    ours = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    if Path(name).is_file() or name in ours:
        return Path(name) if Path(name).is_file() else ours[name]
    raise Refusal(
        "path-missing",
        what=f"there is no matrix {name!r}",
        where="farspan bench",
        fact=f"neither a file nor one of {', '.join(ours)}",
        remedy=advise(name, ours, option=command("bench")),
    )
